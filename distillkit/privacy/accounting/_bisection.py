"""Bisection for the smallest number that meets a condition."""

from __future__ import annotations

from collections.abc import Callable

__all__ = ["bisect", "smallest_sigma"]


def smallest_sigma(cost: Callable[[float], float], wanted: float, tolerance: float) -> float:
    """The smallest sigma whose `cost`, an epsilon that falls with sigma, is at most `wanted`.

    Args:
        cost: maps a sigma to an epsilon.
        wanted: the epsilon that may be spent.
        tolerance: relative, by which sigma is rounded up at most.
    """
    high = 1.0
    while cost(high) > wanted:
        high *= 2
    return bisect(lambda s: cost(s) <= wanted, high / 2 if high > 1 else 1e-4, high, tolerance=tolerance)


def bisect(good: Callable[[float], bool], low: float, high: float, *, tolerance: float = 1e-13) -> float:
    """The smallest number in (`low`, `high`] for which `good` holds, by bisection, rounded up so that it does hold.

    Args:
        good: False below some number and True above it; True at `high`.
        low, high: between which the number lies.
        tolerance: relative, by which the result is rounded up at most.
    """
    while high - low > tolerance * high:
        middle = (low + high) / 2
        if not low < middle < high:
            break
        low, high = (low, middle) if good(middle) else (middle, high)
    return high
