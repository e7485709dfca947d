"""Pipelines that are attacked. Each pipeline is one function that computes the published result from the records.

The settings are small, so that each pipeline can run dozens of times. The network is trained until it fits its training
data. This is the harder case for privacy, because early stopping hides members.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial

import torch
from torch import Tensor

from attacks.membership import Pipeline, Scorer
from distillkit import LabeledImages, Normalization
from distillkit.condense import distribution_matching
from distillkit.data import Split, load
from distillkit.networks import RandomNetworks, build
from distillkit.privacy import Account, Ledger, Passes, condense_private, train_private
from distillkit.rng import derive
from membership.federated import feddm, fedlgd
from membership.scorers import Numbers, Start, convnet, published, trained

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
"""Settings by preset: number of candidate records (half are used), training epochs on records and on a set, images per
class of a set, steps of DM; clients, rounds, and steps and epochs of a round; networks and steps of class means; and
sampling rate and steps of DP-SGD. A client's set has half as many images per class, and FedLGD runs one more round.
"""

EPSILON, DELTA = 8.0, 1e-5


@cache
def digits(records: int) -> Split:
    """Return some digits and the test set, with a normalization that was not computed from these images."""
    split = load("digits", size=16, normalization=Normalization([0.25], [0.4]))
    order = torch.randperm(len(split.train), generator=derive(0, "candidates"))
    return Split(split.train[order[:records]], split.test, split.classes)


def raw(n: Numbers, data: LabeledImages, indices: Tensor, seed: int) -> dict[str, Scorer]:
    """Train a network on the records."""
    return published(trained(data[indices], n["epochs"], seed))


def dm(n: Numbers, data: LabeledImages, indices: Tensor, seed: int, init: Start) -> dict[str, Scorer]:
    """Condense the records by distribution matching, and train a network on the set."""
    make = partial(
        distribution_matching, data[indices], networks=RandomNetworks(convnet), ipc=n["ipc"], init=init, batch_real=64,
        generator=seed, progress=False,
    )  # fmt: skip
    small = make(steps=n["steps"])
    started = make(steps=0).images if init == "real" else None
    return published(trained(small, n["set_epochs"], seed), [small.images], started)


def class_means(n: Numbers, data: LabeledImages, indices: Tensor, seed: int) -> dict[str, Scorer]:
    """Fit a set to noised class means, and train a network on it."""
    small = condense_private(
        data[indices], epsilon=EPSILON, delta=DELTA, size=len(indices), ipc=n["ipc"], networks=RandomNetworks(convnet),
        num_networks=n["releases"], steps=n["fit_steps"], passes=Passes(first_steps=n["fit_steps"]), generator=seed,
        ledger=Account(Ledger(delta=DELTA), secret=seed), progress=False,
    )  # fmt: skip
    return published(trained(small, n["set_epochs"], seed), [small.images])


def dp_sgd(n: Numbers, data: LabeledImages, indices: Tensor, seed: int) -> dict[str, Scorer]:
    """Train a network on the records by DP-SGD."""
    network = build(convnet, seed)
    train_private(
        network, data[indices], size=len(indices), epsilon=EPSILON, delta=DELTA, rate=n["rate"], steps=n["dp_steps"],
        clip=0.5, lr=1.0, ledger=Account(Ledger(delta=DELTA), secret=seed), progress=False,
    )  # fmt: skip
    return published(network)


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
"""Title and pipeline of each row of the tables."""


def fit(row: str, preset: str, indices: Tensor, seed: int) -> dict[str, Scorer]:
    """Run the pipeline of a row once. Other processes import this function, so it is at module level."""
    numbers = NUMBERS[preset]
    return ROWS[row][1](numbers, digits(numbers["records"]).train, indices, seed)


def pipeline(row: str, preset: str) -> Pipeline:
    """Return the pipeline of a row, with the digits as candidate records and the test set as population."""
    (images, labels), test = digits(NUMBERS[preset]["records"])
    tag = f"{row} {NUMBERS[preset]}"
    again = partial(fit, row, preset)
    return Pipeline(again, images, labels, population=(test.images, test.labels), tag=tag)
