"""Growth of CPU seconds with size, for our code alone, at several sizes in turn."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from distillkit import LabeledImages
from distillkit.rng import derive
from fl import FedAvg, simulate
from tests.benchmarks.clients import Clients
from tests.benchmarks.clock import now, since
from tests.benchmarks.race import Result
from tests.benchmarks.sizes import FULL, Sizes
from tests.benchmarks.steps import matching

REGISTERED = (10, 100, 1000, 10_000)
NO_MORE = 1.05
"""What the largest number of clients may cost, of what 100 cost; a twentieth is noise."""

BASE = replace(FULL, width=64, real=32)
GROWING: dict[str, Sequence[Any]] = {
    "classes": (5, 10, 20, 40),
    "ipc": (1, 10, 50),
    "side": (16, 32, 64),
    "width": (32, 64, 128),
}
"""Of a step of distribution matching, the others as in `BASE`."""


def eight(number: int) -> LabeledImages:
    """Return random images of a client."""
    generator = derive(number)
    images = torch.rand(8, 1, 28, 28, generator=generator)
    return LabeledImages(images, torch.randint(10, (8,), generator=generator), num_classes=10)


def network(outputs: int) -> nn.Module:
    """Return a network with a quarter of a million weights."""
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 315), nn.ReLU(), nn.Linear(315, outputs))


def a_round(clients: int, rounds: int) -> float:
    """Return CPU seconds of a round of ten drawn clients; the first round is excluded."""
    method, marks = FedAvg(factory=network, steps=1), list[float]()
    begun = now()

    def mark(_: object) -> None:
        nonlocal begun
        marks.append(since(begun)["cpu"])
        begun = now()

    drawn = min(10, clients)
    simulate(method, Clients(clients, eight), rounds=rounds + 1, participation=drawn, on_round=mark, progress=False)
    return statistics.median(marks[1:])


def a_step(sizes: Sizes) -> float:
    """Return CPU seconds of a distribution-matching step; the first is excluded."""
    race, marks, begun = matching(sizes), list[float](), now()

    def mark() -> None:
        nonlocal begun
        marks.append(since(begun)["cpu"])
        begun = now()

    race.ours(3, mark)
    return statistics.median(marks[1:])


def grown(name: str, sizes: Sequence[Any], measure: Callable[[Any], float], repeats: int, base: Any) -> Result:
    """Return a line: the median seconds at every size, and their ratios to the size `base`."""
    seconds: list[list[float]] = [[] for _ in sizes]
    for _ in range(repeats):
        for found, size in zip(seconds, sizes, strict=True):
            found.append(measure(size))
    reference = sizes.index(base)
    ratios = [statistics.median(a / b for a, b in zip(found, seconds[reference], strict=True)) for found in seconds]
    return {"growth": name, "sizes": list(sizes), "base": base, "ratios": ratios, "seconds": {"cpu": seconds}}


NAMES = ("registered clients, 10 drawn: a round", *(f"{field}: a DM step" for field in GROWING))


def line(name: str, *, tiny: bool = False, repeats: int = 3) -> Result:
    """Measure a line of the table.

    Args:
        name: one of `NAMES`.
        tiny: only that it runs.
        repeats: how often every size has its turn.
    """
    if name == NAMES[0]:
        sizes = REGISTERED[:-1] if tiny else REGISTERED
        rounds = 1 if tiny else 15
        return grown(name, sizes, lambda clients: a_round(clients, rounds), repeats, 100) | {"target": NO_MORE}
    field = name.partition(":")[0]
    base = Sizes(classes=2, ipc=1, side=8, width=4, real=4) if tiny else BASE
    usual = getattr(base, field)
    sizes = (usual, 2 * usual) if tiny else GROWING[field]
    return grown(name, sizes, lambda size: a_step(replace(base, **{field: size})), repeats, usual)


def missed(line: Result) -> bool:
    """Check whether the largest number of clients costs more than the target."""
    return "target" in line and line["ratios"][-1] > line["target"]
