"""Checks on public noise that a network, augmentation or loss treats the examples of a batch independently."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from distillkit.networks._validation import uses_batch_statistics
from distillkit.privacy.errors import BatchStatistics, NotSeparable
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
        network: network to check; batch norm in eval mode uses stored statistics and is accepted.

    Raises:
        BatchStatistics: one record would change the embeddings of all records.
    """
    if uses_batch_statistics(network):
        raise BatchStatistics(
            f"{type(network).__name__} has batch norm that uses the batch's own statistics, so one record changes the "
            "embedding of all. Use norm='instance' or 'group', or a network in eval mode whose running statistics come "
            "from public data"
        )


def require_independent_augmentation(
    augment: Callable[[Tensor, torch.Generator], Tensor], public: Tensor, *, tries: int = 8
) -> None:
    """Check that an augmentation transforms each image independently of the other images in the batch.

    Args:
        augment: function of (images [N, C, H, W], generator) that returns N images. The check compares batches of equal
            size with equal draws, because the draw of an image may depend on its position.
        public: public images for the check, at least two.
        tries: number of seeds to check; several are needed because an augmentation may mix images in some draws only.

    Raises:
        BatchStatistics: the result for an image depends on the other images, or the number of images changes.
    """
    others = 3 * public.flip(0) + 1
    for seed in range(tries):
        kept = torch.rand(len(public), generator=derive(seed)).to(public.device) < 0.5
        whole = augment(public.clone(), derive(seed))
        if len(whole) != len(public):
            raise BatchStatistics(f"the augmentation turns {len(public)} images into {len(whole)}; return one for each")
        for rows in (kept, ~kept):
            batch = torch.where(rows.view(-1, 1, 1, 1), public, others)
            mixed = augment(batch, derive(seed))
            change = (whole - mixed).abs().flatten(1).mean(1) / (whole.abs().flatten(1).mean(1) + 1e-12)
            if not bool((change[rows] <= torch.finfo(change.dtype).eps ** 0.5).all()):
                raise BatchStatistics(
                    "the augmentation of an image depends on the other images of the batch, so one record changes more "
                    "than its own contribution; augment every image independently"
                )


def require_mean_objective(loss: Callable[[Tensor, Tensor], Tensor], logits: Tensor, labels: Tensor) -> None:
    """Check that a training objective is the mean of the objectives of single examples.

    Args:
        loss: function of (logits [N, K], labels) that returns a scalar.
        logits, labels: public rows for the check, with several rows of one class among them.

    Raises:
        NotSeparable: the objective is not a scalar, or it differs from the mean over the examples, as with weights,
            contrasts or normalisation over the batch.
    """
    together = loss(logits, labels)
    if together.ndim:
        raise NotSeparable(f"the objective must be one number, the mean over examples, got {list(together.shape)}")
    alone = torch.stack([loss(z[None], y[None]) for z, y in zip(logits, labels)]).mean()
    if not bool((together - alone).abs() <= together.abs() * torch.finfo(logits.dtype).eps ** 0.5):
        raise NotSeparable(
            f"the objective of a batch is {float(together):.5g}, but the mean over its single examples is "
            f"{float(alone):.5g}, so an example has no contribution that could be clipped. Use the mean over examples, "
            "without weights that depend on the batch"
        )


def require_independent_losses(loss: Callable[[Tensor, Tensor], Tensor], logits: Tensor, labels: Tensor) -> None:
    """Check that the loss of each example depends on its own row alone.

    Args:
        loss: function of (logits [n, K], labels) that returns n losses.
        logits, labels: public rows for the check, at least two.

    Raises:
        NotSeparable: the number of losses is not n, or a loss depends on other rows.
    """
    with torch.no_grad():
        together = loss(logits, labels)
        if together.shape != labels.shape[:1]:
            raise NotSeparable(f"the loss must give one value for each example [n], got shape {list(together.shape)}")
        alone = torch.cat([loss(z[None], y[None]) for z, y in zip(logits, labels)])
    if not torch.allclose(together, alone, rtol=1e-4, atol=1e-6):
        raise NotSeparable(
            f"the losses of {len(labels)} examples in a batch differ from their losses one by one, so an example "
            "has no contribution that could be clipped. Compute the loss of every row independently, without weights, "
            "contrasts or means over the batch"
        )


def require_independent_rows(
    function: Callable[[Tensor], Tensor], images: Tensor, what: str, *modules: nn.Module, sizes: Sequence[int] = ()
) -> None:
    """Check that a function computes each row from its own image alone.

    The sensitivity of a sum relies on this property: a record may change only its own row, at any position in the
    batch. The function is evaluated on single images, on all images together, at other batch sizes, and with some
    images replaced. Call this check before private images pass through a network or an augmentation.

    Args:
        function: function that maps images [N, C, H, W] to N rows of any shape and makes no random draws.
        images: public images for the check, float [N, C, H, W], at least two.
        what: name of the function in the error message.
        modules: modules that the function uses but whose tensors it must not change.
        sizes: further batch sizes to check; larger batches repeat the images at random positions.

    Raises:
        BatchStatistics: a row depends on other images, on their number or on the image's position, or the number of
            rows is wrong.
        PrivacyError: the function draws from a global random state.
    """
    with torch.no_grad(), forbid_side_effects(what, *modules, device=images.device):
        alone = torch.cat([_rows(function, image, what) for image in images.split(1)])
        for size in sorted({2, 3, len(images), *sizes}):
            drawn = torch.randint(len(images), (size,), generator=derive(size, "try"))
            index = (drawn if size != len(images) else torch.arange(size)).to(images.device)
            batch, own = images[index], alone[index]
            _require_equal(_rows(function, batch, what), own, what)
            kept = (torch.randperm(size, generator=derive(size, "kept")) % 2 == 0).to(images.device)
            for rows in (kept, ~kept) if size in (len(images), max(sizes, default=0)) else ():
                mixed = torch.where(rows.view(-1, 1, 1, 1), batch, 30 * batch.flip(0) + 1)
                _require_equal(_rows(function, mixed, what)[rows], own[rows], what)


def _rows(function: Callable[[Tensor], Tensor], images: Tensor, what: str) -> Tensor:
    out = function(images.clone())
    if out.ndim < 1 or len(out) != len(images):
        raise BatchStatistics(
            f"{what} turns {len(images)} images into shape {list(out.shape)}; return one row for each"
        )
    return out.flatten(1) if out.ndim > 1 else out[:, None]


def _require_equal(rows: Tensor, alone: Tensor, what: str) -> None:
    change = (rows - alone).abs().mean(1) / (alone.abs().mean(1) + 1e-12)
    if not bool((change <= torch.finfo(change.dtype).eps ** 0.5).all()):
        raise BatchStatistics(
            f"{what} gives an image another result at another position or among other images, so one record changes "
            "more than its own contribution; treat every example independently"
        )
