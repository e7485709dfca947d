"""Coverage of the intervals reported with attacks, on simulated attacks with a closed-form truth.

    OMP_WAIT_POLICY=PASSIVE python tests/benchmarks/bench_calibration.py [--blocks 1] [--out records.jsonl]

Every attack is simulated under the null (members score like others) and under an effect, in blocks of 200; a block's
count is a line of `--out`, and a second call goes on. 10 blocks are the 2,000 attacks of the page.

* One target, 500 members and 500 others with Gaussian scores, a false-positive rate of 5 %: rates at a threshold fixed
  beforehand, rates at the threshold that `Roc.at` chooses on the same scores, and what a hit is worth at a prior of
  10 %. The truth is the Gaussian's tail.
* Many targets, as `leave_one_out` attacks them: 16 shadows in pairs of complements of 60 records. Each record has a
  score and an effect of its own (the same in all attacks), each model a shift that all its records share (a quarter of
  the noise's variance), so that records, complements, shadows and thresholds all tie targets together. The truth is
  what the attacks and thresholds at hand give on one more model, in closed form. A block's attacks are computed
  together; `tests/attacks/membership/test_calibration.py` holds them against `leave_one_out`, number for number.
"""

from __future__ import annotations

import argparse
import math
import shlex
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from scipy.stats import norm
from torch import Tensor

from attacks.membership import halves
from attacks.statistics import Estimate, Rate, at_threshold, ppv, roc
from distillkit._utils.provenance import git_commit
from distillkit.rng import derive
from distillkit.study import Record, Records, read_records, write_records

EACH, FPR, PRIOR = 200, 0.05, 0.1
WORLDS = {"null": 0.0, "effect": 1.0}
SHIFT = 0.5
"""Standard deviation of what all scores of one model share."""

Interval = Rate | Estimate
Covered = list[tuple[str, Interval, float]]
"""Intervals by name, each with the truth."""


def ndtr(x: Tensor) -> Tensor:
    return torch.special.ndtr(x)


def fixed(effect: float, seed: int, size: int = 500) -> Covered:
    """Simulate one target with a threshold from elsewhere."""
    place, member = float(norm.isf(FPR)), torch.arange(2 * size) < size
    scores = torch.randn(2 * size, generator=derive(seed, "fixed"), dtype=torch.float64) + effect * member
    point, truth = at_threshold(scores, member, place), float(norm.sf(place - effect))
    return [
        ("true positives", point.tpr, truth),
        ("false positives", point.fpr, FPR),
        ("worth of a hit", point.ppv(PRIOR), ppv(truth, FPR, PRIOR)),
    ]


def chosen(effect: float, seed: int, size: int = 500) -> Covered:
    """Simulate one target with the threshold that `Roc.at` chooses, and the plain interval that it does not use."""
    member = torch.arange(2 * size) < size
    scores = torch.randn(2 * size, generator=derive(seed, "chosen"), dtype=torch.float64) + effect * member
    point, truth = roc(scores, member).at(FPR), float(norm.sf(norm.isf(FPR) - effect))
    plain = at_threshold(scores, member, point.threshold, chosen_elsewhere=True).tpr
    return [
        ("true positives", point.tpr, truth),
        ("false positives", point.fpr, float(norm.sf(point.threshold))),
        ("true positives, plain interval (wrong)", plain, truth),
    ]


def design(effect: float, seed: int, count: int, size: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Draw shadow memberships, scores [shadows, records], base scores of records and the effect of membership."""
    own = torch.randn(size, generator=derive(3), dtype=torch.float64)
    added = 2 * effect * torch.rand(size, generator=derive(4), dtype=torch.float64)
    inside, g = halves(count, size, seed), derive(seed, "scores")
    shift = SHIFT * torch.randn(count, 1, generator=g, dtype=torch.float64)
    return inside, own + shift + torch.randn(count, size, generator=g, dtype=torch.float64) + added * inside, own, added


def attacked(
    attack: str, inside: Tensor, scores: Tensor, target: int, rest: list[int]
) -> tuple[Tensor, Tensor, Tensor]:
    """Rank a target's records by (score - location) / scale; for several designs [b, ...]."""
    place, scale = torch.zeros_like(scores[:, 0]), torch.ones(len(scores), 1, dtype=torch.float64)
    if attack == "LiRA offline":
        known, out = scores[:, rest], ~inside[:, rest]
        place = (known * out).sum(1) / out.sum(1)
        squares = ((known - place[:, None]).square() * out).sum((1, 2))
        scale = (squares / (out.sum(1) - 1).sum(1)).sqrt()[:, None]
    return (scores[:, target] - place) / scale, place, scale


def rates_and_truths(
    attack: str, effect: float, seeds: range, count: int = 16, size: int = 60
) -> tuple[Tensor, Tensor]:
    """Return AUC, true and false positives of each target, and their truths on one more model: [b, targets, 3] each.

    A record of one more model has a Gaussian score, so both truths are tails, averaged over records and pairs of them.
    """
    drawn = [design(effect, seed, count, size) for seed in seeds]
    inside, scores = torch.stack([d[0] for d in drawn]), torch.stack([d[1] for d in drawn])
    own, added = drawn[0][2:]
    found, truth = [], []
    for target in range(count):
        rest = [s for s in range(count) if s // 2 != target // 2]
        if target % 2 == 0:
            judged = []
            for judge in rest:
                left = [s for s in rest if s // 2 != judge // 2]
                judged.append(attacked(attack, inside, scores, judge, left)[0][~inside[:, judge]].view(len(drawn), -1))
            others = torch.cat(judged, 1).sort(1, descending=True).values
            edge = others[:, math.floor(FPR * others.shape[1] + 1e-9) - 1, None]
        ranks, place, scale = attacked(attack, inside, scores, target, rest)
        member = inside[:, target]
        pairs = member[:, :, None] & ~member[:, None]
        above = (ranks[:, :, None] > ranks[:, None]) & pairs
        called = ranks >= edge
        shares = [(called & side).sum(1) / side.sum(1) for side in (member, ~member)]
        found.append(torch.stack([above.sum((1, 2)) / pairs.sum((1, 2)), *shares], 1))
        lead, wide = own - place, math.sqrt(1 + SHIFT**2)
        beats = ndtr(((lead + added)[:, :, None] - lead[:, None]) / math.sqrt(2))
        area = (beats.sum((1, 2)) - beats.diagonal(dim1=1, dim2=2).sum(1)) / (size * (size - 1))
        tails = [ndtr((lead + more - scale * edge) / wide).mean(1) for more in (added, 0 * added)]
        truth.append(torch.stack([area, *tails], 1))
    return torch.stack(found, 1).double(), torch.stack(truth, 1)


def intervals(found: Tensor, size: int = 60) -> list[Estimate]:
    """Return the intervals of `leave_one_out` around means over targets [targets, 3]: AUC, true and false positives."""
    module, units = sys.modules["attacks.membership.leave_one_out"], torch.arange(len(found)) // 2
    counted = [
        [Rate(round(float(share) * size / 2), size // 2, 0.0, 1.0, 0.95) for share in found[:, column]]
        for column in (1, 2)
    ]
    return [module._interval(found[:, 0].tolist(), units, 0.95), *(module._rate(c, units, 0.95) for c in counted)]


def targets(attack: str) -> Callable[[float, range], Iterator[Covered]]:
    """Simulate many targets, attacked in turn."""

    def simulated(effect: float, seeds: range) -> Iterator[Covered]:
        for found, truth in zip(*rates_and_truths(attack, effect, seeds)):
            yield list(zip(("area", "true positives", "false positives"), intervals(found), truth.mean(0).tolist()))

    return simulated


def one_by_one(simulated: Callable[[float, int], Covered]) -> Callable[[float, range], Iterator[Covered]]:
    """Turn a simulation of single attacks into one of many."""
    return lambda effect, seeds: (simulated(effect, seed) for seed in seeds)


SETTINGS: dict[str, Callable[[float, range], Iterator[Covered]]] = {
    "a threshold fixed beforehand": one_by_one(fixed),
    "a threshold chosen on the scores (Roc.at)": one_by_one(chosen),
    "leave_one_out, LiRA offline, 16 shadows": targets("LiRA offline"),
    "leave_one_out, one threshold, 16 shadows": targets("threshold"),
}


def block(setting: str, world: str, number: int, each: int = EACH) -> dict[str, dict[str, float]]:
    """Count, by interval, how many of a number of attacks have intervals that cover or miss the truth."""
    begun, counts = time.process_time(), dict[str, dict[str, float]]()
    for covered in SETTINGS[setting](WORLDS[world], range(number * each, (number + 1) * each)):
        for name, interval, truth in covered:
            own = counts.setdefault(name, {"covered": 0, "too_high": 0, "too_low": 0, "attacks": 0})
            own["too_high"] += interval.low > truth
            own["too_low"] += interval.high < truth
            own["covered"] += interval.low <= truth <= interval.high
            own["attacks"] += 1
            own["stated"] = interval.confidence
    for own in counts.values():
        own["seconds_cpu"] = (time.process_time() - begun) / len(counts)
    return counts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=1)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    facts = {"command": shlex.join(["python", *sys.argv]), "commit": git_commit(), "accuracy_last": None}
    known = read_records(options.out) if options.out and options.out.exists() else Records([])
    done = {(r.task, r.seed) for r in known}
    wanted = [(s, w, n) for s in SETTINGS for w in WORLDS for n in range(options.blocks)]
    for setting, world, number in wanted:
        task = f"{setting}, {world}"
        if (task, number) in done:
            continue
        found = block(setting, world, number)
        new = [Record({"task": task, "method": name, "seed": number, **own, **facts}) for name, own in found.items()]
        known = Records([*known, *new], known.missing)
        if options.out:
            write_records(known, options.out)
        said = ", ".join(f"{name} {own['covered']}" for name, own in found.items())
        print(f"{task}, block {number}: of {EACH} covered {said}", flush=True)


if __name__ == "__main__":
    main()
