"""Secret sharing: split a number into n shares. Any t shares recover the number, and fewer shares reveal nothing.

Shamir, "How to share a secret", CACM 22(11), 1979. The secret is the value at 0 of a polynomial of degree t - 1 over a
prime field. The other coefficients are drawn uniformly. A share is the value of the polynomial at another point. For
every t - 1 shares and every secret there is exactly one such polynomial, so t - 1 shares have the same distribution for
every secret.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence

from distillkit._utils import check

PRIME = 2**256 + 297
"""Smallest prime number above 2^256, so that every 256-bit key is a number of the field."""


def split(
    secret: int,
    points: Sequence[int],
    threshold: int,
    *,
    prime: int = PRIME,
    draw: Callable[[int], int] = secrets.randbelow,
) -> list[int]:
    """Split a secret into one share for each point: the value of a random polynomial at this point.

    The value of the polynomial at 0 is the secret.

    Args:
        secret: the number to split, from 0 to `prime` - 1.
        points: points at which the polynomial is evaluated: distinct numbers from 1 to `prime` - 1.
        threshold: t, the number of shares that recover the secret.
        prime: order of the field.
        draw: function of n that returns a secret random number, drawn uniformly from 0 to n - 1.

    Raises:
        ValueError: the threshold exceeds the number of points, a point is repeated, a point is not from 1 to
            `prime` - 1, or the secret is outside the field.
    """
    check.positive_int(threshold, "threshold", most=len(points))
    if len(set(points)) < len(points) or not all(0 < x < prime for x in points):
        raise ValueError(f"points must be different numbers from 1 to prime - 1; got {list(points)[:5]}")
    if not 0 <= secret < prime:
        raise ValueError("secret must be a number of the field, from 0 to prime - 1")
    polynomial = [secret, *(draw(prime) for _ in range(threshold - 1))]
    return [_evaluate(polynomial, x, prime) for x in points]


def lagrange_coefficients(points: Sequence[int], *, prime: int = PRIME) -> list[int]:
    """Return one coefficient for each share, such that the sum of coefficient times share is the secret.

    The coefficients are the values of the Lagrange polynomials at 0.
    """
    found = []
    for x in points:
        above, below = 1, 1
        for other in points:
            if other != x:
                above, below = above * other % prime, below * (other - x) % prime
        found.append(above * pow(below, -1, prime) % prime)
    return found


def _evaluate(polynomial: Sequence[int], x: int, prime: int) -> int:
    found = 0
    for coefficient in reversed(polynomial):
        found = (found * x + coefficient) % prime
    return found
