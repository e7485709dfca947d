"""Power and error rate of audits: one private step, correct or with a planted mistake, many times.

    OMP_WAIT_POLICY=PASSIVE python tests/benchmarks/bench_audit.py [--blocks 1] [--runs 500] [--out records.jsonl]

The mechanism is the step of `train_private` on a linear model of three classes, made of the same calls: gradients of
`per_example_gradients` at public weights, clipped by `PrivateGradient`, records drawn by `Secret.poisson`, noise of
`Secret.add_noise`, from the operating system. All runs begin at the same weights, so gradients are taken and clipped
once, and the runs of an audit are drawn together; `tests/attacks/test_audit_power.py` compares with `train_private`.
Two worlds differ by one record, whose gradient is twenty clips long.

A run has four scores: the step along the record's gradient, in all and within each class. What is claimed is epsilon 4
at delta 1e-5 for one step, with the whole profile that the accountant gives. Every audit has `--runs` fresh runs in
each world and level 1 %. A block of 20 audits is a line of `--out`, and a second call goes on.
"""

from __future__ import annotations

import argparse
import math
import shlex
import sys
import time
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attacks.audit import audit_claim, epsilon_lower_bound, max_lower_bound
from distillkit._utils.provenance import git_commit
from distillkit.networks import build
from distillkit.normalization import Normalization
from distillkit.privacy import PrivateGradient, Secret, compose, gaussian_delta, per_example_gradients, plan_noise
from distillkit.rng import derive
from distillkit.sets import LabeledImages
from distillkit.study import Record, Records, read_records, write_records

EPSILON, DELTA, LEVEL = 4.0, 1e-5, 0.01
CLASSES, FEATURES, OTHERS, CLIP = 3, 4, 6, 0.05
EACH = 20
"""Audits in a block."""
UNNOISED = 1
"""The class whose weights get no noise, where that is the mistake."""


def linear() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(FEATURES, CLASSES))


@cache
def records() -> LabeledImages:
    """Return the canary record and the other records."""
    images = torch.randn(1 + OTHERS, 1, 2, 2, generator=derive(0, "audit"))
    space = Normalization((0.5,), (0.25,))
    return LabeledImages(images, torch.arange(1 + OTHERS) % CLASSES, num_classes=CLASSES, normalization=space)


@dataclass(frozen=True)
class Mechanism:
    """One private step, correct or with a mistake, and its claim.

    Attributes:
        rate: sampling rate of the records.
        stated: sampling rate for which the claim is made.
        noise: factor of the claimed noise.
        clipped: whether gradients are clipped.
        leaves_out: class whose weights get no noise.
    """

    rate: float = 1.0
    stated: float = 1.0
    noise: float = 1.0
    clipped: bool = True
    leaves_out: int | None = None

    @property
    def sigma(self) -> float:
        """Noise standard deviation / clip of the claim."""
        return sigma_for(self.stated)


WAYS = {
    "right, rate 1": Mechanism(),
    "right, rate 0.1": Mechanism(rate=0.1, stated=0.1),
    "noise halved": Mechanism(noise=0.5),
    "noise left out": Mechanism(noise=0.0),
    "a class without noise": Mechanism(leaves_out=UNNOISED),
    "not clipped": Mechanism(clipped=False),
    "rate 1 stated as 0.1": Mechanism(stated=0.1),
}


@cache
def sigma_for(rate: float) -> float:
    """Return the noise that one step at this rate needs for the claim."""
    return plan_noise(EPSILON, DELTA, rate=rate).sigma


@cache
def profile(rate: float) -> list[tuple[float, float]]:
    """Return the accounted profile of one step at this rate: (epsilon, delta) from delta 1e-5 to epsilon 0."""
    sigma = sigma_for(rate)
    if rate == 1:
        return [(e, gaussian_delta(sigma, e)) for e in torch.linspace(0, EPSILON, 33).tolist()]
    deltas = torch.logspace(-5, -0.7, 24, dtype=torch.float64).tolist()
    return [(compose([(sigma, rate, 1)], d).epsilon, d) for d in deltas]


@cache
def gradients() -> tuple[Tensor, Tensor]:
    """Return the public weights [P], and the gradient of every record there [1 + others, P]."""
    network = build(linear, 0).train()
    data = records()

    def losses(inputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(network(inputs), targets, reduction="none")

    rows_for = per_example_gradients(network, losses, like=(data.images, data.labels))
    rows = torch.cat([g.flatten(1) for g in rows_for(data.images, data.labels)], 1)
    return torch.cat([p.detach().flatten() for p in network.parameters()]), rows


@cache
def clipped(clip: float) -> Tensor:
    """Return the gradients clipped by `PrivateGradient`, float64 [1 + others, P]."""
    rows, alone = gradients()[1].double(), []
    private = PrivateGradient([torch.zeros_like(rows[0])], sigma=0.0, clip=clip, denominator=1.0, secret=Secret())
    for row in rows:
        private.add([row[None]])
        alone += private.take()
    return torch.stack(alone)


def stepped(way: Mechanism, runs: int, first: int, secret: Secret) -> Tensor:
    """Return the weights of fresh runs after one step of length 1, from record `first` on, float64 [runs, P]."""
    rows = clipped(CLIP if way.clipped else math.inf)[first:]
    taken = torch.zeros(runs * len(rows), dtype=torch.float64)
    taken[secret.poisson(len(taken), way.rate)] = 1.0
    noise = secret.add_noise(torch.zeros(runs, rows.shape[1]), way.noise * way.sigma * CLIP)
    if way.leaves_out is not None:
        noise[:, of_class() == way.leaves_out] = 0.0
    return gradients()[0] - (taken.view(runs, -1) @ rows + noise) / (way.rate * OTHERS)


def of_class() -> Tensor:
    """Return the class of each parameter, [P]: weights first, then biases."""
    return torch.cat([torch.arange(CLASSES).repeat_interleave(FEATURES), torch.arange(CLASSES)])


def scores(way: Mechanism, runs: int, secret: Secret) -> tuple[Tensor, Tensor]:
    """Return the scores of fresh runs with and without the record, [runs, 1 + classes] each, in clips."""
    before, rows = gradients()
    parts = [rows[0], *(rows[0] * (of_class() == c) for c in range(CLASSES))]
    along = torch.stack([part / part.norm() for part in parts], 1).double()
    inside, outside = (
        (before - stepped(way, runs, first, secret)) @ along * (way.rate * OTHERS / CLIP) for first in (0, 1)
    )
    return inside, outside


def audit(way: Mechanism, runs: int, number: int, secret: Secret | None = None) -> dict[str, float]:
    """Run `audit_claim` on all scores and on the first alone; also return the raw bound on all."""
    begun, claim = time.process_time(), profile(way.stated)
    inside, outside = scores(way, runs, secret or Secret())
    options: dict[str, Any] = {"confidence": 1 - LEVEL, "generator": number}
    return {
        "refuted": int(audit_claim(inside, outside, claim, **options).refuted),
        "refuted_one_score": int(audit_claim(inside[:, 0], outside[:, 0], claim, **options).refuted),
        "raw_epsilon": (raw := epsilon_lower_bound(inside, outside, DELTA, **options)),
        "raw_refuted": int(raw > EPSILON),
        "ceiling": max_lower_bound(runs, confidence=1 - LEVEL),
        "seconds_cpu": time.process_time() - begun,
    }


def block(way: Mechanism, runs: int, number: int) -> dict[str, float]:
    """Run a number of audits; return how many refute, and the mean and largest raw bound."""
    found = [audit(way, runs, seed) for seed in range(number * EACH, (number + 1) * EACH)]
    counts = {what: sum(f[what] for f in found) for what in ("refuted", "refuted_one_score", "raw_refuted")}
    raw = [f["raw_epsilon"] for f in found]
    seconds = sum(f["seconds_cpu"] for f in found)
    return {
        **counts, "audits": EACH, "raw_epsilon": sum(raw) / EACH, "raw_largest": max(raw),
        "ceiling": found[0]["ceiling"], "seconds_cpu": seconds,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=1)
    parser.add_argument("--runs", type=int, default=500)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    task = f"audit, {options.runs} runs in each world"
    facts = {"command": shlex.join(["python", *sys.argv]), "commit": git_commit(), "accuracy_last": None}
    known = read_records(options.out) if options.out and options.out.exists() else Records([])
    done = {(r.task, r.method, r.seed) for r in known}
    for number, name in ((n, name) for n in range(options.blocks) for name in WAYS):
        if (task, name, number) in done:
            continue
        found = block(WAYS[name], options.runs, number)
        new = Record({"task": task, "method": name, "seed": number, **found, **facts})
        known = Records([*known, new], known.missing)
        if options.out:
            write_records(known, options.out)
        said = ", ".join(f"{what} {found[what]}" for what in ("refuted", "refuted_one_score", "raw_refuted"))
        print(f"block {number}: {name:<22} of {EACH} audits: {said}; raw {found['raw_epsilon']:.2f}", flush=True)


if __name__ == "__main__":
    main()
