"""Claims tested with runs on real images: tasks, candidates, metric, and the paper's difference."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from claims.claim import Claim
from distillkit.data import partition
from distillkit.study import Candidate, Task, grid
from fl import AddOn, ClientOptimizer, FedAvg
from fl.addons import VHL, ClientDrift
from fl.study import Federated
from papers.fedcog.candidates import SPACES, pair
from papers.single_image.candidates import CHOSEN, NOTHING, headline, photograph
from papers.single_image.candidates import SPACES as CROP_SPACES
from papers.vhl.candidates import candidates as vhl_candidates
from shared.datasets import load_part, load_subset

SIZES: dict[str, dict[str, Any]] = {
    "smoke": {
        "records": 300, "rounds": 3, "start": 3, "steps": 2, "generation": 2, "images": 20, "lr": [0.01],
        "count": 100, "keep": 20, "noise": 2,
    },
    "cpu": {
        "records": 10_000, "rounds": 30, "start": 25, "steps": 40, "generation": 50, "images": 64,
        "lr": [0.001, 0.003, 0.01, 0.03], "count": 5000, "keep": 500, "noise": 100,
    },
}  # fmt: skip
"""`records`: number of training images; `start`: FedCOG's first round; `noise`: VHL's images per class."""


def clusters(o: argparse.Namespace, dataset: str) -> Task:
    """Return a task of ten clients with two classes each, as in FedCOG's partition NIID-2."""
    name, sizes = ("digits" if o.preset == "smoke" else dataset), SIZES[o.preset]
    data = partial(load_subset, name, None, sizes["records"], 16 if name == "digits" else None, SPACES.get(name))
    assign = partial(partition.class_clusters, clients=10, k=2)
    options: Any = {"factory": "simple_cnn", "rounds": sizes["rounds"], "own_tests": 0.1, "server_share": 0.1}
    return Task(f"{name}-two-classes", data, assign, **options)


def fedcog(o: argparse.Namespace) -> Claim:
    """Return the claim for FedCOG on CIFAR-10 with two classes per client, at the learning rate selected for FedAvg."""
    sizes = SIZES[o.preset] | {"batch": 32, "augment": False}
    text = (
        "On CIFAR-10 with two classes per client, FedCOG is more accurate than FedAvg, on average from FedCOG's first "
        "round on. The effect is that of the paper's Table 1 after 70 rounds: 54.0 against 50.55 %."
    )
    rounds = sizes["rounds"] - sizes["start"] + 1
    return Claim(text, (clusters(o, "cifar10"),), {**pair(sizes)}, rounds, 0.0345, {"FedAvg": {"lr": 0.01}})


def averaging(sizes: Mapping[str, Any], virtual: bool, also: Sequence[AddOn], factory: Any, lr: float) -> FedAvg:
    """Return FedAvg with the settings of FedCOG's comparison, with or without VHL, and with further add-ons."""
    addons = [VHL(per_class=sizes["noise"], options={"width": 16})] if virtual else []
    optimizer, length = ClientOptimizer(weight_decay=1e-5), {"steps": sizes["steps"], "batch": 32}
    return FedAvg(*addons, *also, factory=factory, lr=lr, momentum=0.9, optimizer=optimizer, **length)


def vhl(o: argparse.Namespace) -> Claim:
    """Return the claim for VHL on FashionMNIST with two classes per client. Both candidates search the same rates."""
    sizes, task = SIZES[o.preset], clusters(o, "fashionmnist")
    names = {"FedAvg": False, "FedAvg + VHL": True}
    found = {
        name: Federated(partial(averaging, sizes, virtual, ()), search=grid(lr=sizes["lr"]))
        for name, virtual in names.items()
    }
    measured = {
        name: Federated(partial(averaging, sizes, virtual, [ClientDrift("proxy")])) for name, virtual in names.items()
    }
    text = (
        "On FashionMNIST with two classes per client, FedAvg with VHL is more accurate than FedAvg, on average over "
        "all rounds. The effect is that of FedCOG's Table 1 after 70 rounds with this division and network: 70.3 "
        "against 64.1 %."
    )
    pilot = {label: {"lr": 0.01} for label in found}
    return Claim(text, (task,), {**found}, task.rounds, 0.062, pilot, measured=measured)


def single_image(o: argparse.Namespace) -> Claim:
    """Return the claim that selected crops beat fixed crops. In every round, all clients take part and send weights."""
    sizes, small = SIZES[o.preset], o.preset == "smoke"
    name = "digits" if small else "cifar10"
    preset = sizes | {"epochs": 1 if small else 5, "batch": 64, "steps": 2 if small else 60, "augment": False}
    preset |= {"lr": [0.003] if small else [0.001, 0.003, 0.01], "server_lr": [0.001]}
    data = partial(load_subset, name, None, None if small else 5000, 16, CROP_SPACES.get(name))
    assign = partial(partition.dirichlet_prior, clients=10, alpha=1.0)
    options: Any = {"factory": "simple_cnn" if small else "resnet8", "rounds": 3 if small else 10, "validation": 0.1}
    both = headline(preset, photograph(None, 1 if small else 3), rate=1.0)
    text = (
        "Distilling on crops that the global model selects anew in each round makes a more accurate model than "
        "distilling on fixed crops, on average over the last five rounds, if all clients send weights in every round. "
        "The effect is that of the paper's Table 5 for the best of 30 rounds at a rate of 0.2: 67.0 against 63.4 %."
    )
    compared: dict[str, Candidate] = {label: both[label] for label in (NOTHING, CHOSEN)}
    pilot = {label: {"lr": 0.003, "server_lr": 0.001} for label in compared}
    return Claim(text, (Task(f"{name}-dirichlet1", data, assign, **options),), compared, 5, 0.036, pilot, least=12)


def vhl_cifar10(o: argparse.Namespace) -> Claim:
    """Return the claim for VHL on CIFAR-10, whose clients have about 500 images of two classes. Both search equally."""
    small, noise = o.preset == "smoke", {"per_class": SIZES[o.preset]["noise"], "options": {"width": 16}}
    name, rounds = ("digits", 3) if small else ("cifar10", 60)
    data = partial(load_part, name, None, 16, None, 500 if small else 5000, 2000)
    assign = partial(partition.classes_per_client, clients=10, k=2)
    shape = {"width": 8 if small else 32, "depth": 2, "norm": "batch"}
    task = Task(f"{name}-two-of-ten", data, assign, rounds=rounds, participation=0.5, factory_options=shape)
    rates = grid(lr=[0.01] if small else [0.003, 0.01, 0.03, 0.1])
    sizes = {"pixels": 16, "batch": 64, "noise": noise, "steps": None, "lr": None, "pair": True}
    found = vhl_candidates(argparse.Namespace(**sizes, settled={"FedAvg": rates, "FedAvg + VHL": rates}), task.name)
    text = (
        "On CIFAR-10 with two classes and about 500 images per client, FedAvg with VHL is more accurate than FedAvg, "
        "on average over the second half of the rounds. The effect is that of the paper's Table 3 (ResNet-18, best "
        "round): 71.88 against 41.74 %."
    )
    pilot = {label: {"lr": 0.01} for label in found}
    return Claim(text, (task,), {**found}, max(1, rounds // 2), 0.3014, pilot)


CLAIMS: dict[str, Callable[[argparse.Namespace], Claim]] = {
    "fedcog": fedcog, "single_image": single_image, "vhl": vhl, "vhl_cifar10": vhl_cifar10,
}  # fmt: skip
