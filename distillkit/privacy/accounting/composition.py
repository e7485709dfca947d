"""Total epsilon of several Gaussian releases.

Epsilon has a closed form at sample rate 1, and is computed numerically at lower rates.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from distillkit._utils import check
from distillkit.privacy.accounting import _pld
from distillkit.privacy.accounting._many_kinds import grid_epsilon, moments
from distillkit.privacy.accounting._ranges import MOST_RELEASES, check_delta, check_sigma
from distillkit.privacy.accounting.gaussian import gaussian_epsilon
from distillkit.privacy.errors import NotAccountable

__all__ = ["Bound", "Spend", "compose", "filter_order", "largest"]

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
_MAX_PLD_RELEASES = 10**7
_MAX_PLD_KINDS, _MAX_KINDS, _MAX_GROUPS = 8, 24, 1000
"""Maximum number of kinds of releases for which `compose` chooses PLD and computes PRV, and of groups beyond."""

_STEP, _DOWN = 2.0**-10, 1 - 1e-12
"""Finest grid of log(sigma) and -log(rate) for groups, and a factor that covers the rounding of exp and log."""

_CHEAP_ORDERS = (2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0, 24.0, 32.0, 48.0, 64.0, 96.0, 160.0, 256.0, 512.0)

_PRV_POINTS = 1_500_000
_PRV_EPSILON = 100.0


@dataclass(frozen=True)
class Bound:
    """Upper bound on epsilon, as returned by `compose`, with the accountant that computed it.

    Attributes:
        epsilon: upper bound at the given delta; infinite if a release has no noise.
        accountant: name of the accountant: `"exact"` (closed form), `"rdp"`, `"prv"` or `"pld"`.
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
        accountant: `"auto"` uses the closed form if every rate is 1. Otherwise it uses the smaller of the RDP and PRV
            bounds; PRV is computed only if the RDP epsilon is below 100 and PRV's grid has at most 1.5 million points.
            If the RDP epsilon is below 100 but the grid is too large, PLD replaces PRV, provided that dp-accounting is
            installed and there are at most 8 kinds of releases (different sigma or rate) and ten million releases in
            total. For more than 24 kinds, it uses PLD on a grid of our own, or RDP if that grid is too large.
            `"rdp"`, `"prv"` or `"pld"` selects one accountant.
        order: order of RDP, above 1; None selects the order with the smallest bound. If the order is fixed before the
            first release, the bound is also valid as a privacy filter: sigma, rate and the number of releases may then
            depend on earlier releases.

    All results are upper bounds. PRV (Gopi et al., NeurIPS 2021) uses the larger of the two bounds for adding and for
    removing a record. Opacus' PRV accountant covers only removal. RDP uses orders from 1.01 to 512, a wider range than
    Opacus' default.

    If there are more than 1,000 kinds of releases (24 for `"prv"` and `"pld"`), similar kinds are grouped: sigma is
    rounded down and the rate up. The result is still an upper bound, but slightly larger than without grouping.

    Returns:
        Epsilon, and the accountant that computed it.

    Raises:
        NotAccountable: delta is outside (0, 1); PRV was requested but would need too much memory or is not accurate
            enough; or PLD was requested and dp-accounting is not installed.
        TypeError, ValueError: an argument has the wrong type or is out of range.
    """
    check.one_of(accountant, "accountant", ("auto", "rdp", "prv", "pld"))
    merged: dict[tuple[float, float], int] = {}
    for sigma, rate, count in spends:
        check_sigma(sigma)
        check.real_number(rate, "rate", least=0.0, most=1.0)
        if check.positive_int(count, "count", least=0, most=MOST_RELEASES) and rate:
            merged[sigma, rate] = merged.get((sigma, rate), 0) + count
    every, delta = tuple((s, q, n) for (s, q), n in sorted(merged.items())), check_delta(delta)
    if any(sigma == 0 for sigma, _, _ in every):
        return Bound(math.inf, "exact")
    if order is not None:
        check.real_number(order, "order", above=1.0)
        return Bound(max(0.0, _rdp_at(_grouped(every, _MAX_GROUPS), delta, order)), "rdp")
    if len(every) <= _MAX_KINDS or (accountant == "auto" and all(rate == 1 for _, rate, _ in every)):
        return _bound(every, delta, accountant)
    if accountant in ("prv", "pld"):
        return _bound(_grouped(every, _MAX_KINDS), delta, accountant)
    groups = _grouped(every, _MAX_GROUPS)
    if accountant == "auto" and (on_grid := _on_grid(groups, delta)) < math.inf:
        return Bound(on_grid, "pld")
    return Bound(_rdp(groups, delta), "rdp")


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
    if at_one:
        found[at_one**-0.5, 1.0] = found.get((at_one**-0.5, 1.0), 0) + 1
    return tuple((sigma, rate, count) for (sigma, rate), count in sorted(found.items()))


def _shifted(places: Iterable[tuple[tuple[float, float], int]]) -> dict[tuple[int, int], int]:
    """Round pairs of coordinates down to integers, and count the releases at each rounded pair.

    Args:
        places: for each kind of release, a pair of coordinates and the number of releases. The coordinates are
            log(sigma) and -log(rate), divided by the step of a grid, where rate is the sampling rate.
    """
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


@lru_cache(maxsize=4096)
def _bound(spends: tuple[Spend, ...], delta: float, accountant: str) -> Bound:
    if not spends:
        return Bound(0.0, "exact")
    if accountant == "auto" and all(rate == 1 for _, rate, _ in spends):
        sigma = sum(count / sigma**2 for sigma, _, count in spends) ** -0.5
        return Bound(gaussian_epsilon(sigma, delta), "exact")
    by_rdp = _rdp(spends, delta)
    if accountant == "rdp":
        return Bound(by_rdp, "rdp")
    if accountant == "pld":
        return Bound(_pld_epsilon(spends, delta), "pld")
    affordable = _prv_affordable(spends, delta, by_rdp)
    if affordable:
        by_prv = _prv(spends, delta, by_rdp)
        if by_prv < by_rdp or (accountant == "prv" and by_prv < math.inf):
            return Bound(by_prv, "prv")
    if accountant == "prv":
        raise NotAccountable(
            f"PRV would need {_prv_points(spends, delta, by_rdp):.1e} points at delta {delta:g} for these spends (RDP "
            f"epsilon {by_rdp:.4g}), or is not accurate enough there; use accountant='rdp', a sound upper bound"
        )
    few = len(spends) <= _MAX_PLD_KINDS and sum(count for _, _, count in spends) <= _MAX_PLD_RELEASES
    if not affordable and by_rdp < _PRV_EPSILON and few and _pld.dp_accounting_installed():
        return min(Bound(_pld_epsilon(spends, delta), "pld"), Bound(by_rdp, "rdp"), key=lambda bound: bound.epsilon)
    return Bound(by_rdp, "rdp")


def _pld_epsilon(spends: tuple[Spend, ...], delta: float) -> float:
    if not _pld.dp_accounting_installed():
        raise NotAccountable(
            "accountant='pld' needs dp-accounting: pip install \"distillkit[pld]\"; or use 'auto', a sound upper bound"
        )
    return _pld.pld_epsilon(spends, delta)


@lru_cache(maxsize=65536)
def _renyi(sigma: float, rate: float, order: float) -> float:
    """Return the Renyi divergence of one release, or infinity if Opacus' series does not converge.

    Args:
        sigma: noise standard deviation / sensitivity.
        rate: sample rate.
        order: order of the divergence.
    """
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
    low = math.floor(order)
    whole = [n for n in (low, low + 1) if n > 1 and (n == low or order > low)]
    values = dict(zip(whole, moments(spends, whole))) | {1: 0.0}
    moment = values[low] if order == low else values[low] + (order - low) * (values[low + 1] - values[low])
    return float(moment) / (order - 1)


@lru_cache(maxsize=256)
def _on_grid(spends: tuple[Spend, ...], delta: float) -> float:
    return grid_epsilon(spends, delta)


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


def _prv_errors(by_rdp: float, delta: float) -> tuple[float, float]:
    return min(0.5, max(by_rdp / 200, 1e-4)), delta / 1000


def _prv_width(spends: tuple[Spend, ...], delta_error: float) -> float:
    """Return a width w such that PRV accounting may neglect total privacy losses outside [-w, w].

    The error in delta is then at most `delta_error`. Source: Gopi et al., remark 5.6.
    """
    total = sum(count for _, _, count in spends)
    single = max(_rdp(((sigma, rate, 1),), delta_error / (8 * total)) for sigma, rate, _ in spends)
    return max(_rdp(spends, delta_error / 4), single) + 3


def _prv_affordable(spends: tuple[Spend, ...], delta: float, by_rdp: float) -> bool:
    return by_rdp < _PRV_EPSILON and _prv_points(spends, delta, by_rdp) <= _PRV_POINTS


def _prv_points(spends: tuple[Spend, ...], delta: float, by_rdp: float) -> float:
    eps_error, delta_error = _prv_errors(by_rdp, delta)
    total = sum(count for _, _, count in spends)
    mesh = eps_error / math.sqrt(total * math.log(12 / delta_error) / 2)
    return 2 * _prv_width(spends, delta_error) / mesh * len(spends)


@lru_cache(maxsize=256)
def _prv(spends: tuple[Spend, ...], delta: float, by_rdp: float) -> float:
    """Return PRV's bound on epsilon, or infinity if the numerical computation fails, for instance for a tiny delta.

    Args:
        spends, delta: arguments of `compose`.
        by_rdp: bound on epsilon by RDP, from which the numerical error that is permitted in PRV's computation follows.
    """
    from distillkit.privacy.accounting._prv import prv_epsilon

    eps_error, delta_error = _prv_errors(by_rdp, delta)
    width = _prv_width(spends, delta_error)
    try:
        return prv_epsilon(spends, delta, width=width, eps_error=eps_error, delta_error=delta_error)
    except (ArithmeticError, RuntimeError, ValueError):
        return math.inf
