"""Calls of `over_classes` and `over_repeats` that tests/distillkit/test_distributed.py also runs in processes.

`python -m tests.distillkit.distributed_cases RANK SIZE FOLDER CASES` runs cases in one of several gloo processes.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from distillkit import LabeledImages, Normalization
from distillkit.augment import DSA
from distillkit.condense import (
    InnerTraining,
    distribution_matching,
    gradient_matching,
    herding,
    k_center,
    random_subset,
    stitch,
)
from distillkit.distributed import over_classes, over_repeats
from distillkit.evaluate import evaluate
from distillkit.networks import ConvNet, build
from distillkit.networks.samplers import FixedNetwork, NetworkBall, RandomNetworks
from distillkit.privacy import Ledger, condense_private
from distillkit.sets import Tiles
from distillkit.training import Protocol

CLASSES = [5, 0, 1, 3, 4]
"""The classes that are condensed, in a mixed order; class 2 has no images, and class 6 is left out."""


def data() -> LabeledImages:
    """Return colored oblong images of six of seven classes, which are easy to tell apart."""
    labels = torch.tensor([0, 1, 3, 4, 5, 6]).repeat(9)
    noise = torch.randn(len(labels), 3, 10, 14, generator=torch.Generator().manual_seed(0))
    images = noise + torch.eye(7).repeat(1, 60)[labels].view(-1, 3, 10, 14) * 3
    return LabeledImages(images, labels, num_classes=7, normalization=Normalization([0.5] * 3, [0.25] * 3))


def factory(norm: str = "instance") -> ConvNet:
    return ConvNet((3, 10, 14), 7, width=8, depth=1, norm=norm)


def loss(real: torch.Tensor, synthetic: torch.Tensor) -> torch.Tensor:
    return (real.mean(0) - synthetic.mean(0)).abs().sum()


class Observer(torch.nn.Module):
    """Teacher that recognizes the classes of `data` in whole images and in crops of their places."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(()))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.scale * images.flatten(1) @ torch.eye(7).repeat(1, 60).T


def condensers(real: LabeledImages) -> dict[str, Callable[..., LabeledImages]]:
    """Return the condensers whose split calls equal a whole one."""
    shared: dict[str, Any] = {"progress": False, "generator": 3}
    networks = RandomNetworks(factory)
    dm = partial(distribution_matching, real, networks=networks, steps=3, lr=0.5, chunk=9, **shared)
    dc = partial(gradient_matching, real, networks=networks, iterations=2, lr=0.1, init="real", **shared)
    return {
        "DM": partial(dm, ipc=3),
        "DM, one image": partial(dm, ipc=1, augment=DSA()),
        "DM, fixed": partial(dm, ipc=2, networks=FixedNetwork(build(factory, 1))),
        "DM, ball": partial(dm, ipc=2, networks=NetworkBall(build(factory, 1), 1.0), match="embedding+logits"),
        "DM, own loss": partial(dm, ipc=2, match=loss, chunk=None),
        "DM, tiles": partial(dm, ipc=2, parametrize=Tiles(2)),
        "DM, set": partial(dm, init=random_subset(real, ipc=2, generator=4)),
        "DC": partial(dc, ipc=2, inner=InnerTraining(loops=(1, 1))),
        "DSA": partial(dc, ipc=2, inner=InnerTraining(loops=(2, 0)), augment=DSA()),
        "stitch": partial(stitch, real, observer=Observer(), ipc=2, pool=7, **shared),
        "herding": partial(herding, real, ipc=3, network=build(factory, 2), **shared),
        "k-center": partial(k_center, real, ipc=3, network=build(factory, 2), **shared),
    }


def refused(real: LabeledImages) -> dict[str, Callable[..., Any]]:
    """Return calls that must not be split."""
    networks, quiet = RandomNetworks(factory), {"progress": False}
    dm = partial(distribution_matching, real, networks=networks, ipc=2, steps=1, **quiet)
    dc = partial(gradient_matching, real, networks=networks, ipc=2, iterations=1, lr=0.1, **quiet)
    batch = RandomNetworks(partial(factory, norm="batch"))
    return {
        "lr=None": partial(dm, lr=None),
        "init='noise'": partial(dm, init="noise"),
        "init='statistics'": partial(dm, init="statistics"),
        "statistics of all classes": partial(dm, networks=batch),
        "train on the images of all classes": partial(dc, init="real"),
        "one sequence of random numbers": partial(random_subset, real, ipc=1),
        "every private release": lambda classes: condense_private(real, epsilon=1.0, size=54, ipc=1, ledger=Ledger()),
    }


def accuracy(i: int) -> list[float]:
    """Return the accuracy of a network on a small set, and the number of the repetition."""
    real = data()
    small = random_subset(real, ipc=2)
    found = evaluate(small, real, factory, num_networks=1, protocol=Protocol(epochs=1), generator=i, progress=False)
    return [found.accuracy, 0.1 * i]


def tagged(classes: list[int], folder: Path) -> LabeledImages:
    """Return the images of some classes, and write which process made them."""
    (folder / f"share-{dist.get_rank()}-{'-'.join(map(str, classes))}").touch()
    real = data()
    return real[torch.isin(real.labels, torch.tensor(classes))]


def late(classes: list[int], rank: int, act: Callable[[], object]) -> LabeledImages:
    """Return the images of some classes, after the process `rank` did something else."""
    if dist.get_rank() == rank:
        act()
    real = data()
    return real[torch.isin(real.labels, torch.tensor(classes))]


def fail() -> None:
    raise KeyError("no such class")


def main(rank: int, size: int, folder: Path, case: str) -> None:
    """Run a case as one of several processes, and write what it returns to the folder."""
    store = f"file://{folder / 'store'}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=size, timeout=timedelta(seconds=60))
    torch.set_num_threads(1)
    real, found = data(), dict[str, Any]()
    if case == "equal":
        for name, condense in condensers(real).items():
            made = over_classes(condense, CLASSES)
            made.save(folder / f"{name}-{rank}.safetensors")
        for name, call in refused(real).items():
            try:
                over_classes(call, CLASSES)
            except (ValueError, RuntimeError) as error:
                found[name] = f"{type(error).__name__}: {error}"
        found["repeats"] = over_repeats(accuracy, 5)
        found["few"] = over_repeats(lambda i: {"rank": rank, "i": i}, 1)
        found["one class"] = len(over_classes(partial(tagged, folder=folder), [3]))
        found["classes"] = over_classes(partial(tagged, folder=folder), CLASSES).counts().tolist()
        alone = [dist.new_group([member]) for member in range(size)]
        found["group"] = over_repeats(lambda i: rank, 2, group=alone[rank])
        try:
            over_repeats(lambda i: rank, 2, group=alone[1 - rank])
        except ValueError as error:
            found["other group"] = str(error)
        slow = partial(late, rank=1, act=lambda: time.sleep(1.5))
        acts = {
            "fail": (partial(late, rank=1, act=fail), 50.0),
            "sleep": (slow, 0.5),
            "all": (lambda classes: real, 50),
        }
        for name, (function, timeout) in acts.items():
            try:
                over_classes(function, CLASSES, timeout=timeout)
            except Exception as error:
                found[name] = f"{type(error).__name__}: {error}"
    elif case == "group":  # the processes of a group share the work, and others need not call anything
        group = dist.new_group([0, 2])
        if rank != 1:
            made = over_classes(partial(tagged, folder=folder), CLASSES, group=group)
            found = {"repeats": over_repeats(lambda i: [rank, i], 3, group=group), "counts": made.counts().tolist()}
        dist.barrier()
    else:
        began = time.monotonic()
        act = {"fail": fail, "kill": lambda: os.kill(os.getpid(), 9), "sleep": lambda: time.sleep(30)}[case]
        try:
            over_classes(partial(late, rank=1, act=act), CLASSES, timeout=3.0 if case == "sleep" else 50.0)
        except Exception as error:
            found = {"type": type(error).__name__, "words": str(error), "seconds": time.monotonic() - began}
    (folder / f"found-{rank}.json").write_text(json.dumps(found), encoding="utf-8")
    if case == "sleep":
        os._exit(0)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4])
