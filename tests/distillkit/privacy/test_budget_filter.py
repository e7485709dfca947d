"""The budget as a filter of releases whose noise depends on earlier ones, and groups of many kinds of releases."""

from __future__ import annotations

import math
import operator

import pytest
import torch

from distillkit.privacy import Event, Ledger, compose, gaussian_epsilon, gaussian_sigma
from distillkit.privacy.accounting.composition import _grouped, _renyi
from distillkit.rng import derive


def test_ledger_allows_what_the_filter_allows_whatever_the_noise_of_earlier_releases() -> None:
    """The limit on the sum of 1 / sigma^2 is reached to rounding, and never exceeded."""
    limit, draws = gaussian_sigma(2.0, 1e-5) ** -2, torch.rand(40, generator=derive(1))
    ledger, spent = Ledger(budget=2.0), 0.0
    for draw in draws.tolist():
        event = Event("sum", sigma=3.0 + 30 * draw)
        if ledger.remaining(event):
            ledger.spend(event)
            spent += event.sigma**-2
        else:
            assert spent + event.sigma**-2 > limit
    last = Event("sum", sigma=(limit - spent) ** -0.5)
    assert ledger.remaining(last) == 1
    ledger.spend(last)
    assert ledger.remaining(Event("sum", sigma=100.0)) == 0
    assert (ledger.guarantee().nominal, ledger.guarantee().budget) == (pytest.approx(2.0, rel=1e-9), 2.0)


@pytest.mark.parametrize("accountant", ["auto", "rdp", "pld"])
@pytest.mark.parametrize("rate", [1.0, 1 - 1e-12])
def test_grouped_releases_never_cost_less_than_exactly(rate: float, accountant: str) -> None:
    """The exact value is known at rate 1; a rate just below takes the path of Poisson sampling."""
    sigmas = (40 + 20 * torch.rand(300, generator=derive(3))).tolist()
    spends = [(sigma, rate, 1 + i % 3) for i, sigma in enumerate(sigmas)]
    exact = gaussian_epsilon(sum(n / s**2 for s, _, n in spends) ** -0.5, 1e-5)
    bound = compose(spends, 1e-5, accountant=accountant).epsilon
    assert exact * (1 - 1e-9) <= bound <= 1.2 * exact


def test_three_thousand_kinds_of_noise_need_no_evaluation_of_each_order() -> None:
    """An evaluation of the Renyi divergence at one order takes a millisecond."""
    draws = torch.rand(3000, 2, generator=derive(4)).tolist()
    ledger = Ledger()
    ledger.spend(*(Event("sum", 2 + 30 * sigma, rate=0.5 * (1 - rate)) for sigma, rate in draws))
    _renyi.cache_clear()
    assert ledger.guarantee().accountant == "pld"
    assert compose(ledger.spends(), 1e-5, accountant="rdp").epsilon > 0
    assert _renyi.cache_info().misses == 0


def test_many_kinds_are_interpolated_between_integer_orders() -> None:
    """The moment is convex in the order, and order (order - 1) / 2 times the sum of 1 / sigma^2 at a rate near 1."""
    spends = [(40.0 + k, 1 - 1e-12, 1 + k % 3) for k in range(30)]
    total = sum(n / s**2 for s, _, n in spends)
    for order, moment in ((1.5, 0.5), (2.0, 1.0), (2.25, 1.5), (7.0, 21.0)):
        wanted = total * moment / (order - 1) + math.log1p(-1 / order) - math.log(1e-5 * order) / (order - 1)
        assert compose(spends, 1e-5, order=order).epsilon == pytest.approx(wanted, rel=1e-9)


@pytest.mark.parametrize("most", [24, 160])
def test_groups_cover_the_releases_at_the_ends_of_their_cells(most: int) -> None:
    """Kinds on grid points, just beside them and at rates near 1 are rounded to cost no less."""
    offsets = (0.0, 1e-13, -1e-13, 2.3e-16, -1.2e-16)
    points = [(k, off) for k in range(100) for off in offsets]
    kinds = [(math.exp(k / 64) * (1 + x), min(math.exp(-8 * (k % 3)) * (1 + x), 1 - 1e-12), 1) for k, x in points]
    groups = _grouped(tuple(kinds), most)
    apart = [(2.0**k, 0.5, 1) for k in range(most)]
    assert len(_grouped((*apart, (3.0, 1.0, 1)), most)) <= most
    assert len(groups) <= most
    assert sum(count for _, _, count in groups) == len(kinds)
    assert sum(n / s**2 for s, _, n in groups) <= (1 + 15 / most) * sum(n / s**2 for s, _, n in kinds)
    rounded = [sum(n * math.log(rate) for _, rate, n in some) for some in (kinds, groups)]
    assert rounded[1] - rounded[0] <= 5 / most * len(kinds)
    for column, costs_more in ((0, operator.le), (1, operator.ge)):
        for level in {kind[column] for kind in kinds}:
            before, after = (sum(k[2] for k in some if costs_more(k[column], level)) for some in (kinds, groups))
            assert after >= before
    assert max(rate for _, rate, _ in groups) <= 1.0
