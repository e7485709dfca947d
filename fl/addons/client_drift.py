"""Measurement of the distance between the clients' trained models in a round."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import normalize

from distillkit._utils.options import PositiveInt
from distillkit.networks import split
from fl.aggregation import AggregatedReplies
from fl.averaging import AddOn, AveragingServer, FedAvg, Settings
from fl.averaging._composition import require_full_models, require_one_architecture
from fl.message import Entry, Message, Tensors

_CHUNK = 64
"""Number of images per forward pass."""


@dataclass(frozen=True)
class ClientDrift(AddOn):
    """Measurement of client drift: how far apart the clients' models are after local training.

    Use it to check whether a method that promises less client drift keeps the promise. The column of the history is
    `client_drift`, with these entries:

    * `distance`: root mean square distance of the clients' updates from their mean.
    * `relative`: `distance` divided by the root mean square norm of the updates, in [0, 1]. It is 0 if all clients send
      the same update, and 1 if the mean update is zero.
    * `features` (only if `on` is given): 1 - cosine similarity between the features of two clients' models for the same
      image, averaged over the images and the pairs of clients. It is in [0, 2].

    All clients have the same weight. The add-on does not change the training. No additional values are sent, because
    the server computes everything from the replies. Rounds with fewer than two replies do not have the column.

    VHL (Tang et al., ICML 2022) claims less drift and more similar features of the clients' models (section 4.3, t-SNE
    plots in Figs. 1 and 2). The paper reports no such numbers; these definitions are ours.

    Args:
        on: name of the images in `server_data` from which the features are computed. None: only updates are compared.
            For each reply in a measured round, the server runs the client's trained model on all these images.
        every: number of rounds between two measurements.
    """

    on: str | None = None
    every: PositiveInt = 1

    updates, squares, features = Entry[Tensors](), Entry[float](), Entry[Tensor]()
    data_access = "none"

    @property
    def first_round(self) -> int:  # type: ignore[override]
        """First round in which client drift is measured."""
        return self.every

    def check(self, settings: Settings, addons: Sequence[AddOn]) -> None:
        """Refuse more than one architecture, and methods whose replies do not contain every client's whole model."""
        require_full_models(self, settings, addons)
        require_one_architecture(self, settings, "it compares the updates of one model")

    def start(self, server: AveragingServer) -> None:
        """Raise ValueError if the option `on` is given, but `server_data` has no images of this name."""
        if self.on is not None and self.on not in server.data:
            raise ValueError(f"ClientDrift needs images on the server: server_data={{{self.on!r}: ...}}")

    def read_reply(self, server: AveragingServer, reply: Message, out: Message) -> None:
        """Write one client's update and its squared norm to `out`.

        If the option `on` names an image set of the server, also write the features that the client's trained model
        computes for these images. Each feature vector is scaled to norm 1. The values in `out` are aggregated over
        clients like the entries of the reply.
        """
        if server.round % self.every or FedAvg.update not in reply:
            return
        update = reply[FedAvg.update]
        out[self.updates], out[self.squares] = update, sum(float(u.double().square().sum()) for u in update.values())
        if self.on is not None:
            out[self.features] = _unit_features(server.trained(reply).network, server.data[self.on].images)

    def receive(self, server: AveragingServer, replies: AggregatedReplies, old: Tensors) -> None:
        """Write the distances between the clients' models to the round's row of the history."""
        count = replies.weight(self.squares)
        if count < 2:
            return
        mean = sum(float((total / count).square().sum()) for total in replies.sum(self.updates).values())
        mean_square = float(replies[self.squares])
        distance = math.sqrt(max(0.0, mean_square - mean))
        found = {"distance": distance, "relative": distance / math.sqrt(mean_square) if mean_square else 0.0}
        if self.features in replies:
            agreement = (replies.sum(self.features) / count).square().sum(1).mean()
            found["features"] = float((1 - agreement) * count / (count - 1))  # without pairs of a client with itself
        server.notes["client_drift"] = found


@torch.no_grad()
def _unit_features(network: torch.nn.Module, images: Tensor) -> Tensor:
    """Return the network's features of the images, each scaled to norm 1, float [N, d]."""
    embed = split(network).features
    return torch.cat([normalize(embed(part).flatten(1)) for part in images.split(_CHUNK)])
