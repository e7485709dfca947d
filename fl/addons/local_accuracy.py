"""Test of each client's trained model on a common set, before averaging."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from distillkit._utils.options import PositiveInt
from fl.aggregation import AggregatedReplies
from fl.averaging import AddOn, AveragingServer, FedAvg, Settings
from fl.averaging._composition import require_full_models
from fl.message import Entry, Message, Tensors
from fl.task import clients_accuracy

__all__ = ["LocalAccuracy"]


@dataclass(frozen=True)
class LocalAccuracy(AddOn):
    """Test of the clients' trained models, which adds the mean, std and worst tenth of their accuracies to the history.

    The column of the history is `accuracy_locals`. "We evaluate each local model on the uniform test dataset to examine
    the preservation of general knowledge during local training" (FedCOG, Ye et al., ICLR 2024, section 6.4, Fig. 2b).
    The server runs each model on `server_data={"test": ...}` as the model arrives. The training stays bit-identical,
    and no additional values are sent. With `SharedImage` and `SharedPool`, only rounds in which clients send weights
    have the column.

    Args:
        on: name of the set in `server_data`.
        every: number of rounds between two tests; a test costs one pass over the set per drawn client.
    """

    key = "LocalAccuracy"
    on: str = "test"
    every: PositiveInt = 1

    accuracies = Entry[Tensor]("union")
    data_access = "none"

    @property
    def first_round(self) -> int:  # type: ignore[override]
        """Index of the round with the first test, which equals `every`."""
        return self.every

    def check(self, settings: Settings, addons: Sequence[AddOn]) -> None:
        """Refuse replies that do not contain every client's whole model."""
        require_full_models(self, settings, addons)

    def start(self, server: AveragingServer) -> None:
        """Refuse a run without the set `on`, or with a set whose kind of labels differs from that of the clients."""
        if self.on not in server.data:
            raise ValueError(f"LocalAccuracy needs images on the server: server_data={{{self.on!r}: ...}}")
        data = server.data[self.on]
        if data.num_classes != server.task.num_classes or (data.labels.ndim == 1) != server.task.single_label:
            raise ValueError(
                f"server_data[{self.on!r}] must have labels as the clients have, for {server.task!r}; it has "
                f"{data.num_classes} classes, labels {list(data.labels.shape)}"
            )

    def read_reply(self, server: AveragingServer, reply: Message, out: Message) -> None:
        """Test the model that one client trained, and derive its accuracy."""
        if server.round % self.every or FedAvg.update not in reply:
            return
        predictor = server.trained(reply)
        sums = predictor.sums(server.data[self.on], server.task)
        out[self.accuracies] = torch.tensor([server.task.metrics(sums)["accuracy"]], dtype=torch.float64)

    def receive(self, server: AveragingServer, replies: AggregatedReplies, old: Tensors) -> None:
        """Write mean, std and worst tenth of the accuracies into the round's row of the history."""
        if self.accuracies in replies:
            server.notes["accuracy_locals"] = clients_accuracy(replies[self.accuracies].tolist())
