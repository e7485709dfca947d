"""Audits: calibrated on true claims, powerful on false ones, equal to their papers' formulas on small numbers."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from scipy.optimize import brentq
from scipy.stats import beta, binom, norm

from attacks.audit import ClaimTest, audit_claim, epsilon_lower_bound, max_lower_bound, one_run_lower_bound, step_scores
from attacks.audit._outcomes import Event, candidate_events
from attacks.audit._rates import _window, p_value
from attacks.statistics import Rate, clopper_pearson
from distillkit.privacy import gaussian_delta, gaussian_sigma
from distillkit.rng import derive
from tests.refused import refused


def runs(sigma: float, count: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return fresh runs of a Gaussian mechanism with the record and without."""
    noise = sigma * torch.randn(2, count, generator=derive(seed), dtype=torch.float64)
    return noise[0] + 1, noise[1]


def profile(epsilon: float) -> tuple[float, list[tuple[float, float]]]:
    sigma = gaussian_sigma(epsilon, 1e-5)
    return sigma, [(e, gaussian_delta(sigma, e)) for e in torch.linspace(0, epsilon, 33).tolist()]


SIGMA, PROFILE = profile(4.0)


def test_error_rate_of_a_tight_claim_is_close_to_the_stated_one() -> None:
    """Level 10 %: of 200 audits 20 are expected; fewer than 9 or more than 33 have a chance below 1 %."""
    sigma, claim = profile(2.0)
    found = sum(audit_claim(*runs(sigma, 300, s), claim, confidence=0.9, generator=s).refuted for s in range(200))
    assert 9 <= found <= 33


def slow_p_value(counts: tuple[int, int, int, int], claim: list[tuple[float, float]], level: float) -> float:
    """Sum the probabilities of all counts whose statistic is as large, at many values of q."""
    hits, n, others, m = counts
    k, j = np.meshgrid(np.arange(n + 1), np.arange(m + 1), indexing="ij")

    def allowed(q: Any) -> tuple[Any, Any]:
        every = np.stack([np.exp(e) * q + d for e, d in claim])
        return np.minimum(every.min(0), 1), np.exp(np.array([e for e, _ in claim]))[every.argmin(0)]

    p, q = (k + 1) / (n + 2), (j + 1) / (m + 2)
    most, slope = allowed(q)
    statistic = (p - most) / np.sqrt(p * (1 - p) / n + slope**2 * q * (1 - q) / m)
    if statistic[hits, others] <= 0:
        return 1.0
    extreme = statistic >= statistic[hits, others] - 1e-9
    grid = np.linspace(*clopper_pearson(others, m, 1 - level / 10), 600)
    chances = [(binom.pmf(k, n, allowed(x)[0]) * binom.pmf(j, m, x))[extreme].sum() for x in grid]
    return min(1.0, max(chances) + level / 10)


@pytest.mark.parametrize(
    "counts",
    [(9, 12, 2, 15), (12, 12, 0, 12), (12, 12, 60, 150), (0, 9, 9, 9), (20, 20, 19, 20), (40, 40, 5, 5)],
)
@pytest.mark.parametrize(
    "claim", [[(1.5, 0.02)], [(0.0, 0.2), (1.0, 0.02), (3.0, 0.0)], [(0.0, 0.0)]], ids=["pair", "profile", "equality"]
)
def test_p_value_sums_all_more_extreme_counts(
    counts: tuple[int, int, int, int], claim: list[tuple[float, float]]
) -> None:
    assert (found := p_value(*counts, claim, 0.05)) == pytest.approx(slow_p_value(counts, claim, 0.05), rel=5e-3)
    assert found <= 1


@pytest.mark.parametrize("q", [0.0, 1e-5, 0.3, 1.0])
@pytest.mark.parametrize("count", [10, 10**6])
def test_counts_that_are_left_out_have_no_weight(q: float, count: int) -> None:
    low, high = _window(q, count)
    assert binom.cdf(low - 1, count, q) + binom.sf(high, count, q) < 1e-15
    assert 0 <= low <= high <= min(count, low + 20_000)


def test_at_most_256_thresholds_are_tried() -> None:
    scores = torch.arange(600.0).view(-1, 1).double()
    groups = candidate_events({"inside": scores[::2], "outside": scores[1::2]})
    wanted = [round(599 * k / 255) for k in range(256)]
    assert [[event.threshold for event in events] for events, *_ in groups] == [wanted] * 4


Counts = tuple[int, int, int, int]
Slow = tuple[str, str, float, int]  # world, side, threshold and column of an event


def slow_counts(inside: torch.Tensor, outside: torch.Tensor, seed: int) -> tuple[list[Slow], Callable[..., Counts]]:
    """Return all events of the first halves of the runs, and a function that counts an event run by run on a half."""
    rng = derive(seed)
    halves = {
        name: w[torch.randperm(len(w), generator=rng)].tensor_split(2)
        for name, w in (("inside", inside), ("outside", outside))
    }

    def counts(half: int, world: str, side: str, threshold: float, column: int) -> Counts:
        found = []
        for name in (world, "outside" if world == "inside" else "inside"):
            values = halves[name][half][:, column].tolist()
            found += [sum((v >= threshold) == (side == "at least") for v in values), len(values)]
        return found[0], found[1], found[2], found[3]

    places = [sorted({*torch.cat([w[0][:, c] for w in halves.values()]).tolist()}) for c in range(inside.shape[1])]
    sides = list(product(("inside", "outside"), ("at least", "below")))
    return [(*side, t, c) for c, values in enumerate(places) for side in sides for t in values], counts


@pytest.mark.parametrize("confidence", [0.95, 0.8])
@pytest.mark.parametrize("delta", [0.0, 0.1])
def test_many_run_bound_is_the_largest_refuted_epsilon(delta: float, confidence: float) -> None:
    """It is counted on one half of the runs, of the event with the best Clopper-Pearson bound on the other half."""
    tail, level = (1 - confidence) / 2, 1 - confidence

    def bound(k: int, n: int, j: int, m: int) -> float:
        low = beta.ppf(tail, k, n - k + 1) if k else 0.0
        return max(0.0, math.log(max(low - delta, 1e-9) / (beta.ppf(1 - tail, j + 1, m - j) if j < m else 1.0)))

    for seed in range(4):
        inside, outside = (1e8 + one for one in runs(0.3, 70, seed))  # which single precision cannot tell apart
        found = epsilon_lower_bound(inside, outside[:50], delta, confidence=confidence, generator=derive(seed))
        events, counts = slow_counts(inside[:, None], outside[:50, None], seed)
        chosen = counts(1, *max(events, key=lambda event: bound(*counts(0, *event))))
        assert found > 0.1
        assert p_value(*chosen, [(found + 1e-6, delta)], level) > level - 1e-9
        assert p_value(*chosen, [(found - 1e-6, delta)], level) <= level


@pytest.mark.parametrize("flipped", [False, True])
@pytest.mark.parametrize("negated", [False, True])
def test_claim_is_tested_on_the_clearest_event_of_the_other_half(flipped: bool, negated: bool) -> None:
    """The event is that with the largest excess in standard errors over the claim's least favorable pair."""
    claim = [(0.0, 0.3), (1.0, 0.05), (2.5, 0.0)] if flipped else [(5.0, 0.0)]

    def excess(k: int, n: int, j: int, m: int) -> float:
        p, q = (k + 1) / (n + 2), (j + 1) / (m + 2)
        slopes = [(math.exp(e), d) for e, d in claim]
        return min((p - f * q - d) / math.sqrt(p * (1 - p) / n + f * f * q * (1 - q) / m) for f, d in slopes)

    for seed in range(3):
        noise = torch.randn(150, 2, generator=derive(seed, "noise"), dtype=torch.float64).mul(4).round().add(0.0) / 4
        inside, outside = noise[:90] + torch.tensor([0.5, 2.0]), noise[90:]
        if negated:
            inside, outside = 0 - inside, 0 - outside
        worlds = (outside, inside) if flipped else (inside, outside)
        found = audit_claim(*worlds, claim, confidence=0.9, generator=seed)
        events, counts = slow_counts(*worlds, seed)
        [event] = [(w, s, t, c) for w, s, t, c in events if found.event == f"{w} scores {s} {t:.4g} in column {c}"]
        assert excess(*counts(0, *event)) == pytest.approx(max(excess(*counts(0, *one)) for one in events))
        hits, n, others, m = counts(1, *event)
        pair = min(claim, key=lambda one: math.exp(one[0]) * (others + 1) / (m + 2) + one[1])
        p = p_value(hits, n, others, m, claim, 1 - 0.9)
        rates = Rate.of(hits, n, 0.9), Rate.of(others, m, 0.9)
        assert found == ClaimTest(p <= 1 - 0.9, *pair, found.event, *rates, p, 0.9)


@pytest.mark.parametrize("epsilon", [1.0, 1000.0])
def test_a_verdict_states_the_shares_that_were_counted_and_allowed(epsilon: float) -> None:
    assert str(Event("outside", "below", 1.23456, 0, 2)) == "outside scores below 1.235 in column 0"
    assert str(Event("inside", "at least", 1e-9, 0, 1)) == "inside scores at least 1e-09"
    shown = {True: ("refuted", 0.0625), False: ("not refuted", 0.9)}
    allowed = {1.0: f"{100 * (math.e * 0.25 + 0.0625):.3g}", 1000.0: "100"}[epsilon]
    for refuted_, (verdict, p) in shown.items():
        made = ClaimTest(refuted_, epsilon, 0.0625, "event", Rate.of(9, 12), Rate.of(3, 12), p, 0.975)
        assert str(made) == (
            f"{verdict} at 97.5 %: event in 75 % of runs, where ({epsilon:.3g}, 0.062) allows {allowed} % (p = {p:.2g})"
        )


def test_maximum_bound_is_reached_by_disjoint_outcomes() -> None:
    for runs, level in ((200, 0.05), (61, 0.2), (61, 0.9)):
        worlds = torch.ones(runs, dtype=torch.float64), torch.zeros(runs, dtype=torch.float64)
        most = max_lower_bound(runs, confidence=1 - level)
        assert epsilon_lower_bound(*worlds, 0.0, confidence=1 - level) == pytest.approx(most)
        n = runs // 2  # (1 - q)^n at p = 1; no excess is left at n + 1 (with a hit and a miss more, p / q)
        assert most == pytest.approx(min(-math.log(1 - (0.9 * level) ** (1 / n)), math.log(n + 1)), rel=1e-3)


def chance(m: int, r: int, v: int, epsilon: float, delta: float) -> float:
    """Sum the paper's bound term by term."""
    q = math.exp(epsilon) / (1 + math.exp(epsilon))
    pmf = [binom.pmf(k, r, q) for k in range(r + 1)]
    beta = sum(pmf[v:])
    alpha = max([0.0, *(sum(pmf[max(0, v - i) : v]) / i for i in range(1, v + 1))])
    return min(1.0, beta + alpha * delta * 2 * m)


def refuted_by_masses(m: int, r: int, right: int, shift: float, level: float) -> bool:
    """Search the least mass of each number of correct guesses, from `right` down, with the paper's inequalities."""
    masses = {right: level}
    for count in range(right - 1, -1, -1):
        tail, wrong = (sum(p * weight(i) for i, p in masses.items()) / m for weight in (int, lambda i: r - i))
        least = norm.cdf(norm.ppf(min(1.0, tail)) - shift)
        masses[count] = max(0.0, least - wrong) * m / (r - count)
    return sum(masses.values()) > 1


@pytest.mark.parametrize(("delta", "level"), [(0.0, 0.05), (1e-3, 0.2), (0.01, 0.05), (0.01, 0.9)])
@pytest.mark.parametrize(
    ("m", "r", "wrong"),
    [
        (30, 30, 3), (30, 21, 1), (1, 1, 0), (9, 1, 0), (9, 7, 0), (41, 33, 5), (12, 5, 0), (50, 20, 12), (8, 8, 8),
        (400, 400, 0),
    ],
)  # fmt: skip
def test_one_run_bounds_invert_the_papers_bounds(m: int, r: int, wrong: int, delta: float, level: float) -> None:
    included = torch.arange(m) < (m + 1) // 2
    scores = torch.arange(m, 0, -1).double()
    high = (r + 1) // 2
    flips = torch.cat([torch.arange(high), torch.arange(m - r // 2, m)])[:wrong]
    included[flips] = ~included[flips]
    right, order = r - wrong, torch.randperm(m, generator=derive(m, r))
    given_, options = (scores[order], included[order], r, delta), {"confidence": 1 - level}
    epsilon = one_run_lower_bound(*given_, **options)
    if epsilon == 0:
        assert chance(m, r, right, 0.0, delta) >= level - 1e-9
    else:
        assert chance(m, r, right, epsilon, delta) == pytest.approx(level, rel=1e-6)
    if not delta:
        return
    shift, epsilon = 0.0, one_run_lower_bound(*given_, **options, tradeoff="gaussian")
    if epsilon:
        shift = brentq(lambda mu: gaussian_delta(1 / mu, epsilon) - delta, 1e-4, 60.0, xtol=1e-12)
        assert refuted_by_masses(m, r, right, shift - 1e-6, level)
    assert not refuted_by_masses(m, r, right, shift + 1e-3, level)


@pytest.mark.parametrize(
    ("canaries", "right", "guesses", "epsilon"),
    [(1000, 125, 200, 0.384), (1000, 170, 200, 2.229), (1000, 195, 200, 4.762), (500, 230, 300, 1.775)],
)
def test_gaussian_one_run_bound_equals_the_release(canaries: int, right: int, guesses: int, epsilon: float) -> None:
    """Values of PrivacyGuard's `FDPAnalysisNode` at delta 1e-5, whose noises are a grid of step 0.01."""
    included = torch.arange(canaries) < guesses // 2
    included[: guesses - right] = False
    scores = torch.arange(canaries, 0, -1).double()
    found = one_run_lower_bound(scores, included, guesses, 1e-5, tradeoff="gaussian")
    assert found == pytest.approx(epsilon, rel=0.02)


GOOD = torch.zeros(4, dtype=torch.float64)
COINS = torch.tensor([True, False, True, False])
BAD: list[tuple[Any, str]] = [
    (lambda: audit_claim(GOOD, GOOD, []), "claim must hold at least one"),
    *((lambda claim=claim: audit_claim(GOOD, GOOD, claim), rf"pairs \(epsilon, delta\), got {re.escape(repr(claim))}$")
        for claim in ([(1.0, 0.0), (1.0, 0.0, 0.0)], [1.0], {}, [(1.0,)])),
    *((lambda a=a, b=b: audit_claim(a, b, PROFILE), words) for a, b, words in (
        (GOOD / 0, GOOD, "^inside must not be NaN, but 4 of 4 are: the attack failed there"),
        (GOOD, GOOD.view(2, 2) / 0, "^outside must not be NaN, but 4 of 4 are"),
        (GOOD[:1], GOOD, r"inside must be \[n\] or \[n, d\] scores of at least 2 runs, got shape \[1\]"),
        (GOOD.view(2, 2, 1), GOOD, r"inside must be .* got shape \[2, 2, 1\]"),
        (GOOD[:, None][:, :0], GOOD, r"inside must be .* got shape \[4, 0\]"),
        (GOOD.view(2, 2), GOOD, "same statistics for each run, got 2 and 1 columns"),
        (GOOD, GOOD.int(), "outside must be a floating tensor, got torch.int32"),
    )),
    *((lambda call=call, one=one: call(one), f"^{name} must be .*, got {one:g}$") for call, name, *wrong in (
        (lambda x: audit_claim(GOOD, GOOD, [(0.0, 0.0), (x, 0.0)]), "epsilon of the claim", -1.0),
        (lambda x: audit_claim(GOOD, GOOD, [(0.0, 0.0), (0.0, x)]), "delta of the claim", -0.5, 1.0),
        (lambda x: audit_claim(GOOD, GOOD, PROFILE, confidence=x), "confidence", 0.0, 1.0),
        (lambda x: one_run_lower_bound(GOOD, COINS, 2, 0.0, confidence=x), "confidence", 0.0, 1.0),
        (lambda x: one_run_lower_bound(GOOD, COINS, 2, x), "delta", -0.1, 1.0),
        (lambda x: one_run_lower_bound(GOOD, COINS, x, 0.0), "guesses", 0, 5),
        (lambda x: epsilon_lower_bound(GOOD, GOOD, 0.0, confidence=x), "confidence", 0.0, 1.0),
        (lambda x: epsilon_lower_bound(GOOD, GOOD, x), "delta", -0.1, 1.0),
        (lambda x: max_lower_bound(9, confidence=x), "confidence", 0.0, 1.0), (max_lower_bound, "runs", 1),
        (lambda x: step_scores(GOOD[None], x), "sigma", 0.0),
        (lambda x: step_scores(GOOD[None], 1.0, rate=x), "rate", 0.0, 1.5),
    ) for one in wrong),
    *((lambda given=given, options=options: one_run_lower_bound(*given, 2, 0.0, **options), words)
        for *given, options, words in (
        (GOOD.view(2, 2), COINS, {}, r"scores must be at least 1 scores, \[n\], got shape \[2, 2\]"),
        (GOOD[:2], COINS.view(2, 2), {}, r"included must have the scores' shape \[2\], got \[2, 2\]"),
        (GOOD, COINS[:3], {}, r"included must have the scores' shape \[4\], got \[3\]"),
        (GOOD, COINS.int(), {}, "included must be a bool tensor"),
        (GOOD, COINS, {"tradeoff": "exact"}, "tradeoff must be one of 'approximate', 'gaussian', got 'exact'"),
        (GOOD, COINS, {"tradeoff": "gaussian"}, "delta must be above 0"),
    )),
]  # fmt: skip


@pytest.mark.parametrize("epsilons", [[0.0], [1.0], [1000.0, 0.0]])
def test_a_claim_may_have_delta_0(epsilons: list[float]) -> None:
    apart, equal = torch.ones(200).double(), torch.zeros(200).double()
    found = [audit_claim(one, equal, [(epsilon, 0.0) for epsilon in epsilons]) for one in (apart, equal)]
    assert [(one.refuted, one.epsilon) for one in found] == [(True, epsilons[-1]), (False, epsilons[-1])]


@pytest.mark.parametrize(("call", "said"), BAD, ids=range(len(BAD)))
def test_invalid_arguments_are_named(call: Any, said: str) -> None:
    refused(call, (TypeError, ValueError), said)


def test_step_scores_are_the_likelihood_ratio_and_the_range() -> None:
    steps = 3 * torch.randn(5, 4, generator=derive(0), dtype=torch.float64)
    scores = step_scores(steps.clone().requires_grad_(), 0.7, rate=0.2)
    outside, inside = norm.pdf(steps, 0, 0.7), norm.pdf(steps, 1, 0.7)
    assert scores[:, 0].numpy() == pytest.approx(np.log((0.8 * outside + 0.2 * inside) / outside).sum(1), 1e-12)
    assert scores[:, 1].tolist() == (steps.amax(1) - steps.amin(1)).tolist()
    far = step_scores(torch.tensor([[1e5], [-1e5]]), 0.1, rate=0.5)[:, 0]
    assert far.tolist() == pytest.approx([(1e5 - 0.5) / 0.01 + math.log(0.5), math.log(0.5)])
    assert step_scores(steps, 2.0)[:, 0].numpy() == pytest.approx((steps.sum(1).numpy() - 2) / 4)


@pytest.mark.parametrize("steps", [torch.zeros(3), torch.zeros(3, 0), torch.zeros(0, 3), torch.zeros(3, 2, 2)])
def test_step_scores_need_steps_of_runs(steps: torch.Tensor) -> None:
    refused(lambda: step_scores(steps, 1.0), ValueError, "steps must have two dimensions, none empty")
