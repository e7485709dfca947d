"""Training of a network on the server on a set of images, and projection of its weights onto a ball."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from distillkit._utils.batches import require_batch_statistics, uses_batch_statistics
from distillkit.networks._dropout import seed_dropout
from distillkit.sets import LabeledImages
from fl.batches import batch_at, select_rows, shuffled_indices


def train_on_set(
    network: nn.Module,
    data: LabeledImages,
    optimizer: torch.optim.Optimizer,
    *,
    epochs: int,
    batch: int,
    order: torch.Generator,
    dropout: torch.Generator,
    check_running: Callable[[], None],
    weight: Tensor | None = None,
    after_step: Callable[[], None] = lambda: None,
) -> None:
    """Train `network` in place on a set in shuffled passes, with the mean cross-entropy as loss.

    Args:
        network: network to train, on the images' device.
        data: set to train on.
        optimizer: optimizer of the network's parameters.
        epochs: number of passes over the set.
        batch: number of images per step.
        order: generator of the order of the images.
        dropout: generator of the dropout masks.
        check_running: function that is called before every step. It can stop the training by raising an exception.
        weight: weight of each image, float [N] with mean 1; None: equal weights.
        after_step: function that is called after every step.
    """
    seed_dropout(network, dropout)
    require_batch_statistics(network, data.images, min(batch, len(data)), "factory")
    for index in shuffled_indices(len(data), batch, order, epochs, None, uses_batch_statistics(network), data.images):
        check_running()
        part = batch_at(data, index)
        if weight is None:
            loss = F.cross_entropy(network(part.images), part.labels)
        else:
            losses = F.cross_entropy(network(part.images), part.labels, reduction="none")
            loss = (losses * select_rows(weight, index)).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        after_step()


class Projection:
    """Function that projects a network's parameters onto a ball around their values when this object is created.

    Args:
        network: network whose parameters to project. A copy of their current values is the center of the ball.
        radius: radius of the ball, in the l2 norm over all parameters together.
    """

    def __init__(self, network: nn.Module, radius: float) -> None:
        self.params, self.radius = list(network.parameters()), radius
        self.center = [p.detach().clone() for p in self.params]

    @torch.no_grad()
    def __call__(self) -> None:
        """Move the network's parameters to the nearest point of the ball."""
        moved = [p - c for p, c in zip(self.params, self.center)]
        distance = torch.stack([m.square().sum() for m in moved]).sum().sqrt()
        outside = distance > self.radius  # not read, because this would wait for an accelerator
        for param, center, m in zip(self.params, self.center, moved):
            param.copy_(torch.where(outside, center + m * (self.radius / distance), param))
