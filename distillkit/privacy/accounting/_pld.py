"""Privacy loss distributions, by Google's dp-accounting where it is installed."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence

__all__ = ["dp_accounting_installed", "pld_epsilon"]


def dp_accounting_installed() -> bool:
    """Whether dp-accounting can be imported here; `pip install "distillkit[pld]"` brings it."""
    return importlib.util.find_spec("dp_accounting") is not None


def pld_epsilon(spends: Sequence[tuple[float, float, int]], delta: float) -> float:
    """dp-accounting's pessimistic epsilon for one added or removed record: an upper bound that is nearly exact.

    Paper: Doroshenko et al., "Connect the dots: tighter discrete approximations of privacy loss distributions" (PoPETs
    2022). It takes fractions of a second at epsilon 1, and grows with epsilon (half a minute at some thousands).

    Args:
        spends: (sigma, rate, count) each, all positive.
        delta: in (0, 1), at which epsilon is wanted.
    """
    from dp_accounting import GaussianDpEvent, NeighboringRelation, PoissonSampledDpEvent
    from dp_accounting.pld import PLDAccountant

    accountant = PLDAccountant(NeighboringRelation.ADD_OR_REMOVE_ONE)
    for sigma, rate, count in spends:
        accountant.compose(PoissonSampledDpEvent(rate, GaussianDpEvent(sigma)), count)
    return float(accountant.get_epsilon(delta))
