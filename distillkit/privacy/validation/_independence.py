"""Tries on public noise whether a batch lets one image see another, which would void a guarantee for single records."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from distillkit.networks._validation import uses_batch_statistics
from distillkit.privacy.errors import (
    BatchStatistics,
    NotSeparable,
)
from distillkit.privacy.validation._side_effects import forbid_side_effects
from distillkit.rng import derive

__all__ = [
    "refuse_batch_norm",
    "require_independent_augmentation",
    "require_independent_losses",
    "require_independent_rows",
    "require_mean_objective",
]


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


def require_independent_augmentation(
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


def require_mean_objective(loss: Callable[[Tensor, Tensor], Tensor], logits: Tensor, labels: Tensor) -> None:
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


def require_independent_losses(loss: Callable[[Tensor, Tensor], Tensor], logits: Tensor, labels: Tensor) -> None:
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


def require_independent_rows(
    function: Callable[[Tensor], Tensor], images: Tensor, what: str, *modules: nn.Module, sizes: Sequence[int] = ()
) -> None:
    """Refuse a function in which the images of a batch meet: each row must be what its image alone would give.

    Called before private images go through a network or an augmentation, because the sensitivity of a sum rests on it:
    one record may change its own row and no other, wherever it stands. Tried on all images together, on a few, at other
    batch sizes, and with some of them replaced.

    Args:
        function: maps images [N, C, H, W] to N rows of anything, without draws of its own.
        images: public ones to try it on, float [N, C, H, W], at least two.
        what: names the function in the message.
        modules: what the function uses; it must change no tensor that they hold.
        sizes: further batch sizes; larger batches hold the images several times, in random places.

    Raises:
        BatchStatistics: images meet, or their number or place counts, or there are not as many rows as images.
        PrivacyError: it draws from a global random state.
    """
    with torch.no_grad(), forbid_side_effects(what, *modules, device=images.device):
        alone = torch.cat([_rows(function, image, what) for image in images.split(1)])
        for size in sorted({2, 3, len(images), *sizes}):
            drawn = torch.randint(len(images), (size,), generator=derive(size, "try"))
            index = (drawn if size != len(images) else torch.arange(size)).to(images.device)
            batch, own = images[index], alone[index]
            _same(_rows(function, batch, what), own, what)
            kept = (torch.randperm(size, generator=derive(size, "kept")) % 2 == 0).to(images.device)
            for rows in (kept, ~kept) if size in (len(images), max(sizes, default=0)) else ():
                mixed = torch.where(rows.view(-1, 1, 1, 1), batch, 30 * batch.flip(0) + 1)
                _same(_rows(function, mixed, what)[rows], own[rows], what)


def _rows(function: Callable[[Tensor], Tensor], images: Tensor, what: str) -> Tensor:
    out = function(images.clone())
    if out.ndim < 1 or len(out) != len(images):
        raise BatchStatistics(f"{what} makes {list(out.shape)} of {len(images)} images; each must give one row")
    return out.flatten(1) if out.ndim > 1 else out[:, None]


def _same(ours: Tensor, alone: Tensor, what: str) -> None:
    moved = (ours - alone).abs().mean(1) / (alone.abs().mean(1) + 1e-12)
    if not bool((moved <= torch.finfo(moved.dtype).eps ** 0.5).all()):
        raise BatchStatistics(
            f"{what} makes something else of an image when it stands elsewhere or among other images, so one record "
            "changes more than its own contribution; every example must be treated by itself"
        )
