"""Bisection for the smallest number that meets a condition."""

from __future__ import annotations

from collections.abc import Callable


def smallest_sigma(epsilon_of: Callable[[float], float], epsilon: float, tolerance: float) -> float:
    """Return the smallest noise multiplier sigma for which `epsilon_of(sigma)` is at most `epsilon`.

    Args:
        epsilon_of: function that maps sigma to epsilon and decreases with sigma.
        epsilon: largest allowed epsilon.
        tolerance: largest relative amount by which sigma is rounded up.
    """
    high = 1.0
    while epsilon_of(high) > epsilon:
        high *= 2
    return bisect(lambda s: epsilon_of(s) <= epsilon, high / 2 if high > 1 else 1e-4, high, tolerance=tolerance)


def bisect(condition: Callable[[float], bool], low: float, high: float, *, tolerance: float = 1e-13) -> float:
    """Return the smallest number in (`low`, `high`] that meets `condition`, up to a tolerance.

    The result is rounded up, so it always meets the condition.

    Args:
        condition: function that returns False below some number and True above it. It must return True at `high`.
        low, high: bounds of the result.
        tolerance: largest relative amount by which the result is rounded up.
    """
    while high - low > tolerance * high:
        middle = (low + high) / 2
        low, high = (low, middle) if condition(middle) else (middle, high)
    return high
