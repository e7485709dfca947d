"""How often the intervals that attacks are reported with hold the truth: simulated attacks whose truth is a formula.

    OMP_WAIT_POLICY=PASSIVE python tests/benchmarks/bench_calibration.py [--blocks 1] [--out records.jsonl]

Every attack is simulated under the null (members score like others) and under an effect, in blocks of 100; a block's
count is a line of `--out`, and a second call goes on. 20 blocks are the 2,000 attacks of the page.

* One target, 500 members and 500 others with Gaussian scores, a false-positive rate of 5 %: rates at a threshold fixed
  beforehand, rates at the threshold that `Roc.at` chooses on the same scores, and what a hit is worth at a prior of
  10 %. The truth is the Gaussian's tail.
* Many targets, `leave_one_out`: 16 shadows in pairs of complements of 60 records. Each record has a score and an effect
  of its own (the same in all attacks), each model a shift that all its records share (a quarter of the noise's
  variance), so that records, complements, shadows and thresholds all tie targets together. The truth is what the
  attacks and thresholds at hand give on one more model, in closed form.
"""

from __future__ import annotations

import argparse
import math
import shlex
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from scipy.stats import norm
from torch import Tensor

from attacks.membership import ATTACKS, Found, Shadows, halves, leave_one_out
from attacks.stats import Estimate, Rate, at_threshold, ppv, roc
from distillkit.provenance import git_commit
from distillkit.rng import derive
from distillkit.study import Record, Records, read_records, write_records

EACH, FPR, PRIOR = 100, 0.05, 0.1
WORLDS = {"null": 0.0, "effect": 1.0}
SHIFT = 0.5
"""Standard deviation of what all scores of one model share."""

Interval = Rate | Estimate
Covered = list[tuple[str, Interval, float]]
"""Intervals by name, each with the truth."""


def ndtr(x: Tensor) -> Tensor:
    return torch.special.ndtr(x)


def fixed(effect: float, seed: int, size: int = 500) -> Covered:
    """One target at a threshold from elsewhere."""
    place, member = float(norm.isf(FPR)), torch.arange(2 * size) < size
    scores = torch.randn(2 * size, generator=derive(seed, "fixed"), dtype=torch.float64) + effect * member
    point, truth = at_threshold(scores, member, place), float(norm.sf(place - effect))
    return [
        ("true positives", point.tpr, truth),
        ("false positives", point.fpr, FPR),
        ("worth of a hit", point.ppv(PRIOR), ppv(truth, FPR, PRIOR)),
    ]


def chosen(effect: float, seed: int, size: int = 500) -> Covered:
    """One target at the threshold that `Roc.at` chooses, and the plain interval that it does not take."""
    member = torch.arange(2 * size) < size
    scores = torch.randn(2 * size, generator=derive(seed, "chosen"), dtype=torch.float64) + effect * member
    point, truth = roc(scores, member).at(FPR), float(norm.sf(norm.isf(FPR) - effect))
    plain = at_threshold(scores, member, point.threshold, chosen_elsewhere=True).tpr
    return [
        ("true positives", point.tpr, truth),
        ("false positives", point.fpr, float(norm.sf(point.threshold))),
        ("true positives, plain interval (wrong)", plain, truth),
    ]


def design(effect: float, seed: int, count: int, size: int) -> tuple[Shadows, Tensor, Tensor]:
    """Shadows' scores without any training, the records' own means, and what membership adds to each."""
    own = torch.randn(size, generator=derive(3), dtype=torch.float64)
    added = 2 * effect * torch.rand(size, generator=derive(4), dtype=torch.float64)
    inside, g = halves(count, size, seed), derive(seed, "scores")
    shift = SHIFT * torch.randn(count, 1, generator=g, dtype=torch.float64)
    scores = own + shift + torch.randn(count, size, generator=g, dtype=torch.float64) + added * inside
    return Shadows(inside, {"model": scores}), own, added


def truths(attack: str, one: Shadows, own: Tensor, added: Tensor, found: Found) -> Tensor:
    """Area, true and false positives that each target's attack and threshold give on one more model, [targets, 3].

    Both attacks rank by (score - place) / scale, which is Gaussian for a record of one more model.
    """
    rows = []
    for number, point in enumerate(found.points):
        place, scale, edge = torch.zeros_like(own), 1.0, point.threshold
        if attack == "LiRA offline":
            rest = one.without(number)
            scores, out = rest.scores["model"], ~rest.inside
            place = (scores * out).sum(0) / out.sum(0)
            scale = math.sqrt(float(((scores - place).square() * out).sum() / (out.sum(0) - 1).sum()))
            edge = float(torch.special.ndtri(torch.tensor(edge, dtype=torch.float64).sigmoid()))
        lead, wide = own - place, math.sqrt(1 + SHIFT**2)
        above = ndtr((lead + added)[:, None].sub(lead) / math.sqrt(2)).fill_diagonal_(0)
        rates = (ndtr((lead + more - scale * edge) / wide).mean() for more in (added, 0 * added))
        rows.append(torch.stack([above.sum() / (len(own) * (len(own) - 1)), *rates]))
    return torch.stack(rows)


def targets(attack: str, count: int = 16, size: int = 60) -> Callable[[float, int], Covered]:
    """Many targets, attacked in turn."""

    def simulated(effect: float, seed: int) -> Covered:
        one, own, added = design(effect, seed, count, size)
        found = leave_one_out(one, {attack: ATTACKS[attack]}, fpr=FPR, progress=False)[attack]
        truth = truths(attack, one, own, added, found).mean(0).tolist()
        return list(zip(("area", "true positives", "false positives"), (found.auc, found.tpr, found.fpr), truth))

    return simulated


SETTINGS: dict[str, Callable[[float, int], Covered]] = {
    "a threshold fixed beforehand": fixed,
    "a threshold chosen on the scores (Roc.at)": chosen,
    "leave_one_out, LiRA offline, 16 shadows": targets("LiRA offline"),
    "leave_one_out, one threshold, 16 shadows": targets("threshold"),
}


def block(setting: str, world: str, number: int, each: int = EACH) -> dict[str, dict[str, float]]:
    """By interval, of so many attacks how many intervals hold the truth, and how many lie beside it."""
    begun, counts = time.process_time(), dict[str, dict[str, float]]()
    for seed in range(number * each, (number + 1) * each):
        for name, interval, truth in SETTINGS[setting](WORLDS[world], seed):
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
