"""Claims of `claims.py`: tasks, candidates, and the papers' effects."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from _data import load_subset
from _fedcog import SPACES, pair
from _single_image import SPACES as CROP_SPACES
from _single_image import headline, photograph
from distillkit.data import partition
from distillkit.study import Task, grid
from fl import ClientOptimizer, FedAvg
from fl.addons import VHL
from fl.study import Federated

__all__ = ["CLAIMS", "Claim"]

SIZES: dict[str, dict[str, Any]] = {
    "smoke": {
        "records": None, "rounds": 3, "start": 3, "steps": 2, "generation": 2, "images": 20, "lr": [0.01],
        "count": 100, "keep": 20, "noise": 2,
    },
    "cpu": {
        "records": 10_000, "rounds": 30, "start": 25, "steps": 40, "generation": 50, "images": 64,
        "lr": [0.001, 0.003, 0.01, 0.03], "count": 5000, "keep": 500, "noise": 100,
    },
}  # fmt: skip
"""`records`: number of training images; `start`: FedCOG's first round; `noise`: VHL's images per class."""


@dataclass(frozen=True)
class Claim:
    """Comparison of two candidates on one task.

    Attributes:
        task: task of the runs.
        candidates: baseline and candidate; the claim is that the candidate is more accurate.
        rounds: number of last rounds over which the accuracy is averaged.
        effect: difference in accuracy that the runs should find: that of the paper, as a fraction.
    """

    task: Task
    candidates: dict[str, Federated]
    rounds: int
    effect: float


def clusters(o: argparse.Namespace, dataset: str) -> Task:
    """Return ten clients with two classes each, FedCOG's division NIID-2."""
    name, sizes = ("digits" if o.preset == "smoke" else dataset), SIZES[o.preset]
    data = partial(load_subset, name, o.data, sizes["records"], 16 if name == "digits" else None, SPACES.get(name))
    assign = partial(partition.class_clusters, clients=10, k=2)
    options: Any = {"factory": "simple_cnn", "rounds": sizes["rounds"], "own_tests": 0.1, "server_share": 0.1}
    return Task(f"{name}-two-classes", data, assign, **options)


def fedcog(o: argparse.Namespace) -> Claim:
    """FedCOG on CIFAR-10, two classes per client: better than FedAvg from FedCOG's first round on (Table 1: +3.45)."""
    sizes = SIZES[o.preset] | {"batch": 32, "augment": False}
    return Claim(clusters(o, "cifar10"), pair(sizes), sizes["rounds"] - sizes["start"] + 1, 0.0345)


def vhl(o: argparse.Namespace) -> Claim:
    """VHL on FashionMNIST, two classes per client: better than FedAvg on average over all rounds.

    FedCOG's Table 1 has this division and network: 70.3 against 64.1 after the last round, +6.2.
    """
    sizes, task = SIZES[o.preset], clusters(o, "fashionmnist")
    optimizer = ClientOptimizer(weight_decay=1e-5)

    def make(virtual: bool, factory: Any, task: Task, lr: float) -> FedAvg:
        addons = [VHL(per_class=sizes["noise"], options={"width": 16})] if virtual else []
        return FedAvg(
            *addons, factory=factory, lr=lr, momentum=0.9, optimizer=optimizer, steps=sizes["steps"], batch=32
        )

    names = {"FedAvg": False, "FedAvg + VHL": True}
    found = {name: Federated(partial(make, virtual), search=grid(lr=sizes["lr"])) for name, virtual in names.items()}
    return Claim(task, found, task.rounds, 0.062)


def single_image(o: argparse.Namespace) -> Claim:
    """Selection of crops, with weights sent in every round: better than fixed crops in the last five rounds.

    Table 2 has 77.0 against 75.7, +1.3, for the best of 30 rounds.
    """
    sizes, small = SIZES[o.preset], o.preset == "smoke"
    name = "digits" if small else "cifar10"
    preset = sizes | {"epochs": 1 if small else 5, "batch": 64, "steps": 2 if small else 60, "augment": False}
    preset |= {"lr": sizes["lr"][:1] if small else [0.003, 0.01], "server_lr": [0.005] if small else [0.001, 0.005]}
    data = partial(load_subset, name, o.data, sizes["records"], 16, CROP_SPACES.get(name))
    assign = partial(partition.dirichlet_prior, clients=10, alpha=1.0)
    rounds = 3 if small else 15
    options: Any = {"factory": "simple_cnn" if small else "resnet8", "rounds": rounds, "validation": 0.1}
    both = headline(preset, photograph(None, 1 if small else 3), rate=1.0)
    candidates = {label: both[label] for label in ("No selection", "Single image")}
    return Claim(Task(name, data, assign, **options), candidates, 5, 0.013)


CLAIMS: dict[str, Callable[[argparse.Namespace], Claim]] = {"fedcog": fedcog, "vhl": vhl, "single_image": single_image}
