"""Privacy loss distributions of Poisson-subsampled Gaussians: an upper bound on epsilon that is nearly exact."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from scipy.signal import lfilter
from scipy.special import logsumexp, ndtr, ndtri

__all__ = ["pld_epsilon"]

Array = np.ndarray[Any, np.dtype[np.float64]]
Direction = Literal["removed", "added"]

_STEP, _FINE = 0.06, 0.002
"""Grid step in standard deviations of one release's loss, so that rounding adds at most a thousandth to its variance,
and of the sum's, whichever is less."""
_CELLS, _ONE = 1 << 22, 1 << 17
"""At most so many grid points for the sum, and for one release; where more were needed the grid is coarser, and the
bound sound but looser."""
_MISSED = 32.0
"""What falls outside the window weighs at most e^-32 of the (tilted) whole."""


def pld_epsilon(spends: Sequence[tuple[float, float, int]], delta: float) -> float:
    """An epsilon that is never below the true one, for the added and for the removed record alike.

    The privacy loss of each release is rounded to a grid such that its hockey-stick curve is exact on the grid and
    above the truth between (Doroshenko et al., "Connect the dots: tighter discrete approximations of privacy loss
    distributions", PoPETs 2022). Rounded losses add up, so their distribution is a convolution, which the FFT does.
    The distribution is tilted before (multiplied by e^{t loss}) so that the mass is where delta's tail is: the rounding
    of floating-point numbers is then small against any delta, not only against 1. Both directions are needed (Lebeda
    et al., "Avoiding pitfalls for privacy accounting of subsampled mechanisms under composition", 2024).

    Args:
        spends: (sigma, rate, count) each, all positive; noise standard deviation / sensitivity, Poisson rate, releases.
        delta: in (0, 1).
    """
    return max(_one_direction(spends, delta, direction) for direction in ("removed", "added"))


@dataclass(frozen=True)
class _Rounded:
    """One release's losses on the grid: `mass[i]` at (first + i) h, and `lost` at infinity; `count` such releases."""

    first: int
    mass: Array
    lost: float
    count: int


def _one_direction(spends: Sequence[tuple[float, float, int]], delta: float, direction: Direction) -> float:
    total = sum(count for _, _, count in spends)
    tail = delta * 1e-7 / total
    deviation = math.sqrt(sum(count * _variance(sigma, rate, direction) for sigma, rate, count in spends))
    spans = [np.ptp(_ends(sigma, rate, direction, tail)) for sigma, rate, _ in spends]
    h = max(min(_STEP / math.sqrt(total), _FINE) * deviation, float(max(spans)) / _ONE)
    deviation = max(deviation, h)
    while True:
        parts = [_rounded(sigma, rate, count, direction, h, tail) for sigma, rate, count in spends]
        tilt = _best_tilt(parts, h, delta, deviation)
        low, high = _window(parts, h, tilt, deviation)
        cells = max(high - low + 1, *(len(p.mass) for p in parts))
        if cells <= _CELLS:
            break
        h *= cells / _CELLS * 1.1
    return _epsilon(parts, h, tilt, low, int(cells), delta)


def _epsilon(parts: Sequence[_Rounded], h: float, tilt: float, low: int, cells: int, delta: float) -> float:
    """Convolve the tilted losses on a circle, and read off where the hockey-stick curve of the sum falls to delta."""
    size = 1 << (cells - 1).bit_length()
    spectrum = np.ones(size // 2 + 1, dtype=np.complex128)
    offset, height, lost = 0, 0.0, 0.0
    with np.errstate(under="ignore", divide="ignore", invalid="ignore"):
        for part in parts:
            places = (part.first + np.arange(len(part.mass))) * h
            logs = np.log(part.mass) + tilt * places
            norm = float(logsumexp(logs))
            spectrum *= np.power(np.fft.rfft(np.exp(logs - norm), size), part.count)
            offset, height = offset + part.count * part.first, height + part.count * norm
            lost += part.count * part.lost
    found = np.fft.irfft(spectrum, size)[(low - offset + np.arange(size)) % size]
    noise = 2 * float(np.maximum(-found, 0.0).sum()) + sum(p.count for p in parts) * 1e-15 + 10 * math.exp(-_MISSED)
    kept = max(0, -low)  # epsilon is not negative
    losses = (low + kept + np.arange(size - kept)) * h
    scale = np.exp(np.minimum(height - tilt * losses, 600.0))
    weights = np.maximum(found[kept:], 0.0) * scale
    above = np.cumsum(weights[::-1])[::-1]
    discounted = lfilter([1.0], [1.0, -math.exp(-h)], weights[::-1])[::-1]  # sum of w_j e^(l_k - l_j), j >= k
    curve = above - discounted + lost + noise * scale
    if not len(curve) or curve[-1] > delta:
        return math.inf
    over = np.flatnonzero(curve > delta)
    if not len(over):
        return 0.0
    k = int(over[-1]) + 1  # between two grid points the curve is a straight line in e^epsilon
    excess = above[k] + lost + noise * scale[k - 1] - delta
    inside = losses[k] + math.log(excess / discounted[k]) if 0 < excess < discounted[k] else losses[k]
    return float(max(losses[k - 1], inside))


def _log_ratio(x: Array, sigma: float, rate: float) -> Array:
    """log(M/N) at x, for N = N(0, sigma^2) and M = (1 - q) N + q N(1, sigma^2): increasing in x."""
    exponent = (2 * x - 1) / (2 * sigma**2)
    return exponent if rate == 1 else np.logaddexp(math.log1p(-rate), math.log(rate) + exponent)


def _where(ratio: Array, sigma: float, rate: float) -> Array:
    """The x at which log(M/N) is `ratio`; minus infinity where it is always more."""
    if rate == 1:
        return sigma**2 * ratio + 0.5
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        small = np.log1p(np.maximum(np.expm1(np.minimum(ratio, 1.0)) / rate, -1.0))
        large = ratio - math.log(rate) + np.log1p(-(1 - rate) * np.exp(-np.maximum(ratio, 0.5)))
    return sigma**2 * np.where(ratio < 1.0, small, large) + 0.5


def _between(low: Array, high: Array, mean: float, sigma: float) -> Array:
    """The mass of N(mean, sigma^2) in [low, high], to a relative precision in either tail."""
    a, b = (low - mean) / sigma, (high - mean) / sigma
    return np.where(a > 0, ndtr(-a) - ndtr(-b), ndtr(b) - ndtr(a))


def _variance(sigma: float, rate: float, direction: Direction) -> float:
    """Variance of one release's loss, by a fine sum over x; only the choice of the grid depends on it."""
    z = np.linspace(-9.0, 9.0, 4001)
    density = np.exp(-(z**2) / 2)
    points, weights = [sigma * z], [(1 - rate) * density if direction == "removed" else density]
    if direction == "removed":
        points, weights = [*points, sigma * z + 1], [*weights, rate * density]
    losses, mass = _log_ratio(np.concatenate(points), sigma, rate), np.concatenate(weights)
    mean = np.average(losses, weights=mass)
    return float(np.average((losses - mean) ** 2, weights=mass))


def _ends(sigma: float, rate: float, direction: Direction, tail: float) -> Array:
    """The losses between which one release lies, but for `tail` on either side."""
    far = -float(ndtri(tail))
    ends = _log_ratio(np.array([-far * sigma, 1 + far * sigma]), sigma, rate)
    return ends if direction == "removed" else -ends[::-1]


def _rounded(sigma: float, rate: float, count: int, direction: Direction, h: float, tail: float) -> _Rounded:
    """One release's losses, a cell's mass split between its two ends so that both worlds keep their mass of it."""
    low, high = _ends(sigma, rate, direction, tail)
    first, last = math.floor(low / h), math.ceil(high / h)
    edges = np.arange(first, last + 1) * h
    if direction == "removed":
        x = _where(edges, sigma, rate)
        below, beyond, left, right = (-np.inf, x[0]), (x[-1], np.inf), x[:-1], x[1:]
    else:
        x = _where(-edges, sigma, rate)
        below, beyond, left, right = (x[0], np.inf), (-np.inf, x[-1]), x[1:], x[:-1]

    def masses(start: Array, stop: Array) -> tuple[Array, Array]:
        plain = _between(start, stop, 0.0, sigma)
        mixed = (1 - rate) * plain + rate * _between(start, stop, 1.0, sigma)
        return (mixed, plain) if direction == "removed" else (plain, mixed)

    mine, other = masses(left, right)
    lower_ends = np.minimum(edges[:-1], 600.0)
    upper = np.clip((mine - np.exp(lower_ends) * other) / -math.expm1(-h), 0.0, mine)
    upper = np.where(edges[:-1] > 600.0, mine, upper)  # rounded up whole, where e^loss would overflow
    mass = np.zeros(len(edges))
    mass[:-1] += mine - upper
    mass[1:] += upper
    mass[0] += masses(*(np.array([v]) for v in below))[0][0]
    return _Rounded(first, mass, float(masses(*(np.array([v]) for v in beyond))[0][0]), count)


def _log_moment(parts: Sequence[_Rounded], h: float, t: float) -> float:
    """log E e^{t loss} of the whole."""
    with np.errstate(divide="ignore"):
        return sum(
            p.count * float(logsumexp(np.log(p.mass) + t * (p.first + np.arange(len(p.mass))) * h)) for p in parts
        )


def _best_tilt(parts: Sequence[_Rounded], h: float, delta: float, deviation: float) -> float:
    """Where Chernoff's bound on the loss that is exceeded with probability delta is smallest."""
    candidates = np.geomspace(0.01, 20.0, 48) * math.sqrt(-2 * math.log(delta)) / deviation
    bounds = [(_log_moment(parts, h, t) - math.log(delta)) / t for t in candidates]
    return float(candidates[int(np.argmin(bounds))])


def _window(parts: Sequence[_Rounded], h: float, tilt: float, deviation: float) -> tuple[int, int]:
    """Between which grid points the tilted sum lies but for e^-32 on either side, by Chernoff's bound."""
    at = _log_moment(parts, h, tilt)
    slopes = np.geomspace(0.02, 60.0, 24) / deviation
    high = min((_log_moment(parts, h, tilt + s) - at + _MISSED) / s for s in slopes)
    low = max(-(_log_moment(parts, h, tilt - s) - at + _MISSED) / s for s in slopes)
    return math.floor(low / h), math.ceil(high / h)
