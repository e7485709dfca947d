"""Speed of a device: what it can do, and steps of components beside PyTorch's layers, in milliseconds.

python -m tests.benchmarks device --device cuda --out runs/speed.jsonl
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from distillkit import LabeledImages
from distillkit._utils.provenance import git_commit
from distillkit.augment import DSA
from distillkit.condense import distribution_matching
from distillkit.evaluate import evaluate
from distillkit.generate import invert
from distillkit.networks import ConvNet, RandomNetworks
from distillkit.normalization import IDENTITY
from distillkit.training import Protocol


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--smoke", action="store_true", help="tiny sizes")
    parser.add_argument("--out", type=Path, help="file of the results, a line for each")
    o = parser.parse_args()

    def write(**row: Any) -> None:
        line = {**row, "device": o.device, "smoke": o.smoke, "commit": git_commit(), "torch": str(torch.__version__)}
        print(*(f"{key}={value}" for key, value in row.items()), flush=True)
        if o.out:
            with o.out.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")

    side, width, real, size, steps = (16, 16, 16, 256, 2) if o.smoke else (32, 128, 256, 8192, 40)
    device, many = torch.device(o.device), 10 * real
    generator = torch.Generator().manual_seed(0)
    matrix, images = torch.randn(size, size, device=device), torch.randn(2 * many, 3, side, side, generator=generator)
    write(what="matrix product", tflops=round(2 * size**3 / _seconds(lambda: matrix @ matrix, device) / 1e12, 4))
    write(what="copy", gb_per_s=round(8 * size**2 / _seconds(lambda: matrix.clone(), device) / 1e9, 4))
    pool = LabeledImages(images, torch.arange(2 * many) % 10, num_classes=10, normalization=IDENTITY).to(device)
    layers: list[nn.Module] = []
    for k in range(3):
        layers += [nn.Conv2d(width if k else 3, width, 3, padding=1), nn.GroupNorm(width, width), nn.ReLU()]
        layers += [nn.AvgPool2d(2)]
    plain = nn.Sequential(*layers, nn.Flatten()).to(device)
    leaf = torch.randn(100, 3, side, side, device=device, requires_grad=True)

    def obvious() -> Tensor:
        with torch.no_grad():
            means = plain(pool.images[:many]).view(10, real, -1).mean(1)
        loss = (means - plain(leaf).view(10, 10, -1).mean(1)).square().sum()
        return torch.autograd.grad(loss, leaf)[0]

    make = partial(ConvNet, (3, side, side), 10, width=width)
    how: dict[str, Any] = {"networks": RandomNetworks(make), "batch_real": real, "progress": False, "device": o.device}
    theirs = _seconds(obvious, device)
    choices: dict[str, Any] = {"no augmentation": None, "DSA": DSA()}
    for name, augment in choices.items():
        matched = partial(distribution_matching, pool, augment=augment, **how)
        spent = _per_step(lambda n, f=matched: f(steps=n), steps, device)  # type: ignore[misc]
        write(what=f"DM step, {name}", ms=_ms(spent), straightforward_ms=_ms(theirs))
    inverted = partial(invert, make(), torch.arange(100) % 10, shape=(3, side, side), progress=False, device=o.device)
    write(what="inversion step", ms=_ms(_per_step(lambda n: inverted(steps=n), steps, device)))
    for name, augment in choices.items():
        protocol = Protocol(augment=augment, schedule="constant")
        tested = partial(evaluate, pool[:100], pool[100:200], make, num_networks=1, progress=False)
        spent = _per_step(lambda n, f=tested, p=protocol: f(protocol=replace(p, epochs=n)), steps, device)  # type: ignore[misc]
        write(what=f"epoch of 100 images, {name}", ms=_ms(spent))


def _seconds(work: Callable[[], object], device: torch.device, repeats: int = 10) -> float:
    """Return the mean seconds of a call, after one call to warm up."""
    for count in (1, repeats):
        began = time.perf_counter()
        for _ in range(count):
            work()
        if device.type != "cpu":
            torch.accelerator.synchronize()
    return (time.perf_counter() - began) / repeats


def _per_step(work: Callable[[int], object], steps: int, device: torch.device) -> float:
    """Return the seconds of a step: the difference of a long and a short call."""
    short, long = (_seconds(lambda n=n: work(n), device, repeats=1) for n in (2, 2 + steps))  # type: ignore[misc]
    return max(0.0, long - short) / steps


def _ms(seconds: float) -> float:
    return round(1000 * seconds, 3)


if __name__ == "__main__":
    main()
