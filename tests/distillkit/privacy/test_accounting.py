from __future__ import annotations

import functools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from distillkit.privacy import (
    Event,
    Ledger,
    NotAccountable,
    compose,
    gaussian_delta,
    gaussian_epsilon,
    gaussian_sigma,
    plan_noise,
)
from distillkit.privacy.accounting._pld import pld_epsilon
from distillkit.privacy.accounting.composition import _rdp_at
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


@pytest.mark.parametrize(("sigma", "epsilon"), [(2.0, 1.993), (0.6002, 8.0), (1.0812, 4.0), (3.7306, 1.0)])
def test_exact_gaussian_at_published_values(sigma: float, epsilon: float) -> None:
    assert gaussian_epsilon(sigma, DELTA) == pytest.approx(epsilon, rel=2e-4)


@pytest.mark.parametrize("sigma", [0.4, 1.0, 2.0, 10.0, 100.0])
@pytest.mark.parametrize("delta", [1e-3, 1e-5, 1e-8])
def test_exact_gaussian_equals_numerical_integration(sigma: float, delta: float) -> None:
    epsilon = gaussian_epsilon(sigma, delta)
    step = sigma / 20000
    x = torch.arange(-12 * sigma, 12 * sigma + 1, step, dtype=torch.float64)
    around = [epsilon - 1e-6, epsilon + 1e-6]
    low, high = (hockey_stick(normal_density(x, 1, sigma), normal_density(x, 0, sigma), e, step) for e in around)
    if epsilon > 0:
        assert high <= delta * (1 + 1e-9)
        assert low >= delta * (1 - 1e-9)
    else:
        assert high <= delta


@settings(max_examples=10)
@given(st.floats(0.05, 30.0), st.sampled_from([1e-3, 1e-5, 1e-7]), st.integers(1, 50))
def test_sigma_and_epsilon_are_inverse_and_never_round_down(epsilon: float, delta: float, releases: int) -> None:
    sigma = gaussian_sigma(epsilon, delta, releases=releases)
    together = compose([(sigma, 1.0, releases)], delta)
    assert together.accountant == "exact"
    assert together.epsilon == pytest.approx(epsilon, rel=1e-9)
    assert gaussian_delta(sigma / math.sqrt(releases), epsilon) <= delta * (1 + 1e-9)


TABLE = [
    (0.0512, 1.0, 1000, 12.31, 11.31),
    (0.0512, 3.0, 1000, 2.487, 2.293),
    (0.0512, 5.0, 1000, 1.376, 1.269),
    (0.0512, 1.0, 20000, 85.1, 80.9),
    (0.0512, 3.0, 20000, 14.05, 13.13),
    (0.0512, 5.0, 20000, 7.38, 6.87),
    (0.0427, 1.0, 1000, 10.0, 9.16),
    (0.0427, 3.0, 1000, 2.03, 1.87),
    (0.0427, 5.0, 1000, 1.127, 1.040),
    (0.0427, 1.0, 20000, 65.6, 62.1),
    (0.0427, 3.0, 20000, 11.22, 10.46),
    (0.0427, 5.0, 20000, 5.96, 5.54),
]


@pytest.mark.parametrize(("rate", "sigma", "steps", "rdp", "exact"), TABLE)
def test_epsilon_of_feddm_settings(rate: float, sigma: float, steps: int, rdp: float, exact: float) -> None:
    spends = [(sigma, rate, steps)]
    assert compose(spends, DELTA, accountant="rdp").epsilon == pytest.approx(rdp, rel=0.01)
    tight = compose(spends, DELTA)
    assert tight.accountant == "pld"
    assert tight.epsilon == pytest.approx(exact, rel=0.01)


@pytest.mark.parametrize(
    ("rate", "sigma", "rdp"), [(0.512, 1.0, 237), (0.512, 3.0, 40.0), (0.512, 5.0, 19.9), (0.4267, 3.0, 31.3)]
)
def test_epsilon_with_256_of_500_records_of_each_class_drawn(rate: float, sigma: float, rdp: float) -> None:
    assert compose([(sigma, rate, 1000)], DELTA, accountant="rdp").epsilon == pytest.approx(rdp, rel=0.01)


def test_every_accountant_is_above_the_exact_value_at_rate_one() -> None:
    exact, pld, rdp = (compose([(2.0, 1.0, 1)], DELTA, accountant=a).epsilon for a in ("auto", "pld", "rdp"))
    assert exact == pytest.approx(1.9930914, abs=1e-6)
    assert exact <= pld <= 1.005 * exact
    assert pld <= rdp == pytest.approx(2.166, rel=0.01)


def test_rdp_equals_opacus() -> None:
    from opacus.accountants import RDPAccountant

    accountant = RDPAccountant()
    accountant.history = [(1.1, 0.02, 300), (2.0, 0.1, 50)]
    ours = compose([(2.0, 0.1, 50), (1.1, 0.02, 300)], DELTA, accountant="rdp").epsilon
    assert ours == pytest.approx(accountant.get_epsilon(DELTA), rel=1e-3)


@pytest.mark.parametrize(("sigma", "rate"), [(1.0, 0.3), (0.7, 0.05), (3.0, 0.9), (0.15, 0.5)])
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


@given(st.integers(0, 3), st.integers(0, 2), COUNTS)
def test_epsilon_is_monotone(which_sigma: int, which_rate: int, count: int) -> None:
    def epsilon(sigma: float, rate: float, count: int, delta: float = DELTA) -> float:
        return compose([(sigma, rate, count)], delta, accountant="rdp").epsilon

    sigma, more_noise = SIGMAS[which_sigma : which_sigma + 2]
    rate, more_records = RATES[which_rate : which_rate + 2]
    here = epsilon(sigma, rate, count)
    assert epsilon(sigma, rate, count + 1) > here
    assert epsilon(more_noise, rate, count) < here
    assert epsilon(sigma, more_records, count) > here
    assert epsilon(sigma, rate, count, DELTA / 10) > here


@given(st.sampled_from(SIGMAS), st.sampled_from(RATES), st.integers(1, 50), st.integers(2, 8))
def test_run_costs_between_one_round_and_the_naive_sum(sigma: float, rate: float, steps: int, rounds: int) -> None:
    accountant = "auto" if rate == 1 else "rdp"
    run = compose([(sigma, rate, steps)] * rounds, DELTA, accountant=accountant).epsilon
    assert run == compose([(sigma, rate, steps * rounds)], DELTA, accountant=accountant).epsilon
    assert run >= compose([(sigma, rate, steps)], DELTA, accountant=accountant).epsilon
    naive = rounds * compose([(sigma, rate, steps)], DELTA / rounds, accountant=accountant).epsilon
    assert run <= naive * (1 + 1e-9)


@given(st.permutations([(2.0, 1.0, 3), (4.0, 0.1, 20), (1.5, 0.02, 7)]))
def test_order_of_spends_does_not_matter(spends: list[tuple[float, float, int]]) -> None:
    assert compose(spends, DELTA, accountant="rdp").epsilon == compose(sorted(spends), DELTA, accountant="rdp").epsilon


def test_gaussian_releases_compose_in_closed_form() -> None:
    bound = compose([(20.0, 1.0, 1), (30.0, 1.0, 200)], DELTA)
    assert bound.accountant == "exact"
    assert bound.epsilon == pytest.approx(1.878, abs=5e-4)
    assert bound.epsilon == pytest.approx(gaussian_epsilon((1 / 400 + 200 / 900) ** -0.5, DELTA), abs=1e-9)


def test_empty_run_costs_nothing_and_no_noise_is_infinite() -> None:
    assert compose([], DELTA).epsilon == 0.0
    assert compose([(1.0, 0.0, 5), (1.0, 0.5, 0)], DELTA).epsilon == 0.0
    assert compose([(0.0, 1.0, 1)], DELTA).epsilon == math.inf


@pytest.mark.parametrize(
    ("spend", "delta"), [((5.0, 0.01, 10**6), 1e-9), ((1.0, 0.05, 200), 1e-15), ((2e-3, 0.5, 1), DELTA)]
)
def test_rdp_replaces_pld_where_the_grid_is_too_large_or_not_accurate(
    spend: tuple[float, float, int], delta: float
) -> None:
    refused(lambda: compose([spend], delta, accountant="pld"), NotAccountable, "accountant='rdp'")
    assert compose([spend], delta) == compose([spend], delta, accountant="rdp")
    ledger = Ledger(delta=delta)
    ledger.spend(Event("dp_sgd", spend[0], rate=spend[1], count=spend[2]))
    assert any("5 to 26 %" in remark for remark in ledger.guarantee().info()["remarks"])


@pytest.mark.parametrize("count", [100, 100_000])
def test_rounding_of_the_grid_is_charged_to_delta(count: int) -> None:
    """The bound on rounding errors, 4e-15 a release, is 40 % of this delta at 100,000 releases."""
    exact = gaussian_epsilon(2.0, 1e-9)
    assert exact <= pld_epsilon([(2.0 * count**0.5, 1 - 1e-12, count)], 1e-9) <= 1.05 * exact


@pytest.mark.parametrize("delta", [0.0, 1.0, -1e-5, 2.0])
def test_delta_out_of_range_is_refused(delta: float) -> None:
    refused(lambda: compose([(1.0, 1.0, 1)], delta), NotAccountable, "delta must be in")


def test_invalid_spends_are_refused() -> None:
    refused(lambda: compose([(-1.0, 1.0, 1)], DELTA), ValueError, "sigma")
    refused(lambda: compose([(1.0, 1.5, 1)], DELTA), ValueError, "rate")
    refused(lambda: compose([], DELTA, accountant="gdp"), ValueError, "accountant")


def test_plan_is_exact_at_rate_one_and_accounts_for_earlier_spends() -> None:
    alone = plan_noise(4.0, DELTA, count=20)
    assert alone.accountant == "exact"
    assert alone.sigma == pytest.approx(gaussian_sigma(4.0, DELTA, releases=20), rel=1e-9)
    after = plan_noise(4.0, DELTA, count=20, spent=[(2.0, 1.0, 1)])
    assert after.sigma > alone.sigma
    assert compose([(2.0, 1.0, 1), (after.sigma, 1.0, 20)], DELTA).epsilon == pytest.approx(4.0, rel=1e-9)
    refused(lambda: plan_noise(1.0, DELTA, spent=[(2.0, 1.0, 1)]), NotAccountable, "spent already")


def test_plan_below_rate_one_is_tighter_than_rdp_and_stays_within() -> None:
    tight = plan_noise(4.0, DELTA, count=100, rate=0.1)
    loose = plan_noise(4.0, DELTA, count=100, rate=0.1, accountant="rdp")
    assert tight.sigma < loose.sigma
    assert tight.accountant == "pld"
    assert 3.999 < tight.epsilon <= 4.0
    assert loose.epsilon == pytest.approx(4.0, rel=3e-4)
    assert loose.epsilon <= 4.0


@pytest.mark.parametrize(
    ("epsilon", "count", "std"), [(1.0, 200, 0.114), (2.0, 200, 0.061), (4.0, 200, 0.033), (8.0, 200, 0.018)]
)
def test_plan_reports_the_noise_on_a_class_mean(epsilon: float, count: int, std: float) -> None:
    expected = plan_noise(epsilon, DELTA, count=count, accountant="rdp")
    assert expected.noise_std(500) == pytest.approx(std, rel=0.04)
    assert expected.snr(500, 2048) == pytest.approx(1 / (expected.noise_std(500) * math.sqrt(2048)))
    assert expected.snr(500, 2048, signal=0.5) == pytest.approx(expected.snr(500, 2048) / 2)


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


def test_pld_is_never_below_the_closed_form() -> None:
    for sigma, count in ((2.0, 1), (5.0, 40), (20.0, 1000)):
        exact = compose([(sigma, 1.0, count)], DELTA).epsilon
        assert exact <= compose([(sigma, 1.0, count)], DELTA, accountant="pld").epsilon <= 1.005 * exact


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
@pytest.mark.parametrize(("least", "count"), [(0.4, 1), (3.0, 5), (300.0, 90)])
def test_many_kinds_at_rate_one_are_just_above_the_closed_form(least: float, count: int, delta: float) -> None:
    spends = [(least * (30 + i), 1.0, count + i) for i in range(40)]
    exact = gaussian_epsilon(sum(n / sigma**2 for sigma, _, n in spends) ** -0.5, delta)
    assert exact <= pld_epsilon(spends, delta) <= 1.005 * exact


@pytest.mark.parametrize("order", [1.05, 2.0, 2.5, 7.0, 9.3, 40.0, 512.0])
def test_rdp_of_many_kinds_is_an_upper_bound_and_exact_at_integers(order: float) -> None:
    spends = [(0.8 + i / 7, 0.01 if i % 2 else 0.4, 1 + i) for i in range(30)]
    many = compose(spends, DELTA, order=order).epsilon
    rest = _rdp_at((), DELTA, order)
    wanted = max(0.0, rest + sum(_rdp_at((spend,), DELTA, order) - rest for spend in spends))
    assert many >= wanted * (1 - 1e-9)
    assert many <= wanted * (1.3 if order % 1 else 1 + 1e-9) or order < 2
