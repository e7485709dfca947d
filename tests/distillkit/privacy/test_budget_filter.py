"""A budget holds for every stopping rule, epsilon only for a fixed number of releases; both by simulated adversaries.

An adversary tells two neighbouring data sets apart by the log-likelihood ratio L of all releases. If a guarantee
(epsilon, delta) holds, then P(E) - e^epsilon Q(E) <= delta for every event E, also for one that depends on when the
releases stopped. P and Q are exact: a release of noise sigma moves L by N(m / 2, m) or N(-m / 2, m), m = 1 / sigma^2.
"""

from __future__ import annotations

import math
import operator
from functools import cache

import pytest
import torch
from torch import Tensor

from distillkit.privacy import Event, Ledger, compose, gaussian_epsilon, gaussian_sigma
from distillkit.privacy.accounting.composition import _grouped, _renyi
from distillkit.rng import derive

DELTA, STEPS, RUNS = 0.01, 200, 40_000
ERROR = 5 * math.sqrt(DELTA / RUNS)
"""Five standard deviations of an estimated delta."""


@cache
def ratios(adaptive: bool) -> Tensor:
    """Return L [runs, steps] under P, with a total of 1 / sigma^2 of at most 1.

    Args:
        adaptive: whether the noise of a release depends on the releases before it.
    """
    noise = torch.randn(RUNS, STEPS, generator=derive(0, "filter")).double()
    ratio, spent, columns = torch.zeros(RUNS).double(), torch.zeros(RUNS).double(), []
    for step in range(STEPS):
        m = torch.where(ratio > 0, 4.0, 0.5).double() / STEPS if adaptive else torch.full_like(spent, 1 / STEPS)
        m = m.minimum(1 - spent).clamp_min(0.0)
        ratio, spent = ratio + m.sqrt() * noise[:, step] + m / 2, spent + m
        columns.append(ratio)
    return torch.stack(columns, 1)


def delta_of(ratio: Tensor, epsilon: Tensor, above: float) -> float:
    """Return the delta of an adversary that stops as soon as L exceeds epsilon [steps] by `above`.

    It is the sum over steps k of P(stops at k) - e^epsilon_k Q(stops at k), with Q(E) = mean over P of e^-L in E.
    """
    hit = ratio > epsilon + above
    stop = hit.double().argmax(1)
    gain = 1 - (epsilon[stop] - ratio.gather(1, stop[:, None])[:, 0]).exp()
    return float((gain * hit.any(1)).mean())


@pytest.mark.parametrize("adaptive", [False, True])
@pytest.mark.parametrize("above", [0.0, 0.1, 0.3])
def test_budget_holds_for_an_adversary_that_stops_at_will(adaptive: bool, above: float) -> None:
    budget = torch.full((STEPS,), gaussian_epsilon(1.0, DELTA)).double()
    assert 0.0005 < delta_of(ratios(adaptive), budget, above) <= DELTA + ERROR


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
    ledger.spend(Event("sum", sigma=(limit - spent) ** -0.5))
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


@pytest.mark.parametrize("kinds", [1, 40])
@pytest.mark.parametrize("order", [None, 8.0])
@pytest.mark.parametrize("rate", [0.5, 1.0])
def test_release_without_noise_is_infinite_among_any_others(rate: float, order: float | None, kinds: int) -> None:
    spends = [(0.0, rate, 1), *((1.0 + k, 0.1, 1) for k in range(kinds))]
    assert compose(spends, 1e-5, order=order).epsilon == math.inf


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
    for column, costs_more in ((0, operator.le), (1, operator.ge)):
        for level in {kind[column] for kind in kinds}:
            before, after = (sum(k[2] for k in some if costs_more(k[column], level)) for some in (kinds, groups))
            assert after >= before
    assert max(rate for _, rate, _ in groups) <= 1.0
