"""Total epsilon of several Gaussian releases.

Epsilon has a closed form at sample rate 1, and is computed numerically at lower rates.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from distillkit._utils import check
from distillkit.privacy.accounting._pld import moments, pld_epsilon
from distillkit.privacy.accounting._ranges import MOST_RELEASES, check_delta, check_sigma
from distillkit.privacy.accounting.gaussian import gaussian_epsilon
from distillkit.privacy.errors import NotAccountable

Spend = tuple[float, float, int]
"""(sigma, rate, count): noise standard deviation / sensitivity, sample rate, number of releases."""

_ORDERS = (
    *(1.01, 1.02, 1.03, 1.05, 1.07),
    *(round(1 + i / 10, 1) for i in range(1, 20)),
    *(3 + i / 4 for i in range(12)),
    *(6 + i / 2 for i in range(10)),
    *(float(i) for i in range(11, 40)),
    *(float(i) for i in range(40, 64, 2)),
    *(64.0, 72.0, 80.0, 96.0, 112.0, 128.0, 160.0, 192.0, 256.0, 384.0, 512.0),
)
_MAX_KINDS, _MAX_GROUPS = 24, 1000
"""Largest numbers of kinds of releases for which RDP is exact at all orders, and that are not grouped."""

_STEP, _DOWN = 2.0**-10, 1 - 1e-12
"""Finest grid of log(sigma) and -log(rate) for groups, and a factor that covers the rounding of exp and log."""

_CHEAP_ORDERS = (2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0, 24.0, 32.0, 48.0, 64.0, 96.0, 160.0, 256.0, 512.0)


@dataclass(frozen=True)
class Bound:
    """Upper bound on epsilon, as returned by `compose`, with the accountant that computed it.

    Attributes:
        epsilon: upper bound at the given delta; infinite if a release has no noise.
        accountant: name of the accountant: `"exact"` (closed form), `"pld"` or `"rdp"`.
    """

    epsilon: float
    accountant: str


def compose(spends: Iterable[Spend], delta: float, *, accountant: str = "auto", order: float | None = None) -> Bound:
    """Compute the total epsilon of several noised releases of the same records, at a given delta.

    `Ledger` calls this function for you; call it yourself to account for releases outside a ledger, or to compare
    accountants. Neighbors differ by one added or removed record.

    Args:
        spends: (sigma, rate, count) tuples. Sigma is the noise standard deviation / sensitivity. The rate is the
            probability with which each record takes part, and the count is the number of such releases. At rates below
            1, the records must be drawn by Poisson sampling.
        delta: delta at which epsilon is computed, in (0, 1), well below one over the number of records.
        accountant: `"auto"` uses the closed form if every rate is 1, and otherwise the privacy loss distribution. RDP
            replaces it where its grid would be too large, or its rounding errors would matter at this delta.
            `"pld"` or `"rdp"` selects one accountant.
        order: order of RDP, above 1; None selects the order with the smallest bound. If the order is fixed before the
            first release, the bound is also valid as a privacy filter: sigma, rate and the number of releases may then
            depend on earlier releases.

    All results are upper bounds, for adding and for removing a record. The privacy loss distribution is typically less
    than 0.5 % above the exact epsilon (see `distillkit.privacy.accounting._pld`). RDP is some percent above it; its
    orders lie between 1.01 and 512, a wider range than Opacus' default. Opacus' PRV accountant covers only removal.

    If there are more than 1,000 kinds of releases (different sigma or rate), similar kinds are grouped: sigma is
    rounded down and the rate up. The result is still an upper bound, but slightly larger than without grouping.

    Returns:
        Epsilon, and the accountant that computed it.

    Raises:
        NotAccountable: delta is outside (0, 1); or PLD was requested, but needs too large a grid or is not accurate
            enough.
        TypeError, ValueError: an argument has the wrong type or is out of range.
    """
    check.one_of(accountant, "accountant", ("auto", "rdp", "pld"))
    merged: dict[tuple[float, float], int] = {}
    for spend in check.instance(spends, Iterable, "spends", "a list of triples (sigma, rate, count)"):
        if not isinstance(spend, Sequence) or isinstance(spend, str) or len(spend) != 3:
            raise TypeError(f"spends must be a list of triples (sigma, rate, count), got {spend!r} in it")
        sigma, rate, count = spend
        sigma, rate = check_sigma(sigma), check.real_number(rate, "rate", least=0.0, most=1.0)
        count = check.positive_int(count, "count", least=0, most=MOST_RELEASES)
        if count and rate:
            merged[sigma, rate] = merged.get((sigma, rate), 0) + count
    every, delta = tuple((s, q, n) for (s, q), n in sorted(merged.items())), check_delta(delta)
    if any(sigma == 0 for sigma, _, _ in every):
        return Bound(math.inf, "exact")
    if not every:
        return Bound(0.0, "exact")
    if accountant == "auto" and order is None and all(rate == 1 for _, rate, _ in every):
        return Bound(gaussian_epsilon(sum(count / sigma**2 for sigma, _, count in every) ** -0.5, delta), "exact")
    groups = _grouped(every, _MAX_GROUPS) if len(every) > _MAX_KINDS else every
    if order is not None:
        check.real_number(order, "order", above=1.0)
        return Bound(max(0.0, _rdp_at(groups, delta, order)), "rdp")
    by_pld = math.inf if accountant == "rdp" else _pld(groups, delta)
    if by_pld == math.inf and accountant == "pld":
        raise NotAccountable(
            f"the privacy loss distribution of these spends needs too large a grid, or is not accurate enough at delta "
            f"{delta:g}; use accountant='rdp', a sound upper bound"
        )
    return Bound(by_pld, "pld") if by_pld < math.inf else Bound(_rdp(groups, delta), "rdp")


def filter_order(sigma: float, rate: float, budget: float, delta: float) -> float:
    """Return the RDP order that allows the most releases within a budget, for `Ledger(renyi_order=...)`.

    The ledger's privacy filter is sound at every order, provided that the order is fixed before the first release.

    Args:
        sigma: noise standard deviation / sensitivity of the releases that you expect, > 0.
        rate: sample rate of these releases, in (0, 1].
        budget, delta: options of the ledger: the largest allowed epsilon, and its delta.

    Raises:
        NotAccountable: `sigma` or `delta` is out of range.
        TypeError, ValueError: an argument has the wrong type or is out of range.
    """
    check.real_number(sigma, "sigma", above=0.0)
    check_sigma(sigma)
    check.real_number(rate, "rate", above=0.0, most=1.0)
    check.real_number(budget, "budget", above=0.0)
    check_delta(delta)
    return max(_ORDERS, key=lambda order: (budget - _rdp_at((), delta, order)) / _renyi(sigma, rate, order))


def _grouped(spends: tuple[Spend, ...], most: int) -> tuple[Spend, ...]:
    """Group releases into at most `most` kinds by rounding, so that no release's privacy cost decreases.

    The noise multiplier sigma is rounded down, and the sampling rate is rounded up. Releases with the same sigma and
    rate are of one kind. All releases at rate 1 are combined into one equivalent release. At lower rates, sigma and
    rate are rounded to a grid that does not depend on the releases. If there are still too many kinds, the grid step is
    doubled until there are few enough.
    """
    at_one = sum(count / sigma**2 for sigma, rate, count in spends if rate == 1)
    found = {(sigma, rate): count for sigma, rate, count in spends if rate < 1}
    if len(found) >= most:
        cells, step = _shifted(((math.log(s) / _STEP, -math.log(q) / _STEP), n) for (s, q), n in found.items()), _STEP
        while len(cells) >= most:
            cells, step = _shifted(((i / 2, j / 2), n) for (i, j), n in cells.items()), 2 * step
        found = {(math.exp(i * step) * _DOWN, min(1.0, math.exp(-j * step) / _DOWN)): n for (i, j), n in cells.items()}
    whole = [(at_one**-0.5, 1.0, 1)] if at_one else []
    return tuple(sorted([*whole, *((sigma, rate, count) for (sigma, rate), count in found.items())]))


def _shifted(places: Iterable[tuple[tuple[float, float], int]]) -> dict[tuple[int, int], int]:
    """Round pairs of coordinates down to integers, and count the releases at each rounded pair."""
    cells: dict[tuple[int, int], int] = {}
    for (x, y), count in places:
        cell = math.floor(x), math.floor(y)
        cells[cell] = cells.get(cell, 0) + count
    return cells


def largest(every: Sequence[Sequence[Spend]], delta: float) -> Bound:
    """Return the largest of the clients' bounds on epsilon, as `compose` computes them from each client's releases.

    To save time, a client is skipped if a cheap upper bound on its epsilon is already below another client's bound.

    Args:
        every: releases of each client.
        delta: delta at which epsilon is computed, in (0, 1).
    """

    def limit(spends: Sequence[Spend]) -> float:
        return min(compose(spends, delta, order=order).epsilon for order in (4.0, 12.0, 40.0))

    worst = Bound(0.0, "exact")
    limits = [limit(spends) if len(every) > 1 else math.inf for spends in every]
    for most, spends in sorted(zip(limits, every, strict=True), key=lambda pair: -pair[0]):
        if most > worst.epsilon:
            worst = max(worst, compose(spends, delta), key=lambda bound: bound.epsilon)
    return worst


@lru_cache(maxsize=65536)
def _renyi(sigma: float, rate: float, order: float) -> float:
    """Return the Renyi divergence of one release, or infinity if Opacus' series does not converge."""
    from opacus.accountants.analysis.rdp import compute_rdp

    try:
        value = float(compute_rdp(q=rate, noise_multiplier=sigma, steps=1, orders=order))
    except (ArithmeticError, ValueError):
        return math.inf
    return value if value >= 0 else math.inf


@lru_cache(maxsize=4096)
def _renyi_of_many(spends: tuple[Spend, ...], order: float) -> float:
    """Return an upper bound on the total Renyi divergence of many kinds of releases, exact at integer orders.

    In between, (order - 1) times the divergence is interpolated: it is convex in the order, and 0 at order 1.
    """
    low, high = math.floor(order), math.ceil(order)
    whole = [n for n in {low, high} if n > 1]
    values = dict(zip(whole, moments(spends, whole))) | {1: 0.0}
    moment = values[low] + (order - low) * (values[high] - values[low])
    return float(moment) / (order - 1)


@lru_cache(maxsize=4096)
def _pld(spends: tuple[Spend, ...], delta: float) -> float:
    return pld_epsilon(spends, delta)


def _rdp_at(spends: tuple[Spend, ...], delta: float, order: float) -> float:
    """Return the bound on epsilon at one RDP order (Canonne, Kamath and Steinke, NeurIPS 2020, proposition 12)."""
    if len(spends) > _MAX_KINDS:
        total = _renyi_of_many(spends, order)
    else:
        total = sum(count * _renyi(sigma, rate, order) for sigma, rate, count in spends)
    return total + math.log1p(-1 / order) - (math.log(delta) + math.log(order)) / (order - 1)


@lru_cache(maxsize=4096)
def _rdp(spends: tuple[Spend, ...], delta: float) -> float:
    """Return the smallest valid bound on epsilon that a local search over the RDP orders finds."""

    def bound(index: int) -> float:
        return _rdp_at(spends, delta, _ORDERS[index])

    best, at = min((bound(i), i) for i, order in enumerate(_ORDERS) if order in _CHEAP_ORDERS)
    for step in (-1, 1):
        while 0 <= at + step < len(_ORDERS) and (value := bound(at + step)) < best:
            best, at = value, at + step
    return max(0.0, best)
