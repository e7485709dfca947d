"""Training of a sampled network on the synthetic set, between two matching steps of gradient matching."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass
from itertools import pairwise
from typing import cast

import torch
from torch import Tensor, nn

from distillkit._optimizers import sgd_step
from distillkit._utils import check
from distillkit._utils.batches import batch_indices, shuffled_orders, uses_batch_statistics
from distillkit._utils.options import NonNegative, PositiveInt, check_options
from distillkit.augment import Augmentation, apply_augmentation
from distillkit.condense._parameter_gradient import parameter_gradient
from distillkit.networks._base import Network

_PUBLISHED_LOOPS = ((1, 1), (10, 50), (20, 25), (30, 20), (40, 15), (50, 10), (100, 2))


@dataclass(frozen=True)
class InnerTraining:
    """Options of `gradient_matching` for training each sampled network on the synthetic set, by SGD without momentum.

    Attributes:
        loops: the pair (outer, inner). Each network is used for `outer` matching steps and trained for `inner` epochs
            between two matching steps. Default: `loops_for(ipc)`.
        lr: learning rate of the SGD that trains the network.
        batch: number of images per training step.
    """

    loops: tuple[int, int] | None = None
    lr: NonNegative = 0.01
    batch: PositiveInt = 256

    def __post_init__(self) -> None:
        check_options(self)
        if self.loops is not None:
            outer, inner = check.sequence(self.loops, "loops", "numbers (outer, inner)", 2)
            check.positive_int(outer, "loops[0]")
            check.positive_int(inner, "loops[1]", least=0)


def loops_for(ipc: int) -> tuple[int, int]:
    """Return the numbers of loop iterations (outer, inner) that DC (Zhao et al., ICLR 2021) uses for `ipc`.

    Outer is the number of matching steps for each network, and equals `ipc`, the number of images per class. Inner is
    the number of training epochs between two matching steps. Inner is interpolated linearly between the published
    points (ipc, inner): (1, 1), (10, 50), (20, 25), (30, 20), (40, 15), (50, 10) and (100, 2). Inner is rounded half
    up, and is 2 if `ipc` is above 100: `loops_for(15)` is (15, 38). The authors' code accepts only the published `ipc`.
    """
    ipc = check.positive_int(ipc, "ipc")
    for (low, at_low), (high, at_high) in pairwise(_PUBLISHED_LOOPS):
        if ipc <= high:
            return ipc, math.floor(at_low + (at_high - at_low) * (ipc - low) / (high - low) + 0.5)
    return ipc, _PUBLISHED_LOOPS[-1][1]


class TrainedNetwork:
    """Trainable copy of a sampled network, for gradient matching.

    Gradients are matched class by class, and batch statistics of a single class would normalize every class to the same
    mean. During matching, batch norm layers therefore use fixed statistics of a batch of all classes, which
    `fix_statistics` sets.

    Args:
        network: the sampled network, which is not changed.
        chunk: number of images per pass through the network; the default depends on device and image size.

    Attributes:
        network: copy of the sampled network.
        parameters: parameters of the copy.
        norms: batch norm layers of the copy. Layers that already used fixed running statistics in the sampled network
            are left out.
    """

    def __init__(self, network: Network, chunk: int | None) -> None:
        copied = copy.deepcopy(cast(nn.Module, network)).requires_grad_(True)
        norms = [m for m in copied.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
        self.network, self.parameters, self.chunk = cast(Network, copied), list(copied.parameters()), chunk
        self.norms = [norm for norm in norms if uses_batch_statistics(norm)]
        for norm in self.norms:
            if norm.running_mean is None:  # without them, eval mode would use batch statistics, too
                like = self.parameters[0]
                norm.track_running_stats, norm.num_batches_tracked = True, like.new_zeros((), dtype=torch.long)
                norm.running_mean, norm.running_var = (
                    like.new_zeros(norm.num_features),
                    like.new_ones(norm.num_features),
                )

    @torch.no_grad()
    def fix_statistics(self, images: Tensor) -> None:
        """Put the batch norm layers in eval mode, with the statistics of the batch `images` as running statistics.

        This applies to the layers in the attribute `norms`, which used batch statistics before.
        """
        for norm in self.norms:
            norm.reset_running_stats()
            norm.momentum = 1.0  # the statistics become those of the next batch
            norm.train()
        self.network(images)
        for norm in self.norms:
            norm.eval()

    def train(
        self, images: Tensor, labels: Tensor, epochs: int, options: InnerTraining, augment: Augmentation | None,
        generator: torch.Generator,
    ) -> None:  # fmt: skip
        """Train the network by SGD on the cross-entropy.

        The batch norm layers in the attribute `norms` use the statistics of each batch.

        Args:
            images, labels: images and labels of the synthetic set.
            epochs: number of epochs.
            options: the learning rate and the batch size.
            augment: augmentation, drawn independently for each image; or None.
            generator: random generator for the order of the images and the augmentation.
        """
        for norm in self.norms:
            norm.train()
        together = epochs if augment is None else 1
        for order in shuffled_orders(len(images), generator, images.device, epochs, together):
            for index in batch_indices(order, options.batch, merge_single=bool(self.norms)):
                batch = images.index_select(0, index)
                if augment is not None:
                    batch = apply_augmentation(augment, batch, generator, siamese=False)
                own = labels.index_select(0, index)
                gradients = parameter_gradient(self.network, self.parameters, batch, own, chunk=self.chunk)
                sgd_step(self.parameters, gradients, [], lr=options.lr)
