"""Coverage of intervals of the mean over targets, and the benchmark that measures it."""

from __future__ import annotations

import pytest
import torch

from attacks import roc
from attacks.membership import SHADOW_ATTACKS, ShadowScores, halves, leave_one_out, lira
from distillkit.rng import derive
from tests.scripts import load_script

BENCH = load_script("tests/benchmarks/bench_calibration.py")


@pytest.mark.parametrize("attack", ["LiRA offline", "threshold"])
def test_attacks_computed_together_equal_leave_one_out(attack: str) -> None:
    found, _ = BENCH.rates_and_truths(attack, 1.0, range(5, 7), 12, 40)
    for number, seed in enumerate((5, 6)):
        inside, scores = BENCH.design(1.0, seed, 12, 40)[:2]
        one = leave_one_out(
            ShadowScores(inside, {"model": scores}), {"a": SHADOW_ATTACKS[attack]}, fpr=BENCH.FPR, progress=False
        )["a"]
        assert [p.tpr.value for p in one.points] == pytest.approx(found[number, :, 1].tolist())
        assert [p.fpr.value for p in one.points] == pytest.approx(found[number, :, 2].tolist())
        for wanted, ours in zip((one.auc, one.tpr, one.fpr), BENCH.intervals(found[number], 40)):
            assert (ours.value, ours.low, ours.high) == pytest.approx((wanted.value, wanted.low, wanted.high))


def test_truth_of_simulated_targets_equals_that_of_more_models() -> None:
    """The closed form, against 400 more models attacked with the shadows and the threshold of one target."""
    truth = BENCH.rates_and_truths("LiRA offline", 1.0, range(5, 6), 12, 40)[1][0, 3]
    inside, scores, own, added = BENCH.design(1.0, 5, 12, 40)
    one = ShadowScores(inside, {"model": scores})
    point = leave_one_out(one, {"a": SHADOW_ATTACKS["LiRA offline"]}, fpr=BENCH.FPR, progress=False)["a"].points[3]
    g, rest = derive(1), one.without(3)
    member = halves(400, 40, 99)
    shift = BENCH.SHIFT * torch.randn(400, 1, generator=g, dtype=torch.float64)
    more = own + shift + torch.randn(400, 40, generator=g, dtype=torch.float64) + added * member
    attacked = torch.stack([lira(row, rest.inside, rest.scores["model"]) for row in more])
    area = sum(roc(row, own_half).auc for row, own_half in zip(attacked, member)) / 400
    called = attacked >= point.threshold
    measured = (area, *(float(called[side].double().mean()) for side in (member, ~member)))
    assert measured == pytest.approx(truth.tolist(), abs=0.015)


@pytest.mark.parametrize("world", ["null", "effect"])
def test_intervals_of_the_mean_over_targets_have_their_coverage(world: str) -> None:
    """200 designs of 16 shadows with the truth in closed form: 95 % of 200 are 190, with a deviation of 3.1."""
    for own in BENCH.block("leave_one_out, LiRA offline, 16 shadows", world, 50).values():
        assert 180 <= own["covered"] <= 199
        assert own["attacks"] == 200
        assert own["stated"] == 0.95
