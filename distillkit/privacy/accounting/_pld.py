"""Accounting of releases by RDP moments, and by a privacy loss distribution (PLD) on one grid for all kinds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

_STEP, _POINTS, _SUPPORT, _LOSS, _PART = 0.1, 1 << 20, 1 << 18, 600.0, 32
"""Step of the grid in standard deviations of one release's loss; most points of the grid, and of one release's part;
largest loss of one release; number of kinds that are discretized together."""

_MASSES = 1 << 26
"""Largest number of points of all kinds' parts together: half a gigabyte."""


def moments(spends: Sequence[tuple[float, float, int]], orders: Sequence[int]) -> Any:
    """Return log E[(M / N)^order] of all releases together for each order: (order - 1) times their Renyi divergence.

    M and N are the densities of a release with and without a record.

    Paper: Mironov, Talwar and Zhang, "Renyi differential privacy of the sampled Gaussian mechanism" (2019), section
    3.3, whose sum over binomial coefficients holds at integer orders.

    Args:
        spends: (sigma, rate, count) tuples, as for `compose`; sigma and rate are positive.
        orders: integers of at least 2.

    Returns:
        NumPy array, float64 [orders].
    """
    import numpy as np
    from scipy.special import gammaln, logsumexp, xlog1py, xlogy

    sigma, rate, count = (np.array(column, dtype=float)[:, None] for column in zip(*spends))
    found = []
    for order in orders:
        k = np.arange(order + 1)
        binomial = gammaln(order + 1) - gammaln(k + 1) - gammaln(order - k + 1)
        terms = binomial + xlog1py(order - k, -rate) + xlogy(k, rate) + k * (k - 1) / (2 * sigma**2)
        found.append(float(count[:, 0] @ np.maximum(logsumexp(terms, axis=1), 0.0)))
    return np.array(found)


def pld_epsilon(spends: Sequence[tuple[float, float, int]], delta: float) -> float:
    """Return an upper bound on the total epsilon of several releases, or infinity if the grid would be too large.

    The privacy losses of all kinds of releases are discretized on one grid. Each interval's mass moves to its two ends
    so that its probability under both densities remains, which can only increase the total loss. The discrete
    distributions are composed by one Fourier transform each. The bound covers both directions, adding and removing a
    record; it is typically less than 0.5 % above the exact epsilon.

    Papers: Koskela, Jälkö and Honkela, "Computing tight differential privacy guarantees using FFT" (AISTATS 2020);
    Doroshenko et al., "Connect the dots" (PoPETs 2022), for the discretization. Deviation: masses beyond the grid are
    bounded by Chernoff's inequality on the discrete distributions, and are added to delta.

    Args:
        spends: (sigma, rate, count) tuples, as for `compose`; sigma and rate are positive.
        delta: delta at which epsilon is computed, in (0, 1).
    """
    import numpy as np

    sigma, rate, count = (np.array(column, dtype=float) for column in zip(*spends))
    tail = delta / (4000 * count.sum())
    with np.errstate(all="ignore"):
        deviation = math.sqrt(float(count @ _square_losses(sigma, rate) / count.sum()))
        step = _STEP * deviation
        return max(_direction(sigma, rate, count, delta, tail, step, removed) for removed in (True, False))


def _loss(x: Any, sigma: Any, rate: Any) -> Any:
    """Return log(M(x) / N(x)) of outputs x.

    N is a normal density with mean 0 and standard deviation sigma: that of the output without the record. With it, the
    density is M = (1 - rate) N + rate N', where N' has mean 1. So M / N = 1 - rate + rate exp((2x - 1) / (2 sigma^2)).
    """
    import numpy as np

    exponent = (2 * x - 1) / (2 * sigma**2)
    with np.errstate(all="ignore"):
        return np.where(
            exponent > 30, exponent + np.log(rate + (1 - rate) * np.exp(-exponent)),
            np.log1p(rate * np.expm1(np.minimum(exponent, 30.0))),
        )  # fmt: skip


def _square_losses(sigma: Any, rate: Any) -> Any:
    """Return the mean square of each kind's loss, approximately; it determines the step of the grid."""
    import numpy as np

    z = np.linspace(-8, 8, 321)
    weight = np.exp(-(z**2) / 2) / np.exp(-(z**2) / 2).sum()
    without, with_record = (
        (_loss(z * sigma[:, None] + mean, sigma[:, None], rate[:, None]) ** 2) @ weight for mean in (0.0, 1.0)
    )
    return (1 - rate) * without + rate * with_record


def _direction(sigma: Any, rate: Any, count: Any, delta: float, tail: float, step: float, removed: bool) -> float:
    """Return `pld_epsilon` for removing or for adding a record."""
    import numpy as np
    from scipy import fft

    parts, lost, most = [], 0.0, min(_SUPPORT, _MASSES // len(sigma))
    for begin in range(0, len(sigma), _PART):  # kinds of similar sigma have similar ranges of losses
        own = slice(begin, begin + _PART)
        found = _discrete(sigma[own, None], rate[own, None], tail, step, removed, most)
        if found is None:
            return math.inf
        first, pmf, beyond = found
        parts.append((first, pmf, count[own].astype(int)))
        lost += float(count[own] @ beyond)
    # Chernoff: the mass above `top` is at most exp(K(l) - l top) for every exponent l > 0, with cumulants K.
    exponents = np.outer([1.0, -1.0], 2.0 ** np.arange(-19, 7)).flatten() / step
    cumulants = 0.0
    for first, pmf, own in parts:
        losses = np.arange(first, first + pmf.shape[1]) * step
        generating = np.stack([pmf @ np.exp(losses * exponent) for exponent in exponents], axis=1)
        cumulants = cumulants + own @ np.log(generating)
    bounds = (cumulants + math.log(4000 / delta)) / exponents
    top, bottom = np.nanmin(bounds[exponents > 0]), np.nanmax(bounds[exponents < 0])
    least = math.floor(bottom / step) - 1
    points = fft.next_fast_len(int(min(math.ceil(top / step) + 2 - least, 2 * _POINTS)), real=True)
    rounding = 1e-15 * (points + 4 * count.sum())
    if points > _POINTS or rounding > delta / 2:
        return math.inf
    composed = np.maximum(fft.irfft(_power(parts, points), points), 0.0)
    places = np.arange(least, least + points)
    return _epsilon(places * step, composed[places % points], delta - lost - delta / 1000 - rounding)


def _discrete(sigma: Any, rate: Any, tail: float, step: float, removed: bool, most: int) -> tuple[int, Any, Any] | None:
    """Return the discrete losses of a release of each kind, or None if they need too many points."""
    import numpy as np
    from scipy.special import ndtri

    reach = -ndtri(tail / 2) * sigma
    ends = _loss(np.stack([-reach, 1 + reach]), sigma, rate)
    low, high = (ends[0].min(), ends[1].max()) if removed else (-ends[1].max(), -ends[0].min())
    if not max(-low, high) < min(_LOSS, most * step):
        return None
    first, last = math.floor(low / step), math.ceil(high / step)
    grid = np.arange(first, last + 1) * step
    # The outputs x, or -x if a record is added, at which the loss reaches each point of the grid; both increase.
    x = sigma**2 * np.log(np.maximum(1 + np.expm1(grid if removed else -grid) / rate, 0.0)) + 0.5
    sign = 1.0 if removed else -1.0
    with_record, without = (_masses(sign * x, sign * mean, sigma) for mean in (1.0, 0.0))
    mixture = tuple((1 - rate) * b + rate * a for a, b in zip(with_record, without))
    (inside, beyond), (other, _) = (mixture, without) if removed else (without, mixture)
    # Split each interval's mass: p + p' = mass under the first density, p e^-t + p' e^-t' = mass under the second.
    upper = np.clip((inside - other * np.exp(grid[:-1])) / -math.expm1(-step), 0.0, inside)
    pmf = np.zeros((len(sigma), len(grid)))
    pmf[:, :-1] = inside - upper
    pmf[:, 1:] += upper
    pmf[:, 0] += np.maximum(1 - pmf.sum(1) - beyond[:, 0], 0.0)  # losses below the grid
    return first, pmf, beyond[:, 0]


def _power(parts: Sequence[tuple[int, Any, Any]], points: int) -> Any:
    """Return the Fourier transform, at `points` points, of the composition of discrete losses.

    It is a product of factors of at most 1. Where some of them already make it negligible, the others are left out.
    """
    import numpy as np
    from scipy import fft

    def all_frequencies(first: int, rows: Any) -> Any:
        begin = first % points
        padded = np.zeros((len(rows), -(-(begin + rows.shape[1]) // points) * points))
        padded[:, begin : begin + rows.shape[1]] = rows
        return fft.rfft(padded.reshape(len(rows), -1, points).sum(1))

    bound = np.ones(points // 2 + 1)
    for first, rows, count in parts:
        bound *= (np.abs(all_frequencies(first, rows[::16])) ** count[::16, None]).prod(0)
    needed = np.nonzero(bound > 1e-20)[0]
    few = len(needed) * max(rows.shape[1] for _, rows, _ in parts) < 16 * points
    bits = int(max(count.max() for _, _, count in parts)).bit_length()
    products = np.ones((bits, len(needed) if few else len(bound)), dtype=complex)
    for first, rows, count in parts:
        if few:
            turns = np.outer(np.arange(first, first + rows.shape[1]), needed * (-2 * math.pi / points))
            transformed = rows @ np.cos(turns) + 1j * (rows @ np.sin(turns))
        else:
            transformed = all_frequencies(first, rows)
        for bit in range(bits):  # products[bit]: of the kinds with this bit in their count
            products[bit] *= transformed[(count >> bit) & 1 == 1].prod(0)
    total = products[-1]
    for product in products[-2::-1]:
        total = total * total * product
    bound = np.zeros(len(bound), dtype=complex)
    bound[needed if few else slice(None)] = total
    return bound


def _masses(x: Any, mean: float, sigma: Any) -> tuple[Any, Any]:
    """Return the masses of a normal density between the points x, and beyond the last point."""
    import numpy as np
    from scipy.special import ndtr

    z = (x - mean) / sigma
    rest = ndtr(-np.abs(z))
    falls = z > 0
    change = np.where(falls[:, :-1], rest[:, :-1] - rest[:, 1:], rest[:, 1:] - rest[:, :-1])
    crossing = falls[:, 1:] & ~falls[:, :-1]
    inside = np.where(crossing, 1 - rest[:, 1:] - rest[:, :-1], change)
    return np.maximum(inside, 0.0), ndtr(-z[:, -1:])


def _epsilon(losses: Any, masses: Any, delta: float) -> float:
    """Return the smallest epsilon >= 0 at which the sum of masses * (1 - exp(epsilon - losses)) is at most `delta`."""
    import numpy as np

    if delta <= 0:
        return math.inf
    keep = losses > 0
    losses, masses = losses[keep], masses[keep]
    mass = np.cumsum(masses[::-1])[::-1]
    shrunk = np.cumsum((masses * np.exp(-losses))[::-1])[::-1]
    # Between the losses before and at i, delta(epsilon) = mass[i] - exp(epsilon) shrunk[i].
    before = np.concatenate([[0.0], losses[:-1]])
    reached = np.nonzero(mass - np.exp(np.minimum(before, 700.0)) * shrunk > delta)[0]
    if not len(reached):
        return 0.0
    i = int(reached[-1])
    return float(min(max(math.log((mass[i] - delta) / shrunk[i]), before[i]), losses[i]))
