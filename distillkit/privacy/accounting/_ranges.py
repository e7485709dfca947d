"""Ranges of sigma, delta, clips and numbers of releases for which the accountants are exact enough."""

from __future__ import annotations

import math

from distillkit._utils import check
from distillkit.privacy.errors import NotAccountable

_LEAST_SIGMA, _MOST_SIGMA = 1e-4, 1e9
"""Range of sigma in which floating-point numbers are accurate enough for the accountants."""

MOST_RELEASES = 10**12
"""Largest number of releases in one event."""


LEAST_CLIP, MOST_CLIP = 1e-12, 1e30
"""Range of clip norms, so that squares near the clip neither underflow nor overflow."""


def check_clip(clip: float, name: str = "clip", *, infinite: bool = False) -> float:
    """Return a clip norm as a float if norms of values near the clip are accurate, or if it may be infinite and is.

    A number whose square underflows in float64 is below 1e-154, so even 10^8 such numbers are far shorter than the
    least clip.

    Raises:
        TypeError, ValueError: `clip` is not a number, or is not in [1e-12, 1e30].
    """
    if infinite and clip == math.inf:
        return math.inf
    return check.real_number(clip, name, least=LEAST_CLIP, most=MOST_CLIP)


def check_delta(delta: float) -> float:
    """Return `delta` if it is in (0, 1).

    Raises:
        NotAccountable: `delta` is outside (0, 1), where no accountant applies.
        TypeError: `delta` is not a number.
    """
    check.real_number(delta, "delta")
    if not 0 < delta < 1:
        raise NotAccountable(f"delta must be in (0, 1), well below one over the number of records, got {delta:g}")
    return float(delta)


def check_sigma(sigma: float, name: str = "sigma") -> float:
    """Return `sigma` as a float if it is 0 (no noise) or lies in the range that the accountants cover.

    Args:
        sigma: noise standard deviation / sensitivity.
        name: name of the argument, used in error messages.

    Raises:
        NotAccountable: `sigma` is positive, but too small or too large for the accountants.
        TypeError, ValueError: `sigma` is not a number, or is negative or not finite.
    """
    sigma = check.real_number(sigma, name, least=0.0)
    if sigma and not _LEAST_SIGMA <= sigma <= _MOST_SIGMA:
        raise NotAccountable(
            f"{name} must be in [{_LEAST_SIGMA:g}, {_MOST_SIGMA:g}], or 0 for no noise and no guarantee, got "
            f"{sigma:g}: no accountant is exact enough there"
        )
    return sigma


def power_of_two(value: float) -> float:
    """Return the largest power of two that is at most `value`, which is positive."""
    return math.ldexp(1.0, math.frexp(value)[1] - 1)
