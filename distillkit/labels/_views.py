"""Augmented and mixed views of images, which are reproducible from a seed, an epoch and a batch number."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from distillkit._utils.batches import batch_indices
from distillkit.augment import Augmentation, apply_augmentation
from distillkit.labels.mixing import CutMix, Mixup
from distillkit.rng import derive
from distillkit.sets._stored import StoredImages, read_batches

Mixing = CutMix | Mixup


@dataclass(frozen=True)
class ViewOptions:
    """Options that, together with a seed, determine the augmented and mixed views of every epoch.

    Attributes:
        batch: number of images per batch.
        augment: augmentation of each image, or None.
        mix: mixing of the augmented images (`CutMix` or `Mixup`), or None.
    """

    batch: int
    augment: Augmentation | None
    mix: Mixing | None


class View(NamedTuple):
    """Batch of views. A view is an augmented image (its main image), possibly mixed with another image (its partner).

    Attributes:
        images: the views, float [B, C, H, W].
        rows: indices of the main images in the whole set, int64 [B], on the CPU.
        partner: indices of the partners in this batch, int64 [B].
        share: fraction of every view that comes from its main image, in [0, 1]. The rest comes from the partner.
    """

    images: Tensor
    rows: Tensor
    partner: Tensor
    share: float


def views(images: Tensor | StoredImages, options: ViewOptions, seed: int, epoch: int) -> Iterator[View]:
    """Yield the batches of views (augmented and possibly mixed images) of one epoch. Every image is used once.

    A last batch of one image is merged into the batch before it, whatever the network, because stored labels of views
    may be used to train any network.

    Args:
        images: the images of the set, float [N, C, H, W], or the set if it is stored.
        options: batch size, augmentation and mixing.
        seed, epoch: seed, and number of the epoch. The views depend only on the four arguments.
    """
    order = torch.randperm(len(images), generator=derive(seed, epoch, "order"))
    batches = batch_indices(order, options.batch, merge_single=True)
    for number, (index, x) in enumerate(zip(batches, read_batches(images, batches), strict=True)):
        generator = derive(seed, epoch, number, "view")
        if options.augment is not None:
            x = apply_augmentation(options.augment, x, generator, siamese=False)
        if options.mix is None:
            yield View(x, index, torch.arange(len(index)), 1.0)
        else:
            x, partner, share = options.mix(x, generator)
            yield View(x, index, partner, share)


def mixed_batches(
    images: Tensor | StoredImages, rows: Tensor, options: ViewOptions, seed: int, epoch: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the views of one epoch in batches, with their labels.

    A view is an augmented image. If `options.mix` is not None, another image of the batch is mixed into it. The label
    of the view is then the average of the labels of the two images, weighted by their shares of the view.

    Args:
        images: as in `views`.
        rows: soft or one-hot labels of the images, float [N, K].
        options, seed, epoch: as in `views`.
    """
    for view in views(images, options, seed, epoch):
        own = rows[view.rows.to(rows.device, non_blocking=True)]
        yield view.images, torch.lerp(own[view.partner.to(rows.device, non_blocking=True)], own, view.share)


def require_mixing(mix: object) -> None:
    """Check that an argument `mix` is None, a `CutMix` or a `Mixup`.

    Args:
        mix: the argument.

    Raises:
        TypeError: the argument is any other value.
    """
    if mix is not None and not isinstance(mix, Mixing):
        came = f"the class {mix.__name__}" if isinstance(mix, type) else type(mix).__name__
        raise TypeError(f"mix must be None, CutMix() or Mixup(), got {came}")
