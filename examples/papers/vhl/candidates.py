"""Candidates of VHL, their searched settings, and the paper's numbers."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor

from distillkit.augment import CropFlip
from distillkit.data import partition
from distillkit.data.readers.cifar10c import CIFAR10_NORMALIZATION
from distillkit.study import Task, grid
from fl import AddOn, ClientOptimizer, FedAvg
from fl.addons import SCAFFOLD, VFA, VFTL, VHL, FedNova, FedProx, NaiveVHL
from fl.study import Federated

SEARCH = {"FedAvg": grid(lr=[0.003, 0.01, 0.03, 0.1]), "FedAvg + VHL": grid(lr=[0.01, 0.03], calibration=[0.1, 1.0])}
BASES = ("FedProx", "SCAFFOLD", "FedNova")
PAPER = {
    "fashionmnist": {
        "FedAvg": "86.81", "FedAvg + VHL": "92.05", "FedProx": "87.12", "FedProx + VHL": "90.68", "SCAFFOLD": "86.21",
        "SCAFFOLD + VHL": "90.27", "FedNova": "86.99", "FedNova + VHL": "91.88",
    },
    "cifar10": {
        "FedAvg": "79.98", "FedAvg + VHL": "87.82", "FedProx": "83.56", "FedProx + VHL": "87.30", "SCAFFOLD": "83.58",
        "SCAFFOLD + VHL": "84.87", "FedNova": "81.35", "FedNova + VHL": "87.56", "VFTL": "80.38", "naive VHL": "86.50",
        "VFA": "85.14", "VHL, upsampled noise": "87.01", "VHL, noise of a CNN": "84.87",
    },
}  # fmt: skip
SOURCE = "Tables 1, 2 and 6: best of 1,000 rounds of a ResNet-18 on all images, with five of ten clients in each round."


def split_of(name: str) -> Callable[..., list[Tensor]]:
    """Return the function that divides images among ten clients, for a value of `--split`.

    With "two-classes", every client has two random classes. With "clusters", pairs of clients share two classes.
    """
    if name == "two-classes":
        return partial(partition.classes_per_client, clients=10, k=2)
    if name == "clusters":
        return partial(partition.class_clusters, clients=10, k=2)
    return partial(partition.dirichlet_capped, clients=10, alpha=float(name))


def candidates(o: argparse.Namespace, last: str) -> dict[str, Federated]:
    """Return FedAvg and other base methods with and without VHL, and ablations of VHL on the task named `last`."""

    def averaging(*parts: Callable[[float], AddOn], passes: int = 1, **fixed: Any) -> Callable[..., FedAvg]:
        def make(factory: Any, task: Task, lr: float, calibration: float = 1.0) -> FedAvg:
            added = [part(calibration) for part in parts]
            weights = "uniform" if any(isinstance(a, SCAFFOLD) for a in added) else "samples"
            local = {"steps": o.steps * passes} if o.steps else {"epochs": passes}
            crops = CropFlip(CIFAR10_NORMALIZATION, pad=o.pixels // 8) if task.name.split("-")[0] == "cifar10" else None
            optimizer = ClientOptimizer(weight_decay=1e-4, lr_decay=0.992)
            given = {"momentum": 0.9, "optimizer": optimizer, "augment": crops, "weights": weights}
            return FedAvg(*added, factory=factory, lr=lr, batch=o.batch, **{**local, **given, **fixed})

        return make

    def vhl(**options: Any) -> Callable[[float], AddOn]:
        return lambda calibration: VHL(**{"calibration": calibration, **o.noise, **options})

    search = {name: o.settled.get(name) or ([{"lr": o.lr}] if o.lr else search) for name, search in SEARCH.items()}
    found = {name: Federated(averaging(*([vhl()] if "VHL" in name else [])), search[name]) for name in SEARCH}
    if o.pair:
        return found
    one: dict[str, Any] = {"seeds": o.seeds[:1]}
    bases: tuple[Callable[[float], AddOn], ...] = (lambda _: FedProx(o.mu), lambda _: SCAFFOLD(), lambda _: FedNova())
    for name, base in zip(BASES, bases, strict=True):
        found[name] = Federated(averaging(base), like="FedAvg", **one)
        found[f"{name} + VHL"] = Federated(averaging(base, vhl()), like="FedAvg + VHL", **one)
    parts: dict[str, Callable[..., FedAvg]] = {
        "naive VHL": averaging(lambda _: NaiveVHL(**o.noise)),
        "VFA": averaging(lambda calibration: VFA(weight=calibration)),
        "VFTL": averaging(lambda _: VFTL(epochs=1 if o.steps else 10, **o.noise)),
        "VHL, upsampled noise": averaging(vhl(source="gaussian", options={})),
        "VHL, noise of a CNN": averaging(vhl(source="cnn", options={})),
        "VHL, no third term": averaging(vhl(contrast=0.0)),
        "VHL, no virtual labels": averaging(vhl(cross_entropy=0.0)),
        **{f"VHL, {n} virtual a step": averaging(vhl(batch=n)) for n in (o.batch // 2, o.batch * 2)},
        **{f"VHL, aligned at {layer}": averaging(vhl(layer=layer)) for layer in o.layers},
        "VHL, tested as released": averaging(vhl(empty="zero"), predict="all"),
    }
    more = {name: Federated(make, like="FedAvg + VHL", tasks=(last,), **one) for name, make in parts.items()}
    more["FedAvg, two epochs"] = Federated(averaging(passes=2), like="FedAvg", tasks=(last,), **one)
    return {**found, **({} if o.no_ablations else more)}
