"""Tries on public noise whether a batch lets one image see another, which would void a guarantee for single records."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from distillkit.networks._validation import uses_batch_statistics
from distillkit.privacy.errors import (
    BatchStatistics,
    NotSeparable,
)
from distillkit.rng import derive
from distillkit.sets import LabeledImages

__all__ = [
    "public_noise",
    "public_trial",
    "refuse_batch_norm",
    "refuse_mixing_augmentation",
    "refuse_mixing_loss",
    "refuse_mixing_rows",
]


def public_noise(count: int, like: LabeledImages, generator: torch.Generator, *, coarse: int = 2) -> Tensor:
    """Smooth noise images that owe nothing to the data, [count, C, H, W] in the set's normalised space.

    Gaussian noise with the mean and standard deviation that the normalisation, a public constant, says pixels have; it
    is drawn at a `coarse`-th of the resolution, enlarged bilinearly and clamped to [0, 1].

    Args:
        count: how many images.
        like: gives shape, normalisation, dtype and device, and nothing else.
        generator: draws them.
        coarse: how much coarser than the images the noise is; 1 is white noise.
    """
    c, h, w = like.shape
    small_h, small_w = (min(side, max(2, side // coarse)) for side in (h, w))
    small = torch.randn(count, c, small_h, small_w, generator=generator, dtype=like.images.dtype)
    smooth = torch.nn.functional.interpolate(small, size=(h, w), mode="bilinear", align_corners=False)
    mean, std = (smooth.new_tensor(values).view(-1, 1, 1) for values in (like.mean, like.std))
    return like.normalization.encode((mean + std * smooth).clamp(0, 1).to(like.images.device))


def public_trial(count: int, like: LabeledImages, generator: torch.Generator) -> Tensor:
    """Images to try a network on, float [count, C, H, W], that owe nothing to the data.

    `public_noise` and a little white noise. The white noise keeps every image from being constant, where rounding in a
    norm layer would look like a difference.

    Args:
        count: how many images.
        like: gives shape, normalisation, dtype and device, and nothing else.
        generator: draws them.
    """
    white = torch.randn(count, *like.shape, generator=generator, dtype=like.images.dtype)
    return public_noise(count, like, generator) + 0.3 * white.to(like.images.device)


def refuse_batch_norm(network: object) -> None:
    """Refuse a network in which a layer normalises with the statistics of the batch.

    Args:
        network: any network; in eval mode batch norm uses stored statistics, and passes.

    Raises:
        BatchStatistics: one record would change the embedding of all.
    """
    if uses_batch_statistics(network):
        raise BatchStatistics(
            f"{type(network).__name__} has batch norm that uses the batch's own statistics, so one record changes the "
            "embedding of all; take norm='instance' or 'group', or a network in eval mode whose running statistics "
            "come from public data"
        )


def refuse_mixing_augmentation(
    augment: Callable[[Tensor, torch.Generator], Tensor], public: Tensor, *, tries: int = 8
) -> None:
    """Refuse an augmentation in which the images of a batch meet: what it makes of one may not depend on the others.

    Args:
        augment: maps [N, C, H, W] to as many images, drawing from the generator. Batches of equal size and equal draws
            are compared, because an image may have a draw of its own, by its place.
        public: a few images to try it on, at least two.
        tries: with so many seeds, because it may act on some draws alone.

    Raises:
        BatchStatistics: an image changes with the others, or there are more or fewer images than before.
    """
    others = 3 * public.flip(0) + 1
    for seed in range(tries):
        kept = torch.rand(len(public), generator=derive(seed)).to(public.device) < 0.5
        whole = augment(public.clone(), derive(seed))
        if len(whole) != len(public):
            raise BatchStatistics(f"the augmentation makes {len(whole)} images of {len(public)}; each must stay one")
        for rows in (kept, ~kept):
            batch = torch.where(rows.view(-1, 1, 1, 1), public, others)
            mixed = augment(batch, derive(seed))
            moved = (whole - mixed).abs().flatten(1).mean(1) / (whole.abs().flatten(1).mean(1) + 1e-12)
            if not bool((moved[rows] <= torch.finfo(moved.dtype).eps ** 0.5).all()):
                raise BatchStatistics(
                    "the augmentation makes something else of an image when other images are in the batch, so one "
                    "record changes more than its own contribution; augment every image by itself"
                )


def refuse_mixing_loss(loss: Callable[[Tensor, Tensor], Tensor], logits: Tensor, labels: Tensor) -> None:
    """Refuse a training objective that is not the mean of what each example alone would give.

    Args:
        loss: gives one number for logits [N, K] and labels.
        logits, labels: public rows to try it on, several of one class among them.

    Raises:
        NotSeparable: it is no number, or weighs, contrasts or averages over the batch.
    """
    together = loss(logits, labels)
    if together.ndim:
        raise NotSeparable(f"the objective must be one number, the mean over examples, got {list(together.shape)}")
    alone = torch.stack([loss(z[None], y[None]) for z, y in zip(logits, labels)]).mean()
    if not bool((together - alone).abs() <= together.abs() * torch.finfo(logits.dtype).eps ** 0.5):
        raise NotSeparable(
            f"the objective of a batch is {float(together):.5g}, the mean of its examples' own {float(alone):.5g}: an "
            "example has no contribution of its own to clip. Take the mean over examples, without weights that "
            "depend on the batch"
        )


def refuse_mixing_rows(loss: Callable[[Tensor, Tensor], Tensor], logits: Tensor, labels: Tensor) -> None:
    """Refuse a loss of examples in which they meet: each must have the loss that its row alone would give.

    Args:
        loss: gives losses [n] for logits [n, K] and labels.
        logits, labels: public rows to try it on, at least two.

    Raises:
        NotSeparable: there are not n losses, or one changes with the other rows.
    """
    with torch.no_grad():
        together = loss(logits, labels)
        if together.shape != labels.shape[:1]:
            raise NotSeparable(f"the loss must give one value for each example [n], got shape {list(together.shape)}")
        alone = torch.cat([loss(z[None], y[None]) for z, y in zip(logits, labels)])
    if not torch.allclose(together, alone, rtol=1e-4, atol=1e-6):
        raise NotSeparable(
            f"the losses of {len(labels)} examples are not those that each has alone, so an example has no "
            "contribution of its own to clip; take a loss of every row by itself, without weights, contrasts or means "
            "over the batch"
        )
