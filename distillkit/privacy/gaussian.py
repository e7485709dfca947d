"""The Gaussian mechanism in closed form."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from distillkit import check
from distillkit.privacy.errors import NotAccountable

__all__ = ["checked_delta", "gaussian_delta", "gaussian_epsilon", "gaussian_sigma", "sigma_for", "smallest"]


def _log_phi(x: float) -> float:
    return float(torch.special.log_ndtr(torch.tensor(x, dtype=torch.float64)))


def gaussian_delta(sigma: float, epsilon: float) -> float:
    """The exact delta of one Gaussian release of sensitivity 1 at `epsilon`.

    delta = Phi(-epsilon sigma + 1 / (2 sigma)) - e^epsilon Phi(-epsilon sigma - 1 / (2 sigma)).

    Paper: Balle and Wang, "Improving the Gaussian mechanism for differential privacy" (ICML 2018), theorem 8.

    Args:
        sigma: noise standard deviation / sensitivity, > 0. K releases of sigma_k are one of (sum 1/sigma_k^2)^-1/2.
        epsilon: >= 0.
    """
    check.real_number(sigma, "sigma", above=0.0)
    check.real_number(epsilon, "epsilon", least=0.0)
    first = _log_phi(-epsilon * sigma + 0.5 / sigma)
    second = epsilon + _log_phi(-epsilon * sigma - 0.5 / sigma)
    return math.exp(first) * -math.expm1(min(0.0, second - first))


def gaussian_epsilon(sigma: float, delta: float) -> float:
    """The exact epsilon of one Gaussian release of sensitivity 1 at `delta` (see `gaussian_delta`), rounded up."""
    checked_delta(delta)
    if gaussian_delta(sigma, 0.0) <= delta:
        return 0.0
    high = 1.0
    while gaussian_delta(sigma, high) > delta:
        high *= 2
    return smallest(lambda e: gaussian_delta(sigma, e) <= delta, 0.0, high)


def gaussian_sigma(epsilon: float, delta: float, *, releases: int = 1) -> float:
    """The smallest sigma of each of `releases` Gaussian releases that together cost at most (epsilon, delta)."""
    check.real_number(epsilon, "epsilon", above=0.0)
    check.positive_int(releases, "releases")
    return math.sqrt(releases) * sigma_for(lambda s: gaussian_epsilon(s, delta), epsilon, 1e-12)


def sigma_for(cost: Callable[[float], float], wanted: float, tolerance: float) -> float:
    """The smallest sigma whose falling `cost` is at most `wanted`, rounded up by a relative `tolerance`."""
    high = 1.0
    while cost(high) > wanted:
        high *= 2
    return smallest(lambda s: cost(s) <= wanted, high / 2 if high > 1 else 1e-4, high, tolerance=tolerance)


def smallest(good: Callable[[float], bool], low: float, high: float, *, tolerance: float = 1e-13) -> float:
    """The smallest number in (low, high] for which the monotone `good` holds, rounded up."""
    while high - low > tolerance * high:
        middle = (low + high) / 2
        if not low < middle < high:
            break
        low, high = (low, middle) if good(middle) else (middle, high)
    return high


def checked_delta(delta: float) -> float:
    """Return `delta` if it is in (0, 1), else raise NotAccountable."""
    check.real_number(delta, "delta")
    if not 0 < delta < 1:
        raise NotAccountable(f"delta must be in (0, 1), well below one over the number of records, got {delta:g}")
    return float(delta)
