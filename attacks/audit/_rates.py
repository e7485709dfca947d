"""Exact test of claimed (epsilon, delta) pairs on the numbers of events in two kinds of runs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from attacks._binomial import lower, upper

_POINTS, _SPREAD, _SHARE = 48, 9.0, 0.1
"""Values of q at which the probability is computed in each of two passes, standard deviations of the counts that are
summed, and share of the level that the interval of q uses."""


def p_value(
    hits: int, runs: int, others: int, other_runs: int, claim: Sequence[tuple[float, float]], level: float
) -> float:
    """Return the p-value of the hypothesis that an event satisfies a claim, from counts of two kinds of runs.

    The hypothesis is p <= T(q) for the unknown probabilities p and q of the event, where T(q) is the smallest
    e^epsilon q + delta of the claim. The test statistic is the excess of the share of hits over T at the other share,
    divided by its standard error, with one hit and one miss added to each count. The p-value is 1 if there is no
    excess. Otherwise it is the largest probability, over q in a confidence interval and with p = T(q), that the
    statistic is at least as large as observed, plus the error probability of the interval. Two Clopper-Pearson bounds,
    one for each count, are valid as well, but refute a true claim far less often than allowed, because both must fail
    together.

    Args:
        hits, runs: number of events, and of runs in which the event seems more likely.
        others, other_runs: the same for the other runs.
        claim: pairs of epsilon and delta.
        level: error probability at which the p-value will be compared. The interval of q uses a tenth of it.

    Source: Berger and Boos, "P values maximized over a confidence set for the nuisance parameter" (JASA 1994).
    """
    from scipy.stats import binom

    error = _SHARE * level / 2
    low, high = float(lower(others, other_runs, error)), float(upper(others, other_runs, error))
    observed = _statistic(np.array([hits]), runs, np.array([others]), other_runs, claim)[0]
    if observed <= 0:
        return 1.0
    counts = np.arange(_window(low, other_runs)[0], _window(high, other_runs)[1] + 1)
    # For each count of the other runs, find the smallest number of hits whose statistic is at least the observed one.
    least, most = np.zeros(len(counts), dtype=np.int64), np.full(len(counts), runs + 1)
    while bool((least < most).any()):
        middle = (least + most) // 2
        reached = _statistic(middle, runs, counts, other_runs, claim) >= observed - 1e-9
        least, most = np.where(reached, least, np.minimum(middle + 1, most)), np.where(reached, middle, most)

    def chances(q: Any) -> Any:
        p = _largest(q, claim)[0][:, None]
        return (binom.pmf(counts, other_runs, q[:, None]) * binom.sf(least - 1, runs, p)).sum(1)

    q = np.sin(np.linspace(math.asin(low**0.5), math.asin(high**0.5), _POINTS)) ** 2
    best = int(chances(q).argmax())
    fine = np.linspace(q[max(0, best - 1)], q[min(_POINTS - 1, best + 1)], _POINTS)
    return min(1.0, float(chances(fine).max()) + 2 * error)


def _largest(q: Any, claim: Sequence[tuple[float, float]]) -> tuple[Any, Any]:
    """Return T(q), at most 1, and the factor e^epsilon of the pair that gives it."""
    factors, deltas = np.exp(np.minimum([pair[0] for pair in claim], 300.0)), np.array([pair[1] for pair in claim])
    every = factors[:, None] * q + deltas[:, None]
    return np.minimum(every.min(0), 1.0), factors[every.argmin(0)]


def _window(q: float, runs: int) -> tuple[int, int]:
    """Return the counts between which nearly all binomial counts with probability q lie."""
    half = _SPREAD * math.sqrt(runs * q * (1 - q)) + _SPREAD**2
    return max(0, math.floor(runs * q - half)), min(runs, math.ceil(runs * q + half))


def _statistic(hits: Any, runs: int, others: Any, other_runs: int, claim: Sequence[tuple[float, float]]) -> Any:
    """Return the standardized excess over the claim, for arrays of counts; it increases with `hits`."""
    p, q = (hits + 1) / (runs + 2), (others + 1) / (other_runs + 2)
    most, factor = _largest(q, claim)
    return (p - most) / np.sqrt(p * (1 - p) / runs + factor**2 * q * (1 - q) / other_runs)
