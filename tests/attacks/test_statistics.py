"""Rates, curves and intervals: against SciPy, scikit-learn and explicit sums, and by simulation."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from scipy.stats import beta, binom, norm
from sklearn.metrics import roc_auc_score

from attacks import clopper_pearson, ppv, roc
from attacks.statistics import Estimate, OperatingPoint, Rate, at_threshold, bonferroni, ppv_interval
from distillkit.rng import derive
from tests.refused import refused

SCORES = st.lists(
    st.tuples(st.sampled_from([0.0, 0.5, 1.0, 2.0, math.inf]), st.booleans()), min_size=2, max_size=30
).filter(lambda rows: len({m for _, m in rows}) == 2)


@given(st.integers(1, 60), st.data(), st.floats(0.5, 0.999))
def test_clopper_pearson_inverts_the_binomial(trials: int, data: st.DataObject, confidence: float) -> None:
    hits = data.draw(st.integers(0, trials))
    low, high = clopper_pearson(hits, trials, confidence)
    tail, rate = (1 - confidence) / 2, Rate.of(hits, trials, confidence)
    assert (rate, rate.value) == (Rate(hits, trials, low, high, confidence), hits / trials)
    assert low == 0 if hits == 0 else binom.sf(hits - 1, trials, low) == pytest.approx(tail, rel=1e-6)
    assert high == 1 if hits == trials else binom.cdf(hits, trials, high) == pytest.approx(tail, rel=1e-6)


@given(SCORES)
def test_curve_equals_counts_of_a_plain_loop(rows: list[tuple[float, bool]]) -> None:
    scores, member = torch.tensor([s for s, _ in rows], dtype=torch.float64), torch.tensor([m for _, m in rows])
    curve = roc(scores, member)
    assert curve.thresholds.tolist() == [math.inf, *sorted({s for s, _ in rows}, reverse=True)]
    assert (curve.hits[0], curve.false[0], curve.thresholds.dtype) == (0, 0, torch.float64)
    for threshold, hits, false in list(zip(curve.thresholds, curve.hits, curve.false))[1:]:
        assert hits == sum(m and s >= threshold for s, m in rows)
        assert false == sum(not m and s >= threshold for s, m in rows)
    certain = sum(m and s == math.inf for s, m in rows)
    assert at_threshold(scores, member, math.inf).tpr == Rate.of(certain, int(member.sum()))
    assert at_threshold(scores.neg(), member, -math.inf).fpr.value == 1
    pairs = [(a > b) + 0.5 * (a == b) for a, m in rows if m for b, n in rows if not n]
    assert curve.auc == pytest.approx(np.mean(pairs))
    finite = scores.clamp(max=10)
    assert curve.auc == pytest.approx(roc_auc_score(member, finite))
    assert repr(curve) == f"Roc({member.sum()} members, {(~member).sum()} others; AUC {curve.auc:.3f})"


@given(SCORES, st.integers(1, 10))
def test_operating_point_is_optimal_within_its_false_positive_rate(rows: list[tuple[float, bool]], count: int) -> None:
    scores, member = torch.tensor([s for s, _ in rows], dtype=torch.float64), torch.tensor([m for _, m in rows])
    others = int((~member).sum())
    wanted = min(1.0, count / others)
    point = roc(scores, member).at(wanted)
    assert point.fpr.value <= wanted + 1e-12
    assert at_threshold(scores, member, point.threshold, chosen_elsewhere=True) == replace(
        point, tpr=Rate.of(point.tpr.hits, point.tpr.trials)
    )
    better = [at_threshold(scores, member, s, chosen_elsewhere=True) for s, _ in rows]
    assert point.tpr.hits == max([0, *(p.tpr.hits for p in better if p.fpr.value <= wanted + 1e-12)])
    assert point.tpr.low <= point.tpr.value <= point.tpr.high
    assert point.few == (point.fpr.hits < 10)


def test_intervals_have_their_stated_coverage() -> None:
    """600 attacks with Gaussian scores, whose true rate has a closed form.

    The coverage holds for a threshold selected on the scores, where the plain interval of Clopper and Pearson covers
    far less, and for the positive predictive value at a fixed threshold.
    """
    runs, n, fpr, effect = 600, 500, 0.05, 1.0
    truth = float(norm.sf(norm.isf(fpr) - effect))
    draws = torch.randn(runs, 2 * n, generator=derive(7), dtype=torch.float64)
    member = torch.arange(2 * n) < n
    chosen = plain = worth = 0
    for row in draws:
        scores = row + effect * member
        hit = at_threshold(scores, member, float(norm.isf(fpr))).ppv(0.1)
        worth += hit.low <= ppv(truth, fpr, 0.1) <= hit.high
        picked = roc(scores, member).at(fpr).tpr
        chosen += picked.low <= truth <= picked.high
        low, high = clopper_pearson(picked.hits, picked.trials)
        plain += low <= truth <= high
    assert 0.93 <= chosen / runs <= 0.98
    assert 0.93 <= worth / runs <= 0.98
    assert plain / runs < 0.93


def test_best_of_several_attacks_is_corrected_for_selection() -> None:
    assert [bonferroni(0.95, tried) for tried in (5, 1)] == pytest.approx([0.99, 0.95])
    assert str(Estimate(0.12345, -0.0123456, 12.3456, 0.9)) == "0.123 (-0.0123 to 12.3)"
    least, most = Estimate(0.5, 0.25, 0.75, 0.9), Estimate(0.1, 0.0, 0.25, 0.95)  # of which no logarithm exists
    assert ppv_interval(least, most, 0.5) == Estimate(ppv(0.5, 0.1, 0.5), 0.5, 1.0, 0.9)


@example(0, 9, 0.3)
@example(9, 0, 0.3)
@given(st.integers(0, 50), st.integers(0, 50), st.floats(0.001, 0.5))
def test_ppv_interval_is_between_the_extremes(hits: int, false: int, prior: float) -> None:
    scores = torch.cat([torch.arange(50) < hits, torch.arange(50) < false]).double()
    point = at_threshold(scores, torch.arange(100) < 50, 0.5)
    if hits + false == 0:
        refused(lambda: point.ppv(prior), ValueError, "must not both be 0")
        return
    worth = point.ppv(prior)
    assert worth.value == pytest.approx(prior * hits / (prior * hits + (1 - prior) * false))
    worst, best = ppv(point.tpr.low, point.fpr.high, prior), ppv(point.tpr.high, point.fpr.low, prior)
    assert worst - 1e-12 <= worth.low <= worth.value <= worth.high <= best + 1e-12
    assert worth.confidence == 0.95
    for side in ("tpr", "fpr"):
        other = replace(point, **{side: replace(getattr(point, side), confidence=0.9)})
        assert other.ppv(prior) == replace(worth, confidence=0.9)
    if not (hits and false):
        assert (worth.low, worth.high) == (worst, best)
        return
    logs = {name: np.log([r.low, r.value, r.high]) for name, r in (("tpr", point.tpr), ("fpr", point.fpr))}
    (a, b, c), (d, e, f) = logs["tpr"], logs["fpr"]
    ends = (b - e - math.sqrt((b - a) ** 2 + (f - e) ** 2), b - e + math.sqrt((c - b) ** 2 + (e - d) ** 2))
    odds = [prior / (1 - prior) * math.exp(end) for end in ends]
    assert [worth.low, worth.high] == pytest.approx([o / (1 + o) for o in odds])


@pytest.mark.parametrize(("members", "count", "rate", "confidence"), [
    (200, 400, 0.1, 0.95), (50, 60, 0.5, 0.9), (30, 500, 0.02, 0.99), (100, 100, 0.29, 0.5), (50, 60, 0.99, 0.9),
    (50, 60, 0.03, 0.95),  # no threshold is strict enough
])  # fmt: skip
def test_interval_of_a_selected_threshold_is_zou_and_donners(
    members: int, count: int, rate: float, confidence: float
) -> None:
    """Zou and Donner's: around the rate found, the error of the count and that of the threshold, whose true
    false-positive rate is that of an order statistic, a beta variable."""
    tail = (1 - confidence) / 2
    # As many others at least lie above a threshold of that true rate, and at most: with probability `tail` fewer, more.
    strict = max((k for k in range(count) if beta.cdf(rate, k + 1, count - k) >= 1 - tail), default=None)
    loose = min((k for k in range(1, count) if beta.cdf(rate, k, count + 1 - k) <= tail), default=None)
    member = torch.arange(members + count) < members
    for seed in range(40):
        scores = torch.randn(members + count, generator=derive(9, seed), dtype=torch.float64)
        scores += member if rate < 0.9 else -2 * member.int()
        scores = scores if seed % 2 else scores.mul(8).round() / 8  # with many ties
        point = roc(scores, member).at(rate, confidence=confidence)
        found, inside, others = point.tpr, scores[member], scores[~member].sort(descending=True).values
        assert point.fpr == Rate.of(int((others >= point.threshold).sum()), count, confidence)
        at_strict = 0.0 if strict is None else int((inside > others[strict]).sum()) / members
        at_loose = 1.0 if loose is None else int((inside >= others[loose - 1]).sum()) / members
        assert found.hits == int((inside > others[int(rate * count + 1e-9)]).sum())
        value = found.hits / members
        assert at_strict <= value <= at_loose
        low, high = clopper_pearson(found.hits, members, confidence)
        ends = value - math.hypot(value - low, value - at_strict), value + math.hypot(high - value, at_loose - value)
        assert (found.low, found.high) == pytest.approx((max(0.0, ends[0]), min(1.0, ends[1])))


def test_threshold_selected_on_the_scores_is_refused() -> None:
    """The threshold of `Roc.at`, or any other score: its plain interval would undercover (see above)."""
    member = torch.arange(200) < 100
    scores = (torch.randn(200, generator=derive(8)) + member).requires_grad_()
    assert not roc(scores, member).thresholds.requires_grad
    picked = roc(scores, member).at(0.05)
    for one in (picked.threshold, float(scores[3].detach()), float(scores[150].detach())):
        words = rf"must not be chosen on the scores it is reported on, but {one:g} is one .* Use roc\("
        refused(lambda one=one: at_threshold(scores, member, one), ValueError, words)  # type: ignore[misc]
    assert at_threshold(scores, member, picked.threshold, chosen_elsewhere=True).tpr.hits == picked.tpr.hits
    assert at_threshold(scores, member, math.inf).tpr.hits == 0
    assert at_threshold(scores, member, picked.threshold + 1e-9).tpr.trials == 100


def test_few_false_positives_are_named() -> None:
    for false in (9, 10):
        scores = torch.tensor([0.0, 1.0, *[1.0] * false, *[0.0] * (1000 - false)])
        point = at_threshold(scores, torch.arange(1002) < 2, 0.5)
        few = " (only 9 false positives)" if false == 9 else ""
        assert str(point) == f"TPR 50.0 % (1.3 to 98.7) at FPR {false / 10:.2g} %{few}"
        assert point == OperatingPoint(0.5, Rate.of(1, 2), Rate.of(false, 1000), false == 9)
    whole = at_threshold(torch.ones(20), torch.arange(20) < 5, 0.5, confidence=0.8)
    assert whole == OperatingPoint(0.5, Rate.of(5, 5, 0.8), Rate.of(15, 15, 0.8), False)
    assert str(whole).endswith(" at FPR 100 %")

    curve = roc(torch.cat([torch.tensor([2.0]), torch.linspace(0, 1, 1000)]), torch.arange(1001) < 1)
    assert [(curve.at(rate).fpr.hits, curve.at(rate).few) for rate in (0.009, 0.01)] == [(9, True), (10, False)]


ZEROS, ONE = torch.zeros(2), torch.tensor([True, False])


@pytest.mark.parametrize(
    ("call", "said"),
    [
        *((lambda given=given: roc(*given), words) for *given, words in (
            (ONE, ONE, "scores must be a floating tensor"), (ZEROS, ZEROS, "member must be a bool tensor"),
            (ZEROS, ONE[:1], r"same length, got \[2\] and \[1\]"), (ZEROS, ONE.repeat(2, 1), r"got \[2\] and \[2, 2\]"),
            (ZEROS.repeat(2, 1), ONE.repeat(2, 1), r"of the same length, got \[2, 2\] and \[2, 2\]"),
            (ZEROS / 0, ONE, "must not be NaN, but 2 are: the attack failed there"),
            *((ZEROS, side, "must have at least one member and one non-member") for side in (ONE & False, ONE | True)),
        )),
        (lambda: roc(torch.arange(10.0), torch.arange(10) >= 4).at(0.24),
            "fpr must be at least 1/4, one false positive among the non-members, got 0.24; take more non-members"),
        (lambda: at_threshold(ZEROS, ONE, math.nan), "must be a number, got nan"),
        (lambda: at_threshold(ZEROS, ONE, True), "threshold must be a number, got bool"),
        (lambda: at_threshold(ZEROS, ONE, 1.0, chosen_elsewhere=1), "chosen_elsewhere must be True or False"),
        (lambda: ppv_interval(Rate.of(1, 2), 0.5, 0.5), "fpr must be a Rate"),
        (lambda: ppv_interval(0.5, Rate.of(1, 2), 0.5), "tpr must be a Rate"),
        (lambda: at_threshold(ZEROS, ONE, 10**400), "threshold must be finite"),
        (lambda: clopper_pearson(3, 2), "hits must be at most 2, got 3"),
        (lambda: ppv(0.0, 0.0, 0.5), "must not both be 0"),
        *((lambda call=call, one=one: call(one), f"^{name} must be .*, got {one:g}$") for call, name, *wrong in (
            (partial(clopper_pearson, 1, 2), "confidence", 0.0, 1.0), (partial(clopper_pearson, 0), "trials", 0),
            (partial(bonferroni, tried=2), "confidence", 0.0, 1.0), (partial(bonferroni, 0.9), "tried", 0),
            (lambda x: roc(ZEROS, ONE).at(1.0, confidence=x), "confidence", 0.0, 1.0),
            (roc(ZEROS, ONE).at, "fpr", 0.0, 1.5), (lambda x: ppv(x, 0.5, 0.5), "tpr", -0.1, 1.5),
            (lambda x: ppv(0.5, x, 0.5), "fpr", -0.1, 1.5), (partial(ppv, 0.5, 0.1), "prior", 0.0, 1.0),
        ) for one in wrong),
    ],
)  # fmt: skip
def test_invalid_arguments_are_named(call: object, said: str) -> None:
    refused(call, (TypeError, ValueError), said)
