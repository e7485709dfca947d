"""Augmented and mixed views of a set's images, as a pure function of a seed, an epoch and a batch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from distillkit.augment import Augmentation, apply_augmentation
from distillkit.labels.mixing import CutMix, Mixup
from distillkit.rng import derive

__all__ = ["Mixing", "View", "ViewOptions", "mixed_batches", "require_mixing", "views"]

Mixing = CutMix | Mixup


@dataclass(frozen=True)
class ViewOptions:
    """Options that determine the views of every epoch, besides the seed.

    Attributes:
        batch: number of images per batch.
        augment, mix: augmentation, and mixing after the augmentation.
    """

    batch: int
    augment: Augmentation | None
    mix: Mixing | None


class View(NamedTuple):
    """Batch of views.

    Attributes:
        images: the views, float [B, C, H, W].
        rows: rows of the set, int64 [B], on the CPU.
        partner: position in the batch of the image that each image is mixed with, int64 [B].
        share: share of a view that belongs to the image itself.
    """

    images: Tensor
    rows: Tensor
    partner: Tensor
    share: float


def views(images: Tensor, options: ViewOptions, seed: int, epoch: int) -> Iterator[View]:
    """Yield the batches of one epoch. Every image occurs once.

    Args:
        images: the images of the set, float [N, C, H, W].
        options: see `ViewOptions`.
        seed, epoch: the views are a pure function of these, the images and the options.
    """
    order = torch.randperm(len(images), generator=derive(seed, epoch, "order"))
    for number, index in enumerate(order.split(options.batch)):
        generator = derive(seed, epoch, number, "view")
        x = images.index_select(0, index.to(images.device))
        if options.augment is not None:
            x = apply_augmentation(options.augment, x, generator, siamese=False)
        if options.mix is None:
            yield View(x, index, torch.arange(len(index)), 1.0)
        else:
            x, partner, share = options.mix(x, generator)
            yield View(x, index, partner, share)


def mixed_batches(
    images: Tensor, rows: Tensor, options: ViewOptions, seed: int, epoch: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the views of one epoch with their labels: rows of the set, averaged by the shares of the two images.

    Args:
        images: the images of the set, float [N, C, H, W].
        rows: their labels, float [N, K].
        options, seed, epoch: see `views`.
    """
    for view in views(images, options, seed, epoch):
        own = rows[view.rows.to(rows.device)]
        yield view.images, torch.lerp(own[view.partner.to(rows.device)], own, view.share)


def require_mixing(mix: object) -> None:
    """Check that an argument `mix` is None, a `CutMix` or a `Mixup`.

    Args:
        mix: the argument.

    Raises:
        TypeError: another value.
    """
    if mix is not None and not isinstance(mix, Mixing):
        came = f"the class {mix.__name__}" if isinstance(mix, type) else type(mix).__name__
        raise TypeError(f"mix must be None, CutMix() or Mixup(), got {came}")
