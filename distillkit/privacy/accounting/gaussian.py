"""Closed-form accounting for the Gaussian mechanism: delta and epsilon of a release, and sigma for a target epsilon."""

from __future__ import annotations

import math

import torch

from distillkit._utils import check
from distillkit.privacy.accounting._bisection import bisect, smallest_sigma
from distillkit.privacy.accounting._ranges import check_delta


def _log_phi(x: float) -> float:
    return float(torch.special.log_ndtr(torch.tensor(x, dtype=torch.float64)))


def gaussian_delta(sigma: float, epsilon: float) -> float:
    """Return the exact delta of one Gaussian release of sensitivity 1 at a given epsilon (the privacy profile).

    delta = Phi(-epsilon sigma + 1 / (2 sigma)) - e^epsilon Phi(-epsilon sigma - 1 / (2 sigma)), where Phi is the
    cumulative distribution function of the standard normal distribution.

    Paper: Balle and Wang, "Improving the Gaussian mechanism for differential privacy" (ICML 2018), theorem 8.

    Args:
        sigma: noise standard deviation / sensitivity, > 0. K releases with sigma_1, ..., sigma_K are equivalent to one
            release with sigma = (sum_k 1/sigma_k^2)^-1/2.
        epsilon: epsilon at which delta is computed, >= 0.

    Raises:
        TypeError, ValueError: an argument has the wrong type or is out of range.
    """
    check.real_number(sigma, "sigma", above=0.0)
    check.real_number(epsilon, "epsilon", least=0.0)
    first = _log_phi(-epsilon * sigma + 0.5 / sigma)
    second = epsilon + _log_phi(-epsilon * sigma - 0.5 / sigma)
    return math.exp(first) * -math.expm1(min(0.0, second - first))


def gaussian_epsilon(sigma: float, delta: float) -> float:
    """Return the exact epsilon, rounded up, of one Gaussian release of sensitivity 1. Inverse of `gaussian_delta`.

    Args:
        sigma: noise standard deviation / sensitivity, > 0.
        delta: delta at which epsilon is computed, in (0, 1).

    Raises:
        NotAccountable: `delta` is outside (0, 1).
        TypeError, ValueError: an argument has the wrong type or is out of range.
    """
    check_delta(delta)
    if gaussian_delta(sigma, 0.0) <= delta:
        return 0.0
    high = 1.0
    while gaussian_delta(sigma, high) > delta:
        high *= 2
    return bisect(lambda e: gaussian_delta(sigma, e) <= delta, 0.0, high)


def gaussian_sigma(epsilon: float, delta: float, *, releases: int = 1) -> float:
    """Compute the smallest sigma at which a number of Gaussian releases together cost at most (epsilon, delta).

    Sigma is the noise standard deviation divided by the sensitivity. All records take part in each release. For a
    sample rate below 1, use `plan_noise`.

    Args:
        epsilon: target epsilon of all releases together, > 0.
        delta: target delta, in (0, 1).
        releases: number of releases, each with the returned sigma.

    Raises:
        NotAccountable: `delta` is outside (0, 1).
        TypeError, ValueError: an argument has the wrong type or is out of range.
    """
    check.real_number(epsilon, "epsilon", above=0.0)
    check.positive_int(releases, "releases")
    return math.sqrt(releases) * smallest_sigma(lambda s: gaussian_epsilon(s, delta), epsilon, 1e-12)
