"""Training a server's network on the union of what clients sent."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from distillkit.networks._dropout import seed_dropout
from distillkit.sets import LabeledImages
from fl.batches import batch_at, select_rows, shuffled_indices
from fl.participants import Server

__all__ = ["train_on_union"]


def train_on_union(
    server: Server,
    network: nn.Module,
    union: LabeledImages,
    weight: Tensor,
    optimizer: torch.optim.Optimizer,
    epochs: int,
    batch: int,
    *,
    radius: float | None,
) -> None:
    """Train `network` in place: shuffled passes over the set, cross-entropy weighted image by image.

    Args:
        server: gives the draws, and says when to stop.
        network: where the images lie.
        union: the set.
        weight: of each image, float [N], with mean 1.
        optimizer: of the network's parameters.
        epochs: passes over the set.
        batch: images a step.
        radius: after every step the parameters are projected to the ball of this radius around where they began; None
            leaves them free.
    """
    seed_dropout(network, server.generator("dropout"))
    params = list(network.parameters())
    center = [p.detach().clone() for p in params]
    for index in shuffled_indices(len(union), batch, server.generator("train"), epochs, None):
        server.check_running()
        part = batch_at(union, index)
        losses = nn.functional.cross_entropy(network(part.images), part.labels, reduction="none")
        optimizer.zero_grad()
        (losses * select_rows(weight, index)).mean().backward()
        optimizer.step()
        if radius is not None:
            _project(params, center, radius)


@torch.no_grad()
def _project(params: list[nn.Parameter], center: list[Tensor], radius: float) -> None:
    """Move the parameters to the nearest point of the ball around `center`."""
    moved = [p - c for p, c in zip(params, center)]
    distance = torch.stack([m.square().sum() for m in moved]).sum().sqrt()
    if float(distance) > radius:
        for param, c, m in zip(params, center, moved):
            param.copy_(c + m * (radius / distance))
