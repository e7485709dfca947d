"""The pipelines of `membership.py`: everything between records of digits and what is published, as one function each.

The settings are small, so that each can be run some dozens of times. The network is trained until it fits what it is
trained on, which is the harder case for privacy: early stopping hides members.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from tempfile import TemporaryDirectory
from typing import Any, Literal

import torch
from torch import Tensor, nn

import quickstart
from attacks import clopper_pearson, roc
from attacks.membership import Pipeline, margin, model_scorer, nearest
from attacks.membership.pipeline import Scorer
from attacks.reporting.closeness import LEVELS, closest, random_rounds
from attacks.transcript import read
from distillkit import LabeledImages, Normalization
from distillkit.condense import distribution_matching
from distillkit.data import Split, load, partition
from distillkit.networks import ConvNet, RandomNetworks, build
from distillkit.privacy import condense_private, train_private
from distillkit.rng import derive
from distillkit.training import Protocol, train
from fl import FedDM, Method, simulate
from fl.methods import FedLGD

__all__ = ["NUMBERS", "ROWS", "demo", "distances", "pipeline", "seen_by_server"]

Start = Literal["real", "noise"]
Numbers = dict[str, Any]
NUMBERS: dict[str, Numbers] = {
    "smoke": {
        "records": 400, "epochs": 1, "set_epochs": 1, "ipc": 2, "steps": 2, "clients": 2, "rounds": 2, "round_steps": 2,
        "server_epochs": 1, "local_epochs": 1, "releases": 2, "fit_steps": 2, "rate": 0.1, "dp_steps": 2,
    },
    "cpu": {
        "records": 1438, "epochs": 60, "set_epochs": 150, "ipc": 10, "steps": 100, "clients": 4, "rounds": 3,
        "round_steps": 20, "server_epochs": 20, "local_epochs": 10, "releases": 10, "fit_steps": 100, "rate": 0.1,
        "dp_steps": 100,
    },
}  # fmt: skip
"""By preset: how many candidates there are (half of them are trained on); epochs on records and on a set; images per
class of one set, steps of DM; clients, rounds, steps and epochs of a round; maps and steps of class means; rate and
steps of DP-SGD. A client's set has half as many images a class, and FedLGD one round more."""

EPSILON, DELTA = 8.0, 1e-5


def convnet(outputs: int = 10) -> ConvNet:
    """A ConvNet of two blocks for digits of 16 x 16, with 5,178 weights."""
    return ConvNet((1, 16, 16), outputs, width=16, depth=2)


@cache
def digits(records: int) -> Split:
    """So many digits and the test set, in a normalisation that was measured on none of them."""
    split = load("digits", size=16, normalization=Normalization([0.25], [0.4]))
    order = torch.randperm(len(split.train), generator=derive(0, "candidates"))
    return Split(split.train[order[:records]], split.test, split.classes)


def trained(data: LabeledImages, epochs: int, seed: int) -> nn.Module:
    """A network from scratch."""
    protocol = Protocol(epochs=epochs, batch=32, lr=0.05)
    return train(build(convnet, seed), data, protocol, generator=seed, progress=False)


def published(network: nn.Module, sets: Sequence[Tensor] = (), started: Tensor | None = None) -> dict[str, Scorer]:
    """How records are scored against a model, and against images that were seen one set after another.

    Args:
        network: the model; "margin" says whether it is right.
        sets: the images of each set. "nearest" compares a record with the images of one set at a time, "distance" is
            that to the closest of all, times -1.
        started: the real images that sets started from; "started" says which records these are.
    """
    found: dict[str, Scorer] = {"model": model_scorer(network), "margin": model_scorer(network, margin)}
    if sets:
        found["nearest"] = lambda x, _: torch.stack([nearest(one, x) for one in sets]).amax(0)
        found["distance"] = lambda x, _: -distances(x, torch.cat(list(sets)))
    if started is not None:
        found["started"] = lambda x, _: (distances(x, started) < 1e-4).double()  # up to rounding
    return found


def distances(records: Tensor, images: Tensor) -> Tensor:
    """How far each record is from the closest image, [n]."""
    return torch.cdist(records.flatten(1), images.flatten(1), compute_mode="donot_use_mm_for_euclid_dist").amin(1)


def raw(n: Numbers, data: LabeledImages, indices: Tensor, seed: int) -> dict[str, Scorer]:
    """A network trained on the records."""
    return published(trained(data[indices], n["epochs"], seed))


def dm(n: Numbers, data: LabeledImages, indices: Tensor, seed: int, init: Start) -> dict[str, Scorer]:
    """A set by distribution matching, and a network trained on it."""
    make = partial(
        distribution_matching, data[indices], networks=RandomNetworks(convnet), ipc=n["ipc"], init=init, batch_real=64,
        generator=seed, progress=False,
    )  # fmt: skip
    small = make(steps=n["steps"])
    started = make(steps=0).images if init == "real" else None
    return published(trained(small, n["set_epochs"], seed), [small.images], started)


def class_means(n: Numbers, data: LabeledImages, indices: Tensor, seed: int) -> dict[str, Scorer]:
    """A set fitted to noised class means, and a network trained on it."""
    small = condense_private(
        data[indices], epsilon=EPSILON, delta=DELTA, size=len(indices), ipc=n["ipc"], networks=RandomNetworks(convnet),
        draws=n["releases"], steps=n["fit_steps"], first_steps=n["fit_steps"], secret=seed, generator=seed,
        progress=False,
    )  # fmt: skip
    return published(trained(small, n["set_epochs"], seed), [small.images])


def dp_sgd(n: Numbers, data: LabeledImages, indices: Tensor, seed: int) -> dict[str, Scorer]:
    """A network trained on the records by DP-SGD."""
    network = build(convnet, seed)
    train_private(
        network, data[indices], size=len(indices), epsilon=EPSILON, delta=DELTA, rate=n["rate"], steps=n["dp_steps"],
        clip=0.5, lr=1.0, secret=seed, progress=False,
    )  # fmt: skip
    return published(network)


def seen_by_server(method: Method, clients: Sequence[LabeledImages], rounds: int, seed: int) -> tuple[nn.Module, Any]:
    """Run a federated method.

    Returns:
        The model; and of every round the images that the server got, or made and sent.
    """
    seen: dict[int, list[Tensor]] = {}
    with TemporaryDirectory() as folder:
        run = simulate(method, clients, rounds=rounds, seed=seed, out=folder, transcript=True, progress=False)
        for message in read(folder):
            seen.setdefault(message.round, []).extend(images.images for images in message.sets.values())
    # What goes to every client counts once: equal images would hide each other from `nearest`.
    return run.models[""], [torch.cat(images).unique(dim=0) for images in seen.values() if images]


def held(n: Numbers, data: LabeledImages, indices: Tensor) -> list[LabeledImages]:
    """What each client has of the records; whose a record is, is the same in all runs."""
    owners = partition.iid(data.labels, n["clients"], generator=0)
    return [data[part[torch.isin(part, indices)]] for part in owners]


def feddm(n: Numbers, data: LabeledImages, indices: Tensor, seed: int, init: Start) -> dict[str, Scorer]:
    """FedDM's last model, and the sets that its server got."""
    clients = held(n, data, indices)
    make = partial(
        FedDM, factory=convnet, ipc=n["ipc"] // 2, init=init, batch_real=32, rho=20.0, server_lr=0.03, server_batch=32
    )
    method = make(steps=n["round_steps"], server_epochs=n["server_epochs"])
    network, sets = seen_by_server(method, clients, n["rounds"], seed)
    if init == "noise":
        return published(network, sets)
    still = make(steps=1, lr=1e-30, server_epochs=1)  # the same draws, and images that stay what they started from
    return published(network, sets, torch.cat(seen_by_server(still, clients, n["rounds"], seed)[1]))


def fedlgd(n: Numbers, data: LabeledImages, indices: Tensor, seed: int) -> dict[str, Scorer]:
    """FedLGD's last model, and the anchors that its server made of the clients' updates."""
    method = FedLGD(
        factory=convnet, ipc=n["ipc"] // 2, anchors=2, selected=(1, 3), condense_steps=n["round_steps"],
        refine_steps=n["round_steps"], match_steps=n["round_steps"], epochs=n["local_epochs"], batch=32, lr=0.05,
    )  # fmt: skip
    return published(*seen_by_server(method, held(n, data, indices), n["rounds"] + 1, seed))


ROWS: dict[str, tuple[str, Callable[..., dict[str, Scorer]]]] = {
    "raw": ("raw data", raw),
    "dm": ("DM, real start", partial(dm, init="real")),
    "dm-noise": ("DM, noise start", partial(dm, init="noise")),
    "feddm": ("FedDM, real start", partial(feddm, init="real")),
    "feddm-noise": ("FedDM, noise start", partial(feddm, init="noise")),
    "fedlgd": ("FedLGD", fedlgd),
    "class-means": ("class means, epsilon 8", class_means),
    "dp-sgd": ("DP-SGD, epsilon 8", dp_sgd),
}
"""What each row is called, and its pipeline."""


def fit(row: str, preset: str, indices: Tensor, seed: int) -> dict[str, Scorer]:
    """One run of a row's pipeline; a function of a module, so that processes can be sent it."""
    numbers = NUMBERS[preset]
    return ROWS[row][1](numbers, digits(numbers["records"]).train, indices, seed)


def pipeline(row: str, preset: str) -> Pipeline:
    """A row's pipeline, with the digits as candidates and the test set as population."""
    (images, labels), test = digits(NUMBERS[preset]["records"])
    tag = f"{row} {NUMBERS[preset]}"
    again = partial(fit, row, preset)
    return Pipeline(again, images, labels, population=(test.images, test.labels), tag=tag)


def demo(preset: str, seed: int) -> dict[str, Any]:
    """How much of the records stands in the messages of the quickstart's FedDM: ten clients, Dirichlet(0.01).

    Returns:
        "above": by decibels, the shares of records to which some image that was sent is as close: of the training
        records, of held-out ones, and of the training records had random ones been sent in place of the images; and
        "auc" and "tpr" at 1 % of the distance as an attack, with how many "images" were sent.
    """
    chosen: dict[str, Any] = quickstart.CHOSEN["FedDM"]
    small = quickstart.PRESETS["smoke" if preset == "smoke" else "look"]
    task = quickstart.task(quickstart.SKEWED_MORE, small["rounds"])
    split = task.load()
    clients = [split.train[rows] for rows in task.deal(split, seed).owners]
    method = FedDM(
        factory=partial(ConvNet, (1, 16, 16), width=32, depth=2), ipc=10, batch_real=32, steps=small["steps"],
        server_batch=32, server_epochs=small["server_epochs"], **chosen,
    )  # fmt: skip
    _, sets = seen_by_server(method, clients, small["rounds"], seed)
    decode = split.train.normalization.decode
    rounds, members, others = [decode(one).clamp(0, 1) for one in sets], split.train.pixels(), split.test.pixels()
    decibels = {
        "training": closest(torch.cat(rounds), members)[0],
        "held-out": closest(torch.cat(rounds), others)[0],
        "random": closest(torch.cat(random_rounds(rounds, members)), members)[0],
    }
    above: dict[str, Any] = {}
    for level in LEVELS:
        counts = {who: (int((found >= level).sum()), len(found)) for who, found in decibels.items()}
        above[str(level)] = {who: [k / n, *clopper_pearson(k, n)] for who, (k, n) in counts.items()}
    scores, truth = torch.cat(list(decibels.values())[:2]), torch.arange(len(members) + len(others)) < len(members)
    curve = roc(scores.double(), truth)
    point = curve.at(0.01)
    return {
        "attack": "distance", "above": above, "auc": curve.auc, "images": sum(map(len, rounds)), "few": point.few,
        "tpr": [point.tpr.value, point.tpr.low, point.tpr.high],
        "fpr": [point.fpr.value, point.fpr.low, point.fpr.high],
    }  # fmt: skip
