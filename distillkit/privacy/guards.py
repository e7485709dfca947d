"""The doors at which a private component turns away what would void its guarantee."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from distillkit import check
from distillkit.networks.samplers import uses_batch_statistics
from distillkit.normalization import IDENTITY, Normalization
from distillkit.privacy.errors import (
    BatchStatistics,
    NotAccountable,
    NotSeparable,
    PrivacyError,
    PrivateInitialization,
    PrivateStatistics,
)
from distillkit.privacy.ledger import Ledger
from distillkit.rng import derive
from distillkit.sets import LabeledImages, as_set

__all__ = [
    "FRESH",
    "ledger_at",
    "private_set",
    "public_noise",
    "public_start",
    "public_trial",
    "refuse_batch_norm",
    "refuse_large_delta",
    "refuse_measured",
    "refuse_mixing_augmentation",
    "refuse_mixing_loss",
    "refuse_mixing_rows",
    "require_given_classes",
]


FRESH = "this ledger began with this call: what the same records paid elsewhere is not in its epsilon"
"""What a ledger remarks that a call made for itself, because none was given."""


def private_set(
    images: Tensor | LabeledImages,
    labels: Tensor | None,
    *,
    num_classes: int | None,
    normalization: Normalization | None,
    public_statistics: bool,
    delta: float,
    size: float | None = None,
) -> LabeledImages:
    """Make a set of what a private component was given, if nothing that the release would show was measured on it.

    Whether it raises follows from public facts and from where the set's own facts came from, never from the records.

    Args:
        images, labels: a set alone; or float [N, C, H, W] and class indices int [N].
        num_classes: K, a public number; None if the set was told it when it was made.
        normalization: how tensors came from pixels; None for that of the set.
        public_statistics: whether the user says that a measured normalisation was measured on public images.
        delta: compared with `size`.
        size: a public number of records, if there is one.

    Raises:
        PrivacyError: no `num_classes`, or one that the set derived from its labels; label rows.
        PrivateStatistics: a normalisation that was measured, or fitted, on images that are not known to be public.
        NotAccountable: delta is not below one over the public number of records, `size`, if there is one.
    """
    real = as_set(images, labels, num_classes=num_classes, normalization=normalization)
    require_given_classes(real)
    if real.labels.ndim != 1:
        raise PrivacyError(
            "labels must be class indices [N]: soft rows have no bounded contribution to a class; take labels.argmax(1)"
        )
    if size is not None:
        refuse_large_delta(size, delta)
    if not public_statistics:
        refuse_measured(real.normalization)
    return real


def require_given_classes(real: LabeledImages) -> None:
    """Refuse a set whose class count was read off its labels: it would tell whether anybody has the last class.

    Args:
        real: the private set.

    Raises:
        PrivacyError: nobody gave the set its number of classes.
    """
    if not real.classes_given:
        raise PrivacyError(
            "num_classes must be given: read off the private labels it would tell whether anybody has the last class. "
            "Say it in the call, or once for the set: LabeledImages(..., num_classes=K) or "
            "data.replace(num_classes=K); all K classes are released"
        )


def refuse_large_delta(size: float, delta: float) -> None:
    """Refuse a delta at which even publishing a random record counts as private.

    Args:
        size: a *public* number of records; 0 compares with nothing.
        delta: must be below 1 / size.

    Raises:
        NotAccountable: it is not.
    """
    if size and delta >= 1 / size:
        raise NotAccountable(
            f"delta must be below one over the number of records (1/{size:g}), got {delta:g}: at that delta even "
            "publishing a random record passes"
        )


def refuse_measured(normalization: Normalization, who: str = "a private component") -> None:
    """Refuse a normalisation that was measured on images which nobody said are public.

    Args:
        normalization: of the private set.
        who: names the component in the message.

    Raises:
        PrivateStatistics: it was measured or fitted, and is not the identity.
    """
    if normalization.measured and normalization != IDENTITY:
        what = "mean and std were measured" if normalization.zca is None else "whitening was fitted"
        raise PrivateStatistics(
            f"the set's {what} on images, and whatever {who} releases shows them. Take public constants, for instance "
            "data.renormalized(Normalization((0.5,), (0.5,))); or, if those images are public, say "
            "Normalization.of(images, public=True), or public_statistics=True where that is an option"
        )


def ledger_at(ledger: Ledger | None, delta: float) -> Ledger:
    """The ledger that a call charges: the one given, or a new one in memory, which remarks that it is new.

    Args:
        ledger: the user's, or None.
        delta: the user's; that of the ledger, if there is one.

    Raises:
        ValueError: the two differ.
    """
    if ledger is not None and ledger.delta != delta:
        raise ValueError(
            f"delta must be the ledger's, {ledger.delta:g}, got {delta:g}: one epsilon refers to one delta; say "
            f"delta={ledger.delta:g}, or make a ledger at {delta:g}"
        )
    if ledger is None:
        ledger = Ledger(delta=delta)
        ledger.remark(FRESH)
    return ledger


def public_start(
    init: str | LabeledImages, real: LabeledImages, *, ipc: int, generator: torch.Generator
) -> tuple[Tensor, str]:
    """The images from which a set that will be released starts, none of them private.

    Args:
        init: `"noise"`: N(0, 1) for each value. Or a *public* set of the same space with `ipc` images of each class.
        real: the private set; only compared with, never copied. This one refusal reads private images, because a
            private image in the release is worse: its error is for whoever holds them, and epsilon does not cover it.
        ipc: images per class.
        generator: draws the noise.

    Returns:
        The images [K * ipc, C, H, W], class by class, and what to call them in the set's `info`.

    Raises:
        PrivateInitialization: `"real"` or another statistic of the data, or a set that holds a private image.
    """
    check.positive_int(ipc, "ipc")
    if isinstance(init, str):
        if init != "noise":
            raise PrivateInitialization(
                f"init={init!r} would put private data into the release itself, which no later noise can undo; take "
                "init='noise', or a public set of images"
            )
        shape = (real.num_classes * ipc, *real.shape)
        return torch.randn(shape, generator=generator, dtype=real.images.dtype).to(real.images.device), init
    real.require_same_space(init)
    if init.labels.ndim != 1 or init.counts().tolist() != [ipc] * real.num_classes:
        raise ValueError(f"init must hold {ipc} images of each of {real.num_classes} classes, and class indices")
    start = init.images[init.labels.argsort(stable=True)].to(real.images)
    for image in start:
        if bool((real.images == image).flatten(1).all(1).any()):
            raise PrivateInitialization(
                "init holds an image of the private set; take init='noise', or a set that is public indeed"
            )
    return start.clone(), "public set"


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
