"""Differences of bfloat16 from float32 over five seeds: test accuracies in per cent.

    python -m tests.benchmarks precision --out docs/results/precision.jsonl

Both precisions have the same seeds, so differences are paired. Intervals are Student's t intervals of the mean.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from scipy import stats

from distillkit._utils.provenance import git_commit
from distillkit.augment import DSA
from distillkit.condense import distribution_matching
from distillkit.data import load
from distillkit.evaluate import evaluate
from distillkit.labels import soft_labels
from distillkit.networks import ConvNet, RandomNetworks, build
from distillkit.training import Protocol, accuracy, train

SEEDS = range(5)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--device", default="cpu")
    o = parser.parse_args()
    lines = []
    for what, work in works(o.device).items():
        pairs = []
        for seed in SEEDS:
            found = []
            for cast in (False, True):
                how: dict[str, Any] = {"precision": "bf16"} if cast else {}
                found.append(100 * work(seed, **how))
            pairs.append(found)
            print(what, seed, [round(value, 2) for value in found], flush=True)
        differences = [low - high for high, low in pairs]
        spread = statistics.stdev(differences)
        half = stats.t.ppf(0.975, len(pairs) - 1) * spread / len(pairs) ** 0.5
        mean = statistics.fmean(differences)
        row = {
            "what": what, "float32": statistics.fmean(p[0] for p in pairs), "difference": mean, "low": mean - half,
            "high": mean + half, "pairs": pairs, "seeds": len(pairs), "device": o.device, "commit": git_commit(),
            "torch": str(torch.__version__), "machine": platform.machine(),
        }  # fmt: skip
        lines.append(json.dumps(row))
        print(f"{what}: {mean:+.2f} [{mean - half:+.2f}, {mean + half:+.2f}] points", flush=True)
    if o.out:
        o.out.write_text("\n".join(lines) + "\n", encoding="utf-8")


def works(device: str) -> dict[str, Callable[..., float]]:
    """Return functions of a seed that return an accuracy in [0, 1]."""
    real, test = load("digits", size=16)
    real = real[:600]
    make = partial(ConvNet, real.shape, 10, width=16, depth=2)
    how: dict[str, Any] = {"progress": False, "device": device}
    protocol = Protocol(epochs=100, augment=DSA(), batch=64)

    def tested(small: Any, seed: int, **precision: Any) -> float:
        options = {"num_networks": 1, "protocol": protocol, "generator": seed, **how, **precision}
        return evaluate(small, test, make, **options).accuracy

    def trained(seed: int, **precision: Any) -> float:
        network = build(make, seed)
        train(network, real, Protocol(epochs=10, batch=64), generator=seed, **how, **precision)
        return accuracy(network, test, device=device, **precision)

    def condensed(seed: int, **precision: Any) -> float:
        options: dict[str, Any] = {"networks": RandomNetworks(make), "ipc": 2, "steps": 50, "batch_real": 64}
        return tested(distribution_matching(real, **options, generator=seed, **how), seed, **precision)

    def labelled(seed: int, **precision: Any) -> float:
        teacher = train(build(make, seed), real, Protocol(epochs=10, batch=64), generator=seed, **how, **precision)
        return tested(soft_labels(real[seed::20], teacher, pool=real, device=device, **precision), seed, **precision)

    return {
        "training on real images": trained, "evaluation of a condensed set": condensed,
        "teacher, soft labels and evaluation": labelled,
    }  # fmt: skip


if __name__ == "__main__":
    main()
