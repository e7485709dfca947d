"""What gradient matching does around its equations: the inner training of the network."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn

from distillkit.augment import Augmentation, augmented
from distillkit.condense._parameter_gradient import parameter_gradient
from distillkit.networks._base import Network
from distillkit.networks._validation import uses_batch_statistics


def trainable(network: Network) -> tuple[Network, list[nn.Parameter], list[nn.Module]]:
    """A copy of a drawn network to be trained, its parameters, and its batch norms that use batch statistics."""
    twin = copy.deepcopy(cast(nn.Module, network)).requires_grad_(True)
    norms = [m for m in twin.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm) and uses_batch_statistics(m)]
    for norm in norms:
        if norm.running_mean is None:  # in eval mode it would use the batch's again, whatever `fix_statistics` does
            like = next(twin.parameters())
            norm.track_running_stats, norm.num_batches_tracked = True, torch.tensor(0, device=like.device)
            norm.running_mean, norm.running_var = like.new_zeros(norm.num_features), like.new_ones(norm.num_features)
    return cast(Network, twin), list(twin.parameters()), list(norms)


@torch.no_grad()
def fix_statistics(network: Network, norms: Sequence[nn.Module], images: Tensor) -> None:
    """Put `norms` in eval mode with the statistics of `images` as their running ones."""
    for norm in norms:
        cast(nn.BatchNorm2d, norm).reset_running_stats()
        cast(nn.BatchNorm2d, norm).momentum = None  # a cumulative average: of one batch, that batch
        norm.train()
    network(images)
    for norm in norms:
        norm.eval()


def inner_epochs(
    network: Network,
    parameters: Sequence[nn.Parameter],
    norms: Sequence[nn.Module],
    images: Tensor,
    labels: Tensor,
    *,
    epochs: int,
    lr: float,
    batch: int,
    augment: Augmentation | None,
    generator: torch.Generator,
    chunk: int | None,
) -> None:
    """Train `network` in place by plain SGD on the cross-entropy; `norms` use the statistics of each batch."""
    for norm in norms:
        norm.train()
    for _ in range(epochs):
        order = torch.randperm(len(images), generator=generator).to(images.device)
        for index in order.split(batch):
            seen = images.index_select(0, index)
            if augment is not None:
                seen = augmented(augment, seen, generator, siamese=False)
            gradient = parameter_gradient(network, parameters, seen, labels.index_select(0, index), chunk=chunk)
            with torch.no_grad():
                for parameter, g in zip(parameters, gradient, strict=True):
                    parameter.sub_(g, alpha=lr)
