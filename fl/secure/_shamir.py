"""Secret sharing: n shares of a number, of which any t give it back and fewer say nothing.

Shamir, "How to share a secret", CACM 22(11), 1979: the secret is the value at 0 of a polynomial of degree t - 1 whose
other coefficients are drawn uniformly from a prime field; a share is its value at another point. For every choice of
t - 1 shares and every secret there is exactly one such polynomial, so t - 1 shares are the same draw whatever it is.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence

from distillkit._utils import check

__all__ = ["PRIME", "coefficients", "recover", "split"]

PRIME = 2**256 + 297
"""The smallest prime above all 256-bit keys."""


def split(
    secret: int,
    points: Sequence[int],
    threshold: int,
    *,
    prime: int = PRIME,
    draw: Callable[[int], int] = secrets.randbelow,
) -> list[int]:
    """One share of a secret for each point.

    Args:
        secret: from 0 to `prime` - 1.
        points: where the polynomial is read, each once, from 1 to `prime` - 1.
        threshold: t, how many shares give the secret back.
        prime: of the field.
        draw: gives a number from 0 to its argument - 1, uniformly and in secret.

    Raises:
        ValueError: a threshold that there are not so many points for; a point twice, or none of the field's; or a
            secret outside the field.
    """
    check.positive_int(threshold, "threshold", most=len(points))
    if len(set(points)) < len(points) or not all(0 < x < prime for x in points):
        raise ValueError(f"points must be different numbers from 1 to the prime - 1, got {list(points)[:5]}")
    if not 0 <= secret < prime:
        raise ValueError("secret must be a number of the field, from 0 to the prime - 1")
    polynomial = [secret, *(draw(prime) for _ in range(threshold - 1))]
    return [_value(polynomial, x, prime) for x in points]


def recover(shares: Mapping[int, int], *, prime: int = PRIME) -> int:
    """The value at 0 of the polynomial through these shares: the secret, if there are enough and all are true.

    Args:
        shares: point -> share; exactly as many as the threshold, for more are more work and say the same.
        prime: of the field.

    Raises:
        ValueError: no shares.
    """
    if not shares:
        raise ValueError("shares must hold at least one, got none")
    points = list(shares)
    return sum(shares[x] * c for x, c in zip(points, coefficients(points, prime=prime))) % prime


def coefficients(points: Sequence[int], *, prime: int = PRIME) -> list[int]:
    """What the share at each point counts in the secret: the Lagrange polynomials of these points at 0.

    Args:
        points: whose shares are there, each once.
        prime: of the field.
    """
    found = []
    for x in points:
        above, below = 1, 1
        for other in points:
            if other != x:
                above, below = above * other % prime, below * (other - x) % prime
        found.append(above * pow(below, -1, prime) % prime)
    return found


def _value(polynomial: Sequence[int], x: int, prime: int) -> int:
    found = 0
    for coefficient in reversed(polynomial):
        found = (found * x + coefficient) % prime
    return found
