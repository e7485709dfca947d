"""Loss terms that guide an inversion to plausible images: batch norm statistics, and agreement between restarts."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn
from torch.func import functional_call

from attacks.inversion._inputs import copy_state
from attacks.matching import match
from distillkit.losses import BatchNormPrior

Prior = Callable[[Tensor], Tensor]
"""Function of images [N, C, H, W], in the network's space, to a scalar; smaller for more likely images."""


def batch_norm_prior(network: nn.Module, *, first_multiplier: float = 1.0) -> Prior:
    """Return a function that measures how far images are from a network's batch norm statistics (GradInversion).

    Pass it to `invert_message(priors=...)`. The statistics are means over many images, so the prior works better for a
    large private batch than for one image. If a client also sends its running statistics, use a network with these
    statistics.

    Args:
        network: network with BatchNorm layers that keep running statistics. Its state and its mode are not changed.
        first_multiplier: weight of the first layer; all other layers have weight 1, as in `losses.BatchNormPrior`.

    Returns:
        A function of images that returns a scalar; each call is a forward pass.

    Raises:
        TypeError, ValueError: `network` is not a network or has no such layers, or the multiplier is below 0.

    Paper: Yin et al., "See through Gradients: Image Batch Recovery via GradInversion" (CVPR 2021), the term R_BN, taken
    from DeepInversion.
    """
    BatchNormPrior(network, first_multiplier=first_multiplier)

    def prior(images: Tensor) -> Tensor:
        parameters, buffers = copy_state(network)
        with BatchNormPrior(network, first_multiplier=first_multiplier) as seen:
            functional_call(network, {**parameters, **buffers}, (images,))
            return seen.value()

    return prior


def group_mean(images: Mapping[int, Tensor], labels: Mapping[int, Tensor]) -> dict[int, Tensor]:
    """Return the mean images over all restarts of an inversion, for GradInversion's group consistency.

    Restarts may have found the same images in different orders. Images of one class are therefore paired by their
    distance before the mean is taken. For each restart, the means are returned in the order of this restart's images.

    Args:
        images: images of each restart, float [N, C, H, W], by restart index.
        labels: labels of each restart, int64 [N]; the same labels in any order.
    """
    orders = {r: y.argsort(stable=True) for r, y in labels.items() if r in images}
    first = next(iter(orders))
    anchor, classes = images[first][orders[first]], labels[first][orders[first]]
    for r in orders:
        if r != first:
            for k in classes.unique():
                own = (classes == k).nonzero().flatten()
                if len(own) > 1:
                    orders[r][own] = orders[r][own][match(images[r][orders[r][own]], anchor[own])]
    mean = torch.stack([images[r][orders[r]] for r in orders]).mean(0)
    return {r: mean[order.argsort()] for r, order in orders.items()}
