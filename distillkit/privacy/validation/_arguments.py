"""The doors at which a private component turns away data and options that would void its guarantee."""

from __future__ import annotations

import torch
from torch import Tensor

from distillkit._utils import check
from distillkit.normalization import IDENTITY, Normalization
from distillkit.privacy.errors import (
    PrivacyError,
    PrivateInitialization,
    PrivateStatistics,
)
from distillkit.privacy.ledger import Ledger
from distillkit.privacy.validation._delta import refuse_large_delta
from distillkit.sets import LabeledImages, as_set

__all__ = [
    "NEW_LEDGER_REMARK",
    "as_private_set",
    "initial_images",
    "ledger_or_new",
    "refuse_half_precision",
    "refuse_measured_normalization",
    "require_given_num_classes",
]


NEW_LEDGER_REMARK = "this ledger began with this call: what the same records paid elsewhere is not in its epsilon"
"""What a ledger remarks that a call made for itself, because none was given."""


def as_private_set(
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
    require_given_num_classes(real)
    if real.labels.ndim != 1:
        raise PrivacyError(
            "labels must be class indices [N]: soft rows have no bounded contribution to a class; take labels.argmax(1)"
        )
    if size is not None:
        refuse_large_delta(size, delta)
    if not check.boolean(public_statistics, "public_statistics"):
        refuse_measured_normalization(real.normalization)
    return real


def require_given_num_classes(real: LabeledImages) -> None:
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


def refuse_measured_normalization(normalization: Normalization, who: str = "a private component") -> None:
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
            "data.renormalize(Normalization((0.5,), (0.5,))); or, if those images are public, say "
            "Normalization.of(images, public=True), or public_statistics=True where that is an option"
        )


def ledger_or_new(ledger: Ledger | None, delta: float) -> Ledger:
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
        ledger.add_remark(NEW_LEDGER_REMARK)
    return ledger


def initial_images(
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
    if not isinstance(init, LabeledImages):
        raise TypeError(f"init must be 'noise' or a public LabeledImages, got {type(init).__name__}")
    real.require_compatible(init)
    if init.labels.ndim != 1 or init.counts().tolist() != [ipc] * real.num_classes:
        raise ValueError(f"init must hold {ipc} images of each of {real.num_classes} classes, and class indices")
    start = init.images[init.labels.argsort(stable=True)].to(real.images)
    for image in start:
        if bool((real.images == image).flatten(1).all(1).any()):
            raise PrivateInitialization(
                "init holds an image of the private set; take init='noise', or a set that is public indeed"
            )
    return start.clone(), "public set"


def refuse_half_precision(values: Tensor, what: str) -> None:
    """Refuse numbers whose rounding would exceed what a clip promises.

    Args:
        values: images or a parameter.
        what: names them in the message.

    Raises:
        PrivacyError: they are neither float32 nor float64.
    """
    if values.dtype not in (torch.float32, torch.float64):
        raise PrivacyError(
            f"{what} is {values.dtype}: its rounding exceeds what a clip promises; private training takes float32 or "
            "float64, so convert model and images, for instance with .float()"
        )
