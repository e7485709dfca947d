from __future__ import annotations

import math
import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from distillkit.privacy import (
    NotAccountable,
    compose,
    gaussian_delta,
    gaussian_epsilon,
    gaussian_sigma,
    plan,
)
from distillkit.privacy.pld import _one_direction, pld_epsilon

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
    (0.0512, 1.0, 1000, 12.31, 11.30),
    (0.0512, 3.0, 1000, 2.487, 2.284),
    (0.0512, 5.0, 1000, 1.376, 1.259),
    (0.0512, 1.0, 20000, 85.1, 80.9),
    (0.0512, 3.0, 20000, 14.05, 13.12),
    (0.0512, 5.0, 20000, 7.38, 6.859),
    (0.0427, 1.0, 1000, 10.0, 9.156),
    (0.0427, 3.0, 1000, 2.03, 1.865),
    (0.0427, 5.0, 1000, 1.127, 1.031),
    (0.0427, 1.0, 20000, 65.6, 62.2),
    (0.0427, 3.0, 20000, 11.22, 10.46),
    (0.0427, 5.0, 20000, 5.96, 5.533),
]


@pytest.mark.parametrize(("rate", "sigma", "steps", "rdp", "pld"), TABLE)
def test_epsilon_of_feddm_settings(rate: float, sigma: float, steps: int, rdp: float, pld: float) -> None:
    spends = [(sigma, rate, steps)]
    assert compose(spends, DELTA, accountant="rdp").epsilon == pytest.approx(rdp, rel=0.01)
    tight = compose(spends, DELTA)
    assert tight.accountant == "pld"
    assert tight.epsilon == pytest.approx(pld, rel=1e-3)


@pytest.mark.parametrize(
    ("rate", "sigma", "rdp"), [(0.512, 1.0, 237), (0.512, 3.0, 40.0), (0.512, 5.0, 19.9), (0.4267, 3.0, 31.3)]
)
def test_epsilon_when_256_of_500_are_drawn_for_each_class(rate: float, sigma: float, rdp: float) -> None:
    assert compose([(sigma, rate, 1000)], DELTA, accountant="rdp").epsilon == pytest.approx(rdp, rel=0.01)


def test_every_accountant_is_above_the_exact_value_at_rate_one() -> None:
    exact, pld, rdp = (compose([(2.0, 1.0, 1)], DELTA, accountant=a).epsilon for a in ("auto", "pld", "rdp"))
    assert exact == pytest.approx(1.9930914, abs=1e-6)
    assert exact <= pld <= (1 + 1e-5) * exact
    assert pld <= rdp == pytest.approx(2.166, rel=0.01)


@settings(max_examples=15)
@given(st.floats(0.3, 80.0), st.integers(1, 20_000), st.floats(-14.0, -2.0), st.integers(1, 3))
def test_pld_is_never_below_the_exact_value_and_close_above_it(
    sigma: float, count: int, exponent: float, parts: int
) -> None:
    """At rate 1 the truth has a closed form, however many kinds of release and however small delta is."""
    delta = 10.0**exponent
    spends = [(sigma * (1 + k), 1.0, max(1, count // (1 + k))) for k in range(parts)]
    exact = compose(spends, delta).epsilon
    assert compose(spends, delta).accountant == "exact"
    assert exact * (1 - 1e-12) <= pld_epsilon(spends, delta) <= exact * 1.001 + 1e-6


def test_rdp_is_opacus() -> None:
    from opacus.accountants import RDPAccountant

    accountant = RDPAccountant()
    accountant.history = [(1.1, 0.02, 300), (2.0, 0.1, 50)]
    ours = compose([(2.0, 0.1, 50), (1.1, 0.02, 300)], DELTA, accountant="rdp").epsilon
    assert ours == pytest.approx(accountant.get_epsilon(DELTA), rel=1e-3)


PEER = [
    ([(30.0, 0.02, 100_000)], 1e-5, 0.768953),
    ([(20.0, 0.02, 100_000)], 1e-5, 1.200555),
    ([(30.0, 0.02, 10_000)], 1e-5, 0.219223),
    ([(1.0, 0.05, 1_000)], 1e-5, 10.986679),
    ([(1.0, 0.05, 20_000)], 1e-5, 78.097329),
    ([(0.6, 0.1, 2_000)], 1e-5, 128.535323),
    ([(3.0, 0.001, 100_000)], 1e-8, 0.537927),
    ([(1.0, 0.05, 200)], 1e-12, 9.313660),
    ([(3.0, 0.9, 10)], 1e-5, 4.206884),
]
"""Computed with dp-accounting 0.6.0 (Google's, another implementation): `from_gaussian_mechanism(sigma,
sampling_prob=rate, use_connect_dots=True)`, self-composed, at grid steps of 1e-5 to 1e-3; upper bounds, too."""


@pytest.mark.parametrize(("spends", "delta", "peer"), PEER)
def test_pld_agrees_with_another_implementation(
    spends: list[tuple[float, float, int]], delta: float, peer: float
) -> None:
    bound = compose(spends, delta)
    assert bound.accountant == "pld"
    assert peer * (1 - 2e-4) <= bound.epsilon <= peer * (1 + 1e-3)
    assert bound.epsilon < compose(spends, delta, accountant="rdp").epsilon


def test_pld_lies_within_the_interval_of_opacus_prv() -> None:
    """Theirs covers the removed record, the larger direction here, and brackets the truth."""
    from opacus.accountants import PRVAccountant

    accountant = PRVAccountant()
    accountant.history = [(1.1, 0.05, 100)]
    low, _, high = accountant._get_dprv(eps_error=0.01, delta_error=DELTA / 1000).compute_epsilon(
        DELTA, DELTA / 1000, 0.01
    )
    assert low <= pld_epsilon([(1.1, 0.05, 100)], DELTA) <= high


@pytest.mark.parametrize(("sigma", "rate"), [(1.0, 0.3), (0.7, 0.05), (3.0, 0.9)])
def test_pld_of_one_step_is_the_exact_mechanisms_in_either_direction(sigma: float, rate: float) -> None:
    delta, step = 1e-3, sigma / 5000
    x = torch.arange(-12 * sigma, 12 * sigma + 1, step, dtype=torch.float64)
    without = normal_density(x, 0, sigma)
    mixed = (1 - rate) * without + rate * normal_density(x, 1, sigma)
    spends = [(sigma, rate, 1)]
    found = []
    for direction, first, second in (("removed", mixed, without), ("added", without, mixed)):
        epsilon = _one_direction(spends, delta, direction)  # type: ignore[arg-type]
        assert hockey_stick(first, second, epsilon, step) <= delta * (1 + 1e-6)
        assert hockey_stick(first, second, epsilon * (1 - 1e-4), step) > delta
        found.append(epsilon)
    assert pld_epsilon(spends, delta) == max(found)
    assert found[0] != found[1]


@settings(max_examples=8)
@given(st.floats(-1.5, 3.0), st.floats(-6.0, 0.0), st.floats(0.0, 5.0), st.floats(-14.0, -1.0))
def test_pld_has_an_answer_everywhere(sigma: float, rate: float, count: float, delta: float) -> None:
    spends = [(10.0**sigma, 10.0**rate, int(10.0**count))]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        epsilon = pld_epsilon(spends, 10.0**delta)
    assert 0 <= epsilon <= compose(spends, 10.0**delta, accountant="rdp").epsilon * (1 + 1e-3) + 1e-3


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
def test_a_run_costs_between_one_round_and_the_naive_sum(sigma: float, rate: float, steps: int, rounds: int) -> None:
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


def test_nothing_costs_nothing_and_no_noise_costs_everything() -> None:
    assert compose([], DELTA).epsilon == 0.0
    assert compose([(1.0, 0.0, 5), (1.0, 0.5, 0)], DELTA).epsilon == 0.0
    assert compose([(0.0, 1.0, 1)], DELTA).epsilon == math.inf


def test_huge_epsilons_and_tiny_deltas_have_a_tight_bound_too() -> None:
    for spends, delta, low, high in (
        ([(1.0, 0.512, 20000)], DELTA, 3200, 3260),
        ([(1.0, 0.05, 200)], 1e-15, 11.0, 11.1),
    ):
        bound = compose(spends, delta)
        assert bound.accountant == "pld"
        assert low < bound.epsilon < high < compose(spends, delta, accountant="rdp").epsilon


@pytest.mark.parametrize("delta", [0.0, 1.0, -1e-5, 2.0])
def test_delta_out_of_range_is_refused(delta: float) -> None:
    with pytest.raises(NotAccountable, match="delta must be in"):
        compose([(1.0, 1.0, 1)], delta)


def test_bad_spends_are_refused() -> None:
    with pytest.raises(ValueError, match="sigma"):
        compose([(-1.0, 1.0, 1)], DELTA)
    with pytest.raises(ValueError, match="rate"):
        compose([(1.0, 1.5, 1)], DELTA)
    with pytest.raises(ValueError, match="accountant"):
        compose([], DELTA, accountant="gdp")


def test_plan_is_exact_at_rate_one_and_leaves_room_for_what_was_spent() -> None:
    alone = plan(4.0, DELTA, count=20)
    assert alone.accountant == "exact"
    assert alone.sigma == pytest.approx(gaussian_sigma(4.0, DELTA, releases=20), rel=1e-9)
    after = plan(4.0, DELTA, count=20, spent=[(2.0, 1.0, 1)])
    assert after.sigma > alone.sigma
    assert compose([(2.0, 1.0, 1), (after.sigma, 1.0, 20)], DELTA).epsilon == pytest.approx(4.0, rel=1e-9)
    with pytest.raises(NotAccountable, match="spent already"):
        plan(1.0, DELTA, spent=[(2.0, 1.0, 1)])


def test_plan_below_rate_one_is_tightened_and_stays_within() -> None:
    tight = plan(4.0, DELTA, count=100, rate=0.1)
    loose = plan(4.0, DELTA, count=100, rate=0.1, accountant="rdp")
    assert tight.sigma < loose.sigma
    assert tight.accountant == "pld"
    assert 3.99 < tight.epsilon <= 4.0
    assert loose.epsilon == pytest.approx(4.0, rel=3e-3)
    assert loose.epsilon <= 4.0


@pytest.mark.parametrize(
    ("epsilon", "count", "std"), [(1.0, 200, 0.114), (2.0, 200, 0.061), (4.0, 200, 0.033), (8.0, 200, 0.018)]
)
def test_plan_says_the_noise_on_a_class_mean(epsilon: float, count: int, std: float) -> None:
    expected = plan(epsilon, DELTA, count=count, accountant="rdp")
    assert expected.noise_std(500) == pytest.approx(std, rel=0.04)
    assert expected.snr(500, 2048) == pytest.approx(1 / (expected.noise_std(500) * math.sqrt(2048)))
    assert expected.snr(500, 2048, signal=0.5) == pytest.approx(expected.snr(500, 2048) / 2)
