"""Measurement of the accuracy of each client's trained model on a common set, before averaging."""

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


@dataclass(frozen=True)
class LocalAccuracy(AddOn):
    """Measurement of the accuracy of the clients' models after local training, before they are averaged.

    The results are in the column `accuracy_locals` of the history: the mean over the clients, the standard deviation,
    and the mean over the worst tenth of the clients. Use it "to examine the preservation of general knowledge during
    local training" (FedCOG, Ye et al., ICLR 2024, section 6.4, Fig. 2b). The server tests each model on
    `server_data={"test": ...}` when the client's reply arrives. The add-on does not change the training, and no
    additional values are sent. With `SharedImage` or `SharedPool`, clients may send weights in some rounds only; the
    other rounds lack the column.

    Args:
        on: name of the set in `server_data`.
        every: number of rounds between two measurements. In a measurement, the server tests the model of every drawn
            client on the whole set.
    """

    on: str = "test"
    every: PositiveInt = 1

    accuracies = Entry[Tensor]("union")
    data_access = "none"

    @property
    def first_round(self) -> int:  # type: ignore[override]
        """First round in which the accuracy of the clients' models is measured."""
        return self.every

    def check(self, settings: Settings, addons: Sequence[AddOn]) -> None:
        """Refuse a method if the server cannot rebuild a client's whole model from the client's reply."""
        require_full_models(self, settings, addons)

    def start(self, server: AveragingServer) -> None:
        """Check that `server_data` contains the test set that the option `on` names.

        Also check that the set's number of classes and kind of labels are those of the task.
        """
        if self.on not in server.data:
            raise ValueError(f"LocalAccuracy needs images on the server: server_data={{{self.on!r}: ...}}")
        data = server.data[self.on]
        if data.num_classes != server.task.num_classes or (data.labels.ndim == 1) != server.task.single_label:
            raise ValueError(
                f"server_data[{self.on!r}] must have labels as the clients have, for {server.task!r}; it has "
                f"{data.num_classes} classes, labels {list(data.labels.shape)}"
            )

    def read_reply(self, server: AveragingServer, reply: Message, out: Message) -> None:
        """Test one client's trained model on the server's test set, and write the accuracy to `out`.

        The option `on` is the name of the test set in `server_data`.
        """
        if server.round % self.every or FedAvg.update not in reply:
            return
        predictor = server.trained(reply)
        sums = predictor.sums(server.data[self.on], server.task)
        out[self.accuracies] = torch.tensor([server.task.metrics(sums)["accuracy"]], dtype=torch.float64)

    def receive(self, server: AveragingServer, replies: AggregatedReplies, old: Tensors) -> None:
        """Write statistics of the accuracies of the clients' trained models to the history.

        The statistics are the mean, the standard deviation, and the mean over the tenth of the clients with the lowest
        accuracies. The option `on` is the name of the set on which the models were tested.
        """
        if self.accuracies in replies:
            server.notes["accuracy_locals"] = clients_accuracy(replies[self.accuracies].tolist())
