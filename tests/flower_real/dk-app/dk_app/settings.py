"""Methods, data and run settings, shared by both apps."""

from __future__ import annotations

import gzip
import os
import signal
import time
from collections.abc import Callable, Iterable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from distillkit import LabeledImages
from distillkit.networks import ConvNet
from distillkit.normalization import IDENTITY
from fl import Client, ClientData, FedAvg, FedDM, Message, Method
from fl.addons import DPSGD, SCAFFOLD, VHL, FedCOG
from fl.methods import FedLGD, PrivateFedDM, SingleImage

NETWORK = partial(ConvNet, (1, 8, 8), width=8, depth=1)
FAST: dict[str, Any] = {"factory": NETWORK, "epochs": 1, "lr": 0.05, "batch": 32}
STEPS = {"condense_steps": 2, "refine_steps": 1, "match_steps": 2}
PICTURE = torch.rand(1, 16, 16, generator=torch.Generator().manual_seed(1))
SHARED = {"keep": 5, "count": 10, "rate": 1.0, "steps": 2, "batch": 4, "selection": {"clusters": 2}}


class Mishaps(FedAvg):
    """Client 0's process is killed in round 1; client 1 hangs in round 2 and ignores requests to stop."""

    def local(self, client: Client, message: Message) -> Message:
        if (client.round, client.id) == (1, 0):
            os.kill(os.getpid(), signal.SIGKILL)
        while (client.round, client.id) == (2, 1):
            time.sleep(1.0)
        return super().local(client, message)


class Failing(FedAvg):
    """Every client fails."""

    def local(self, client: Client, message: Message) -> Message:
        raise RuntimeError(f"client {client.id} cannot")


METHODS: dict[str, Callable[[], Method]] = {
    "FedAvg": lambda: FedAvg(**FAST),
    "SCAFFOLD": lambda: FedAvg(SCAFFOLD(), **FAST),
    "VHL": lambda: FedAvg(VHL(source="gaussian", classes=3, per_class=3), **FAST),
    "FedCOG": lambda: FedAvg(FedCOG(start_round=2, images=6, steps=2), **FAST),
    "FedLGD": lambda: FedLGD(ipc=1, anchors=1, selected=(2,), augment=None, **STEPS, **FAST),
    "FedDM": lambda: FedDM(factory=NETWORK, ipc=1, steps=5, server_epochs=2),
    "SingleImage": lambda: SingleImage(PICTURE, shared=SHARED, factory=NETWORK, epochs=1, batch=4),
    "DPSGD": lambda: FedAvg(
        DPSGD(sigma=2.0, rate=0.05, size=35), weights="uniform", factory=NETWORK, epochs=1, lr=0.05
    ),
    "PrivateFedDM": lambda: PrivateFedDM(
        factory=NETWORK, sigma=2.0, sigma_sizes=2.0, num_networks=2, ipc=1, steps=5, server_epochs=2
    ),
    "Mishaps": lambda: Mishaps(**FAST),
    "Failing": lambda: Failing(**FAST),
}
SETTINGS: dict[str, dict[str, Any]] = {
    "simulated": {"rounds": 3, "participation": 0.5, "seed": 3, "evaluate": "all"},
    "deployed": {"rounds": 2, "seed": 3, "evaluate": [0]},
    "secure": {"rounds": 3, "seed": 3, "evaluate": "all"},
    "killed": {"rounds": 3, "seed": 3, "evaluate": "none"},
    "faults": {"rounds": 3, "seed": 3, "evaluate": "none"},
    "once": {"rounds": 1, "seed": 3, "evaluate": "none"},
    "twice": {"rounds": 2, "seed": 3, "evaluate": "none"},
}


def method_of(name: str, out: Path, *, node: bool) -> Method:
    """Return the method of this name for a node or the server; keys of secure sums are in `out`."""
    if name in METHODS:
        return METHODS[name]()
    from dk_app.sealed import sealed

    return sealed(name, out / "keys", node=node, **FAST)


def digits() -> LabeledImages:
    """Return all of scikit-learn's digits, [1797, 1, 8, 8], from its file, because importing scikit-learn is slow."""
    spec = find_spec("sklearn")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    with gzip.open(Path(spec.submodule_search_locations[0]) / "datasets" / "data" / "digits.csv.gz", "rt") as file:
        rows = torch.tensor([[int(float(number)) for number in line.split(",")] for line in file])
    images = rows[:, :64].float().reshape(-1, 1, 8, 8) / 16
    return LabeledImages(images, rows[:, 64], num_classes=10, normalization=IDENTITY)


def load_client(partition: int, partitions: int) -> ClientData:
    """Return one client's training and test images."""
    data = digits()
    return ClientData(
        data[torch.arange(1400)[partition::partitions]], data[torch.arange(1400, 1600)[partition::partitions]]
    )


def test_set() -> LabeledImages:
    """Return the server's test set."""
    return digits()[1600:]


class Marked:
    """Flower's grid with the method's name on every message, so one run of Flower can run several methods."""

    def __init__(self, grid: Any, name: str) -> None:
        self._grid, self._name = grid, name
        self.get_node_ids, self.pull_messages = grid.get_node_ids, grid.pull_messages

    def push_messages(self, messages: Iterable[Any]) -> Iterable[str]:
        from flwr.app import ConfigRecord

        marked = list(messages)
        for message in marked:
            message.content["method"] = ConfigRecord({"name": self._name})
        return self._grid.push_messages(marked)
