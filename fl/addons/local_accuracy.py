"""The clients' trained models, each tested on one common set before they are averaged."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from distillkit import check
from fl.averaging.addon import AddOn
from fl.averaging.fedavg import FedAvg
from fl.message import Entry, Message, Tensors
from fl.method import Server
from fl.reduce import Reduced
from fl.task import clients_accuracy

if TYPE_CHECKING:
    from fl.averaging.core import Core

__all__ = ["LocalAccuracy"]


@dataclass(frozen=True)
class LocalAccuracy(AddOn):
    """Adds `accuracy_locals` to the rows of the history: mean, std and worst tenth over the round's trained models.

    "We evaluate each local model on the uniform test dataset to examine the preservation of general knowledge during
    local training" (FedCOG, Ye et al., ICLR 2024, section 6.4, Fig. 2b). The server runs each model as it arrives, on
    `server_data={"test": ...}`. The training is left alone bit by bit, and nothing more is sent. Beside
    `SharedImage` and `SharedPool` only rounds in which weights travel have the column.

    Args:
        on: name of the set in `server_data`.
        every: rounds from one such test to the next; it costs a pass over the set for each client drawn.
    """

    key = "LocalAccuracy"
    on: str = "test"
    every: int = 1

    accuracies = Entry[Tensor]("union")
    reads = "nothing"

    def __post_init__(self) -> None:
        if not isinstance(self.on, str):
            raise TypeError(f"on must be the name of a set in server_data, got {type(self.on).__name__}")
        check.positive_int(self.every, "every")

    @property
    def first_round(self) -> int:  # type: ignore[override]
        """The first test."""
        return self.every

    def check(self, method: Core) -> None:
        """The server must be able to run every client's model."""
        method.require_replied(self)

    def start(self, server: Server) -> None:
        """Require the set."""
        if self.on not in server.data:
            raise ValueError(f"LocalAccuracy needs images on the server: server_data={{{self.on!r}: ...}}")
        data = server.data[self.on]
        if data.num_classes != server.task.num_classes or (data.labels.ndim == 1) != server.task.single_label:
            raise ValueError(
                f"server_data[{self.on!r}] must have labels as the clients have, for {server.task!r}; it has "
                f"{data.num_classes} classes, labels {list(data.labels.shape)}"
            )

    def read_reply(self, server: Server, reply: Message, out: Message) -> None:
        """Test one client's model."""
        if server.round % self.every or FedAvg.update not in reply:
            return
        predictor = cast(FedAvg, server.method).replied(server, reply)
        sums = predictor.sums(server.data[self.on].to(server.device), server.task)
        out[self.accuracies] = torch.tensor([server.task.metrics(sums)["accuracy"]], dtype=torch.float64)

    def receive(self, server: Server, replies: Reduced, old: Tensors) -> None:
        """Write them down."""
        if self.accuracies in replies:
            server.notes["accuracy_locals"] = clients_accuracy(replies[self.accuracies].tolist())
