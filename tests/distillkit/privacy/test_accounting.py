from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from opacus.accountants.analysis.rdp import compute_rdp

from distillkit.privacy import (
    Bound,
    Event,
    Ledger,
    NoisePlan,
    NotAccountable,
    PrivacyError,
    compose,
    filter_order,
    gaussian_delta,
    gaussian_epsilon,
    gaussian_sigma,
    plan_noise,
)
from distillkit.privacy.accounting._bisection import bisect, smallest_sigma
from distillkit.privacy.accounting._pld import _direction, _discrete, moments, pld_epsilon
from distillkit.privacy.accounting._ranges import check_sigma
from distillkit.privacy.accounting.composition import _rdp_at, largest
from distillkit.privacy.accounting.planning import resolve_sigma
from distillkit.rng import derive
from tests.refused import refused

DELTA = 1e-5
SIGMAS = [0.7, 1.0, 2.0, 5.0, 20.0]
RATES = [0.01, 0.05, 0.3, 1.0]
COUNTS = st.integers(1, 500)


def hockey_stick(first: torch.Tensor, second: torch.Tensor, epsilon: float, step: float) -> float:
    return float((first - math.exp(epsilon) * second).clamp_min(0).sum()) * step


def normal_density(x: torch.Tensor, mean: float, sigma: float) -> torch.Tensor:
    return (-((x - mean) ** 2) / (2 * sigma**2)).exp() / (sigma * math.sqrt(2 * math.pi))


@pytest.mark.parametrize("sigma", [0.4, 1.0, 2.0, 10.0, 100.0])
@pytest.mark.parametrize("delta", [1e-3, 1e-5, 1e-8])
def test_exact_gaussian_equals_numerical_integration(sigma: float, delta: float) -> None:
    epsilon = gaussian_epsilon(sigma, delta)
    step = sigma / 20000
    x = torch.arange(-12 * sigma, 12 * sigma + 1, step, dtype=torch.float64)
    around = [epsilon - 1e-6, epsilon + 1e-6]
    low, high = (hockey_stick(normal_density(x, 1, sigma), normal_density(x, 0, sigma), e, step) for e in around)
    assert high <= delta * (1 + 1e-9)
    assert epsilon == 0 or low >= delta * (1 - 1e-9)


@settings(max_examples=15)
@example(0.0, -3.0, 1e-9, 1)
@given(st.floats(-4, 3), st.floats(-3, 4), st.sampled_from([0.4, 1e-3, 1e-5, 1e-9]), st.integers(1, 50))
def test_sigma_and_epsilon_are_inverse_and_never_round_down(
    log_sigma: float, log_epsilon: float, delta: float, releases: int
) -> None:
    """At every magnitude: delta(epsilon) is just below delta, and any smaller epsilon or sigma would exceed it."""
    sigma, epsilon = 10**log_sigma, 10**log_epsilon
    reached = gaussian_epsilon(sigma, delta)
    assert gaussian_delta(sigma, reached) <= delta
    assert gaussian_delta(sigma, 1e300) == 0.0
    edge = 0.99 * gaussian_delta(sigma, 1.0)  # its epsilon is just above the first bound of the search
    assert not edge or gaussian_delta(sigma, gaussian_epsilon(sigma, edge)) <= edge
    assert reached == 0 or gaussian_delta(sigma, reached * (1 - 1e-9)) > delta
    assert compose([(sigma, 1.0, 1)], delta) == Bound(reached, "exact")
    least = gaussian_sigma(epsilon, delta, releases=releases) / math.sqrt(releases)
    assert gaussian_epsilon(least, delta) <= epsilon
    assert gaussian_epsilon(least * (1 - 1e-9), delta) > epsilon


@given(st.lists(st.tuples(st.sampled_from([2.0, 2.5, 9.0, 1e3]), st.integers(0, 30)), min_size=1))
def test_gaussian_releases_compose_in_closed_form(releases: list[tuple[float, int]]) -> None:
    spends = [*((sigma, 1.0, count) for sigma, count in releases), (0.5, 0.0, 9), (0.0, 1.0, 0)]
    precision = sum(count / sigma**2 for sigma, count in releases)
    wanted = gaussian_epsilon(precision**-0.5, DELTA) if precision else 0.0
    bound = compose(map(list, spends), DELTA)
    assert (bound.accountant, bound.epsilon) == ("exact", pytest.approx(wanted, rel=1e-9))


@settings(max_examples=8)
@given(st.lists(st.tuples(st.sampled_from(SIGMAS), st.sampled_from(RATES), COUNTS), min_size=1, max_size=4))
def test_rdp_is_the_least_over_its_orders_of_opacus_divergence(spends: list[tuple[float, float, int]]) -> None:
    """Which is additive in the number of releases; epsilon follows by Canonne, Kamath and Steinke's proposition 12."""

    def bound(order: float) -> float:
        total = sum(n * float(compute_rdp(q=q, noise_multiplier=s, steps=1, orders=order)) for s, q, n in spends)
        return max(0.0, total + math.log((order - 1) / order) - math.log(delta * order) / (order - 1))

    for delta in (DELTA, 1e-2):
        orders = [1.01, 1.1, 1.3, 1.7, 2.0, 2.4, *map(float, range(3, 64)), 80.0, 128.0, 192.0, 256.0, 512.0]
        bounds = {order: bound(order) for order in orders}
        for order in (1.3, 2.0, 2.4, 31.0, 512.0):
            wanted = Bound(pytest.approx(bounds[order], rel=1e-9, abs=1e-9), "rdp")
            assert compose(spends, delta, order=order) == wanted
        least = compose(spends, delta, accountant="rdp").epsilon
        assert min(bounds.values()) * 0.9 <= least <= min(bounds.values()) + 1e-9
        assert least >= compose(spends, delta).epsilon * (1 - 1e-9)
        assert compose(spends[::-1] * 3, delta) == compose([(s, q, 3 * n) for s, q, n in spends], delta)


@pytest.mark.parametrize(("sigma", "rate", "budget", "delta"), [(1.0, 0.05, 3.0, 1e-5), (4.0, 1.0, 0.5, 1e-7),
                                                                (0.8, 0.01, 9.0, 1e-3)])  # fmt: skip
def test_filter_order_allows_the_most_releases(sigma: float, rate: float, budget: float, delta: float) -> None:
    def allowed(order: float) -> float:
        some, more = (compose([(sigma, rate, n)], delta, order=order).epsilon for n in (10**6, 2 * 10**6))
        return 1e6 * (1 + (budget - some) / (more - some))

    best = filter_order(sigma, rate, budget, delta)
    orders = [1.01, 1.1, 1.3, 1.6, 2.0, 2.5, *map(float, range(3, 64, 2)), 96.0, 160.0, 256.0, 512.0]
    assert allowed(best) >= max(map(allowed, orders)) > 0.0


@settings(max_examples=8)
@given(st.lists(st.lists(st.tuples(st.sampled_from(SIGMAS), st.sampled_from(RATES), COUNTS), max_size=3), max_size=5))
@example([[(0.7, 0.05, 10)], [(1.0, 1.0, 1)]])  # the smaller epsilon has the larger cheap bound
def test_largest_bound_over_clients_equals_that_of_each_client_alone(
    every: list[list[tuple[float, float, int]]],
) -> None:
    bounds = [Bound(0.0, "exact"), *(compose(one, DELTA) for one in every)]
    assert largest(every, DELTA) == max(bounds, key=lambda bound: bound.epsilon)
    assert largest([*every, [(0.0, 1.0, 1)]], DELTA).epsilon == math.inf


@pytest.mark.parametrize(
    ("count", "rate", "spent", "accountant"),
    [
        (20, 1.0, [], "auto"), (20, 1.0, [(2.0, 1.0, 1)], "auto"), (100, 0.1, [], "auto"), (100, 0.1, [], "rdp"),
        (3, 0.5, [(3.0, 0.2, 4), (9.0, 1.0, 2)], "auto"), (3, 1.0, [(3.0, 0.2, 4)], "auto"),
        (3, 1.0, [(3.0, 0.2, 4)], "rdp"),
    ],
)  # fmt: skip
def test_plan_has_the_least_noise_that_keeps_the_target(
    count: int, rate: float, spent: list[tuple[float, float, int]], accountant: str
) -> None:
    def cost(sigma: float) -> Bound:
        return compose([*spent, (sigma, rate, count)], 1e-6, accountant=accountant)

    plan = plan_noise(4.0, 1e-6, count=count, rate=rate, spent=iter(spent), accountant=accountant)
    exact = accountant == "auto" and rate == 1 and all(q == 1 for _, q, _ in spent)
    wanted = cost(plan.sigma)
    assert plan == NoisePlan(plan.sigma, wanted.epsilon, 1e-6, rate, count, wanted.accountant)
    if exact and not spent:
        assert gaussian_sigma(4.0, 1e-6, releases=count) == pytest.approx(plan.sigma, rel=1e-11)
    assert plan.epsilon <= 4.0 < cost(plan.sigma * (1 - (1e-9 if exact else 3e-4))).epsilon
    assert plan.noise_std(500) == plan.sigma / (rate * 500)
    assert plan.snr(500, 2048, signal=0.5) == pytest.approx(0.5 * rate * 500 / (plan.sigma * math.sqrt(2048)))
    assert plan.snr(500, 1) == pytest.approx(rate * 500 / plan.sigma)
    if spent:
        before = compose(spent, 1e-6, accountant=accountant).epsilon
        for target in (before, before / 2):
            words = f"epsilon={target:g} is the target, but {before:.4g} is spent already"
            over = functools.partial(plan_noise, target, 1e-6, spent=spent, accountant=accountant)
            refused(over, NotAccountable, words)
    else:
        assert resolve_sigma(4.0, None, delta=1e-6, count=count, rate=rate) == (
            plan_noise(4.0, 1e-6, count=count, rate=rate).sigma
        )
        assert resolve_sigma(None, 2.5, delta=1e-6, count=count, rate=rate) == 2.5
        for both, got in (((None, None), "neither"), ((1.0, 1.0), "both")):
            refused(lambda b=both: resolve_sigma(*b, delta=1e-6, count=1, rate=1.0), PrivacyError, f"got {got}")


@pytest.mark.parametrize(("sigma", "rate"), [(1.0, 0.3), (0.7, 0.05), (3.0, 0.9), (0.15, 0.5), (0.1, 0.05)])
def test_pld_of_one_step_is_just_above_both_directions_of_the_exact_value(sigma: float, rate: float) -> None:
    delta, step = 1e-3, sigma / 5000
    x = torch.arange(-12 * sigma, 12 * sigma + 1, step, dtype=torch.float64)
    without = normal_density(x, 0, sigma)
    mixed = (1 - rate) * without + rate * normal_density(x, 1, sigma)
    epsilon = pld_epsilon([(sigma, rate, 1)], delta)
    assert hockey_stick(mixed, without, epsilon, step) <= delta
    assert hockey_stick(without, mixed, epsilon, step) <= delta
    below = 0.994 * epsilon
    assert max(hockey_stick(mixed, without, below, step), hockey_stick(without, mixed, below, step)) > delta


def test_empty_run_costs_nothing_and_failed_series_are_infinite() -> None:
    assert compose([], DELTA).epsilon == 0.0
    assert compose([(1.0, 0.0, 5), (1.0, 0.5, 0)], DELTA).epsilon == 0.0
    for sigma, rate, order in ((1e9, 0.5, 2.5), (1e8, 0.99, 1.5)):  # Opacus' series is negative, and raises an error
        assert compose([(sigma, rate, 1)], DELTA, order=order).epsilon == math.inf
    for order, rate in ((None, 1.0), (None, 0.5), (8.0, 0.5)):
        assert compose([(0.0, rate, 1), (1.0, rate, 1)], DELTA, order=order) == Bound(math.inf, "exact")
    for sigma, count in ((1e-4, 1), (1e-4, 10**12), (1e9, 10**12)):
        assert all(compose([(sigma, rate, count)], DELTA).epsilon >= 0 for rate in (1.0, 0.5, 1e-9))
    assert compose([(1e-4, 0.5, 1)], DELTA) == compose([(1e-4, 0.5, 1)], DELTA, order=1.01)  # the least order
    for how in ({"accountant": "rdp"}, {"accountant": "pld"}, {"order": 2.0}):
        assert compose([(1e3, 0.5, 1)], 0.3, **how).epsilon == 0.0  # type: ignore[arg-type]
    assert moments([(1e9, 0.3, 10**12), (1.0, 0.5, 1)], [40]) >= moments([(1.0, 0.5, 1)], [40])
    for name in ("rdp", "pld"):  # also where the closed form holds
        assert compose([(3.0, 1.0, 4)], DELTA, accountant=name).accountant == name


@pytest.mark.parametrize(
    ("spend", "delta"),
    [((50.0, 1e-3, 10**8), 1e-5), ((5.0, 0.01, 10**6), 1e-9), ((1.0, 0.05, 200), 1e-15), ((2e-3, 0.5, 1), DELTA)],
)
def test_rdp_replaces_pld_where_the_grid_is_too_large_or_not_accurate(
    spend: tuple[float, float, int], delta: float
) -> None:
    words = f"not accurate enough at delta {delta:g}; use accountant='rdp'"
    refused(lambda: compose([spend], delta, accountant="pld"), NotAccountable, words)
    assert compose([spend], delta) == compose([spend], delta, accountant="rdp")
    ledger = Ledger(delta=delta)
    ledger.spend(Event("dp_sgd", spend[0], rate=spend[1], count=spend[2]))
    assert any("5 to 26 %" in remark for remark in ledger.guarantee().info()["remarks"])
    ledger.void("shown")
    assert ledger.guarantee().remarks == ()


@pytest.mark.parametrize("count", [100, 100_000])
def test_rounding_of_the_grid_is_charged_to_delta(count: int) -> None:
    """The bound on rounding errors, 4e-15 a release, is 40 % of this delta at 100,000 releases."""
    exact = gaussian_epsilon(2.0, 1e-9 - 4e-15 * count)
    assert exact <= pld_epsilon([(2.0 * count**0.5, 1 - 1e-12, count)], 1e-9) <= 1.005 * exact
    assert pld_epsilon([(800.0, 1 - 1e-12, 150_000)], 1e-9) == math.inf  # 60 % of delta


@pytest.mark.filterwarnings("ignore:overflow")
@pytest.mark.parametrize("removed", [True, False])
def test_losses_beyond_the_grid_are_charged_to_delta(removed: bool) -> None:
    """Half of delta, with tails far larger than `pld_epsilon` has: about as much remains for the other losses."""
    sigma, count, delta = np.array([8.0, 8.0]), np.array([10, 30]), 1e-3
    whole = float(count @ sigma**-2.0) ** -0.5
    most, low, high = (gaussian_epsilon(whole, part * delta) for part in (0.999, 0.6, 0.5))
    bound = functools.partial(_direction, sigma, np.full(2, 1 - 1e-12), count, delta)
    assert most <= bound(1e-9, 5e-4, removed) < low <= bound(delta / 40, 0.01, removed) <= high
    assert bound(delta / 10, 0.01, removed) == math.inf  # twice delta
    for one, rate, few in ((3.0, 0.3, 180), (12.0, 0.9, 99)):
        _, masses, beyond = _discrete(np.array([[one]]), np.array([[rate]]), 0.1, 0.001, removed, 999) or (0, 0, 0)
        assert _discrete(np.array([[one]]), np.array([[rate]]), 0.1, 0.001, removed, few) is None  # too many points
        assert masses[0].sum() + beyond[0] == pytest.approx(1.0, abs=1e-12)
        assert masses[0, -1] < 0.01 < 0.02 < min(beyond[0], masses[0, 0]) < max(beyond[0], masses[0, 0]) < 0.05


@pytest.mark.parametrize("tolerance", [1e-2, 1e-13])
@pytest.mark.parametrize("scale", [1e-9, 1.0, 1e9])
def test_bisection_finds_the_edge_from_above_at_every_magnitude(scale: float, tolerance: float) -> None:
    asked: list[float] = []
    found = bisect(lambda x: bool(asked.append(x)) or x >= 3.3 * scale, 0.0, 10 * scale, tolerance=tolerance)
    assert found * (1 - tolerance) < 3.3 * scale <= found
    assert len(asked) <= 3 - math.log2(tolerance)
    edge = 3.3 * max(scale, 1e-4)
    sigma = smallest_sigma(lambda s: edge / s, 1.0, tolerance)
    assert sigma * (1 - tolerance) < edge <= sigma


RANGES: list[tuple[Callable[..., object], dict[str, float], dict[str, list[float]]]] = [
    (gaussian_delta, {"sigma": 1.0, "epsilon": 1.0}, {"sigma": [0.0], "epsilon": [-1e-9]}),
    (gaussian_epsilon, {"sigma": 1.0, "delta": DELTA}, {"sigma": [0.0], "delta": [1.0]}),
    (gaussian_sigma, {"epsilon": 1.0, "delta": DELTA, "releases": 1}, {"epsilon": [0.0], "releases": [0]}),
    (lambda order, delta: compose([(1.0, 1.0, 1)], delta, order=order), {"order": 2.0, "delta": DELTA},
     {"order": [1.0], "delta": [0.0, 1.0, -1e-5, 2.0]}),
    *((functools.partial(compose, spends), {"delta": DELTA}, {"delta": [0.0, 1.0]})
      for spends in ([], [(1.0, 0.0, 1)], [(0.0, 1.0, 1)], [(1.0, 0.5, 1)])),
    (lambda sigma, rate, count: compose([(sigma, rate, count)], DELTA), {"sigma": 1.0, "rate": 1.0, "count": 0},
     {"sigma": [-1.0, 9e-5], "rate": [-1e-9, 1.5], "count": [-1, 10**12 + 1]}),
    (filter_order, {"sigma": 1.0, "rate": 0.5, "budget": 1.0, "delta": DELTA},
     {"sigma": [0.0, 9e-5], "rate": [0.0, 1.5], "budget": [0.0], "delta": [0.0]}),
    (plan_noise, {"epsilon": 1.0, "delta": DELTA, "count": 1, "rate": 1.0},
     {"epsilon": [0.0], "count": [0], "rate": [0.0, 1.5], "delta": [1.0]}),
    (NoisePlan(1.0, 1.0, DELTA, 1.0, 1, "exact").snr, {"size": 9.0, "dim": 1, "signal": 1.0},
     {"size": [0.0], "dim": [0], "signal": [-0.1, 1.5]}),
    (functools.partial(resolve_sigma, None, delta=DELTA, count=1, rate=1.0), {"sigma": 1.0}, {"sigma": [-1.0, 9e-5]}),
    (Ledger, {"delta": DELTA, "budget": 1.0, "renyi_order": 2.0},
     {"delta": [0.0], "budget": [0.0], "renyi_order": [0.0, 1.0]}),
    (Ledger().guarantee, {"delta": DELTA}, {"delta": [0.0, 1.0]}),
    (functools.partial(Event, "x"), {"sigma": 1.0, "rate": 1.0, "count": 1},
     {"sigma": [-1.0, 1e-300, 9e-5, math.inf, math.nan], "rate": [0.0, 1 + 1e-9], "count": [0, 10**12 + 1]}),
]  # fmt: skip
"""Functions, valid arguments, and values out of range of each argument."""


@pytest.mark.parametrize("place", range(len(RANGES)))
def test_arguments_out_of_range_are_refused_by_name(place: int) -> None:
    function, valid, wrong = RANGES[place]
    function(**valid)
    for name, value in ((name, value) for name, values in wrong.items() for value in values):
        error, words = NotAccountable if name == "delta" else ValueError, rf"^{name} must .*({value}|{value:g})"
        refused(lambda n=name, v=value: function(**valid | {n: v}), error, words)


def test_invalid_spends_are_refused() -> None:
    words = r"^s must be in \[0.0001, 1e\+09\], or 0 for no noise and no guarantee, got 2e\+09: "
    refused(lambda: check_sigma(2e9, "s"), NotAccountable, words)
    for odd in ((1.0, 1.0), "abc", 3):
        refused(lambda odd=odd: compose([(1.0, 1.0, 1), odd], DELTA), TypeError, re.escape(f"got {odd!r} in it"))
    refused(lambda: compose([], DELTA, accountant="gdp"), ValueError, "accountant")


PEER = [
    ([(30.0, 0.02, 100_000)], 1e-5, 0.768953),
    ([(20.0, 0.02, 100_000)], 1e-5, 1.200555),
    ([(3.0, 0.001, 100_000)], 1e-8, 0.537927),
    ([(3.0, 0.9, 10)], 1e-5, 4.206884),
]
"""dp-accounting 0.6.0 at grid steps of 1e-5 to 1e-3, ten times finer than its default: nearly the truth."""


@pytest.mark.parametrize(("spends", "delta", "truth"), PEER)
def test_pld_closes_the_gap_of_rdp(spends: list[tuple[float, float, int]], delta: float, truth: float) -> None:
    bound = compose(spends, delta, accountant="pld")
    assert bound.accountant == "pld"
    assert truth * (1 - 1e-6) <= bound.epsilon <= 1.01 * truth
    assert 1.05 * truth < compose(spends, delta, accountant="rdp").epsilon < 1.3 * truth


@pytest.mark.parametrize(
    ("sigmas", "rates", "count", "delta"),
    [
        ((0.6, 30.0), (0.01, 0.3), 40, 1e-5), ((2.0, 9.0), (1.0, 0.5, 0.02), 3, 1e-3), ((0.6, 0.6), (1e-3,), 1, 1e-9),
        ((1.0, 1.0), (1e-3,), 30, 1e-9), ((0.8, 0.8), (1e-4,), 40, 1e-6),
    ],
)  # fmt: skip
def test_pld_lies_between_both_estimates_of_dp_accounting(
    sigmas: tuple[float, float], rates: tuple[float, ...], count: int, delta: float
) -> None:
    from dp_accounting.pld import privacy_loss_distribution as pld

    kinds = 26 if sigmas[1] > sigmas[0] else 1
    drawn = (sigmas[0] + (sigmas[1] - sigmas[0]) * torch.rand(kinds, generator=derive(3), dtype=torch.float64)).tolist()
    spends = [(sigma, rates[i % len(rates)], count + i % 3) for i, sigma in enumerate(drawn)]
    bound = compose(spends, delta)
    assert bound.accountant == "pld"
    for upper in (False, True):
        parts = [
            pld.from_gaussian_mechanism(
                sigma, sampling_prob=rate, pessimistic_estimate=upper, use_connect_dots=upper,
                value_discretization_interval=1e-3,
            ).self_compose(n)
            for sigma, rate, n in spends
        ]  # fmt: skip
        estimate = functools.reduce(lambda a, b: a.compose(b), parts).get_epsilon_for_delta(delta)
        assert bound.epsilon <= 1.01 * estimate if upper else bound.epsilon >= estimate


@pytest.mark.parametrize("delta", [1e-2, 1e-5, 1e-8])
@pytest.mark.parametrize(("least", "count", "dear"), [(0.4, 1, 99), (3.0, 5, 99), (300.0, 90, 99), (13.0, 500, 0),
                                                      (13.0, 500, 16), (13.0, 500, 39)])  # fmt: skip
def test_many_kinds_at_rate_one_are_just_above_the_closed_form(
    least: float, count: int, dear: int, delta: float
) -> None:
    """One release may cost more than all others; the largest counts are in the first kinds or in the last."""
    spends = [(1.5, 1.0, 1) if i == dear else (least * (30 + i), 1.0, count + i) for i in range(40)]
    spends = spends[::-1] if dear == 99 else spends
    exact = gaussian_epsilon(sum(n / sigma**2 for sigma, _, n in spends) ** -0.5, delta)
    assert exact <= pld_epsilon(spends, delta) <= 1.005 * exact


@pytest.mark.parametrize("order", [1.05, 2.0, 2.5, 7.0, 9.3, 40.0, 512.0])
def test_rdp_of_many_kinds_is_an_upper_bound_and_exact_at_integers(order: float) -> None:
    spends = [(0.8 + i / 7, 0.01 if i % 2 else 0.4, 1 + i) for i in range(30)]
    many = compose(spends, DELTA, order=order).epsilon
    rest = _rdp_at((), DELTA, order)

    def moment(order: float) -> float:
        free = _rdp_at((), DELTA, order) if order > 1 else 0.0
        return (order - 1) * sum(_rdp_at((spend,), DELTA, order) - free for spend in spends) if order > 1 else 0.0

    low = float(math.floor(order))
    between = moment(low) + (order - low) * (moment(low + 1) - moment(low))
    assert many == pytest.approx(max(0.0, rest + between / (order - 1)), rel=1e-9)
    assert many >= rest + moment(order) / (order - 1) - 1e-9
