"""Accounting by privacy loss distributions (PLD), with Google's dp-accounting if it is installed."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence

__all__ = ["dp_accounting_installed", "pld_epsilon"]


def dp_accounting_installed() -> bool:
    """Return whether dp-accounting is installed; `pip install "distillkit[pld]"` installs it."""
    return importlib.util.find_spec("dp_accounting") is not None


def pld_epsilon(spends: Sequence[tuple[float, float, int]], delta: float) -> float:
    """Compute a nearly exact upper bound on the total epsilon of several releases, with the package dp-accounting.

    Neighbors differ by one added or removed record.

    Paper: Doroshenko et al., "Connect the dots: tighter discrete approximations of privacy loss distributions" (PoPETs
    2022). The computation takes longer for a larger epsilon.

    Args:
        spends: noise multiplier, sample rate and number of releases, as (sigma, rate, count) tuples of positive
            numbers; see `compose`.
        delta: delta at which epsilon is computed, in (0, 1).
    """
    from dp_accounting import GaussianDpEvent, NeighboringRelation, PoissonSampledDpEvent
    from dp_accounting.pld import PLDAccountant

    accountant = PLDAccountant(NeighboringRelation.ADD_OR_REMOVE_ONE)
    for sigma, rate, count in spends:
        accountant.compose(PoissonSampledDpEvent(rate, GaussianDpEvent(sigma)), count)
    return float(accountant.get_epsilon(delta))
