"""Federated pipelines, and the images in the messages of a run."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn

from attacks.membership import Scorer
from attacks.transcript import read_transcript
from distillkit import LabeledImages
from distillkit.data import partition
from fl import FedDM, Method, RunFolder, simulate
from fl.methods import FedLGD
from membership.scorers import Numbers, Start, convnet, published


def run_and_observe(method: Method, clients: Sequence[LabeledImages], rounds: int, seed: int) -> tuple[nn.Module, Any]:
    """Run a federated method, and collect the images in its messages.

    Returns:
        The model, and a list of tensors: for every round, the images that the server received or sent.
    """
    seen: dict[int, list[Tensor]] = {}
    with TemporaryDirectory() as folder:
        out = RunFolder(folder, transcript=True)
        run = simulate(method, clients, rounds=rounds, seed=seed, out=out, progress=False)
        for message in read_transcript(folder):
            seen.setdefault(message.round, []).extend(images.images for images in message.sets.values())
    return run.models[""], [torch.cat(images) for images in seen.values() if images]


def client_data(n: Numbers, data: LabeledImages, indices: Tensor) -> list[LabeledImages]:
    """Return each client's part of the records among `indices`. A record belongs to the same client in all runs."""
    owners = partition.iid(data.labels, n["clients"], generator=0)
    return [data[part[torch.isin(part, indices)]] for part in owners]


def feddm(n: Numbers, data: LabeledImages, indices: Tensor, seed: int, init: Start) -> dict[str, Scorer]:
    """Run FedDM on some records, and return scorers for its last model and for the sets that its server received."""
    clients = client_data(n, data, indices)
    make = partial(
        FedDM, factory=convnet, ipc=n["ipc"] // 2, init=init, batch_real=32, rho=20.0, server_lr=0.03, server_batch=32
    )
    method = make(steps=n["round_steps"], server_epochs=n["server_epochs"])
    network, sets = run_and_observe(method, clients, n["rounds"], seed)
    if init == "noise":
        return published(network, sets)
    still = make(steps=1, lr=1e-30, server_epochs=1)  # draws the same initial images, and leaves them unchanged
    return published(network, sets, torch.cat(run_and_observe(still, clients, n["rounds"], seed)[1]))


def fedlgd(n: Numbers, data: LabeledImages, indices: Tensor, seed: int) -> dict[str, Scorer]:
    """Run FedLGD on some records, and return scorers for its last model and for the anchors that its server made."""
    method = FedLGD(
        factory=convnet, ipc=n["ipc"] // 2, anchors=2, selected=(1, 3), condense_steps=n["round_steps"],
        refine_steps=n["round_steps"], match_steps=n["round_steps"], epochs=n["local_epochs"], batch=32, lr=0.05,
    )  # fmt: skip
    return published(*run_and_observe(method, client_data(n, data, indices), n["rounds"] + 1, seed))
