"""Privacy accounting by privacy loss random variables (PRV) for Poisson-subsampled Gaussian mechanisms."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

__all__ = ["prv_epsilon"]


def prv_epsilon(
    spends: Sequence[tuple[float, float, int]], delta: float, *, width: float, eps_error: float, delta_error: float
) -> float:
    """Compute the PRV upper bound on the total epsilon of several releases.

    The result is the larger of two bounds: the bound for adding a record and the bound for removing a record.

    Papers: Gopi, Lee and Wutschitz, "Numerical composition of differential privacy" (NeurIPS 2021). Lebeda et al.,
    "Avoiding pitfalls for privacy accounting of subsampled mechanisms under composition" (2024), show that both
    bounds are needed. Opacus' `PRVAccountant` computes only the bound for removing a record. The numerical routines
    are those of Opacus.

    Args:
        spends: noise multiplier, sample rate and number of releases, as (sigma, rate, count) tuples of positive
            numbers; see `compose`.
        delta: delta at which epsilon is computed, in (0, 1).
        width: half-width of the interval [-width, width] in which privacy losses are tracked.
        eps_error, delta_error: numerical errors in epsilon and delta that are allowed. The bound includes both errors,
            so it exceeds the true value by at most about these amounts.
    """
    import numpy as np
    from opacus.accountants.analysis import prv as pieces

    counts = [count for _, _, count in spends]
    mesh = eps_error / np.sqrt(sum(counts) * np.log(12 / delta_error) / 2)
    domain = pieces.Domain.create_aligned(-width, width, mesh)
    worst = 0.0
    with np.errstate(all="ignore"):
        for direction in (_Removed, _Added):
            losses = [direction(rate, sigma) for sigma, rate, _ in spends]
            cut = [pieces.TruncatedPrivacyRandomVariable(loss, domain.t_min, domain.t_max) for loss in losses]
            whole = pieces.compose_heterogeneous(
                dprvs=[pieces.discretize(loss, domain) for loss in cut], num_self_compositions=counts
            )
            worst = max(worst, float(whole.compute_epsilon(delta, delta_error, eps_error)[2]))
    return worst


class _Loss:
    """Distribution of the privacy loss of one step of the Poisson-subsampled Gaussian mechanism.

    Let q be the sample rate. Two datasets are compared, which differ in one record. Without this record, the step's
    output x has the density N of a normal distribution with mean 0 and standard deviation sigma. With it, the density
    of x is M = (1 - q) N + q N', where N' is the same normal density with mean 1. The privacy loss is the logarithm of
    the ratio of these two densities at x. The ratio M/N at x is

        1 - q + q exp((2x - 1) / (2 sigma^2)).

    `_point(r)` is the x at which this ratio is r, or minus infinity if there is no such x. `cdf(t)` is the probability
    that the loss is at most t. The two subclasses differ in the density from which x is drawn.
    """

    def __init__(self, rate: float, sigma: float) -> None:
        self._rate, self._sigma = rate, sigma

    def _point(self, ratio: Any) -> Any:
        import numpy as np

        above = np.maximum((ratio - 1 + self._rate) / self._rate, 0.0)
        return self._sigma**2 * np.log(above) + 0.5

    def _below(self, x: Any, mean: float) -> Any:
        from scipy.special import ndtr

        return ndtr((x - mean) / self._sigma)


class _Removed(_Loss):
    """Privacy loss of removing a record.

    Let M be the density of the mechanism's output x with the record, and N the density without the record (see
    `_Loss`). The output is drawn from M, and the loss is log(M(x) / N(x)). The loss increases with x.
    """

    def cdf(self, t: Any) -> Any:
        import numpy as np

        x, q = self._point(np.exp(t)), self._rate
        return (1 - q) * self._below(x, 0.0) + q * self._below(x, 1.0)


class _Added(_Loss):
    """Privacy loss of adding a record.

    Let N be the density of the mechanism's output x without the record, and M the density with the record (see
    `_Loss`). The output is drawn from N, and the loss is log(N(x) / M(x)). The loss decreases with x.
    """

    def cdf(self, t: Any) -> Any:
        import numpy as np

        return self._below(-self._point(np.exp(-t)), 0.0)
