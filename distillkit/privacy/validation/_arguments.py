"""Checks of the arguments of functions that promise privacy.

The checks refuse data and options that would void the guarantee.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from distillkit._utils import check
from distillkit._utils.user_warnings import without_warnings
from distillkit.normalization import IDENTITY, Normalization
from distillkit.privacy.errors import NotAccountable, PrivacyError, PrivateInitialization, PrivateStatistics
from distillkit.privacy.ledger import Account, Ledger
from distillkit.privacy.validation._private_records import active_records, declare_records
from distillkit.sets import LabeledImages, StoredImages, TiledImages, Tiles
from distillkit.sets._stored import RealImages
from distillkit.sets._validation import FOUND_CLASSES, FOUND_LABELS
from distillkit.sets.as_set import open_set

_PART = 256
"""Number of images of a stored set that are read at a time."""

NEW_LEDGER_REMARK = "this ledger began with this call: what the same records paid elsewhere is not in its epsilon"
"""The remark in a ledger that a call created for itself because none was given."""


def open_private_set(
    images: Tensor | LabeledImages | StoredImages,
    labels: Tensor | None,
    *,
    num_classes: int | None = None,
    delta: float,
    size: float | Tensor | None = None,
    public_statistics: bool = False,
) -> RealImages:
    """Return the private images as a set, after checking that the metadata of the set reveal no private statistics.

    Whether the set is refused depends on the options and on how the set's metadata were made, but never on the
    records.

    Args:
        images, labels: a set and None; or images, float [N, C, H, W], and class indices, int [N]. The images of a
            `StoredImages` are not declared as records; the caller does so when it reads them.
        num_classes: public number of classes K; None if it was given when the set was created.
        delta: target delta, which is compared with `size`.
        size: public number of records or public class sizes; None skips the check of delta.
        public_statistics: whether the user declares that a measured normalization was measured on public images.

    Raises:
        PrivacyError: the number of classes is missing, the images were selected or computed from other records, the
            classes or the hold-out come from the data, or the labels are soft.
        PrivateStatistics: the normalization was measured or fitted on images that were not declared public.
        NotAccountable: delta is not below one over the number of records.
    """
    with without_warnings():  # sanity checks of pixels depend on the records
        real = open_set(images, labels, num_classes=num_classes)
    refuse_tiles(real)
    declare_records(real._rows if isinstance(real, StoredImages) else real.images, real.labels, *real.columns.values())
    refuse_derived(real.info)
    require_given_num_classes(real)
    if real.labels.ndim != 1:
        raise PrivacyError(
            "labels must be class indices [N]: soft labels have no bounded contribution to a class; pass "
            "labels.argmax(1)"
        )
    if size is not None:
        refuse_large_delta(float(torch.as_tensor(size).sum()), delta)
    if not check.boolean(public_statistics, "public_statistics"):
        refuse_measured_normalization(real.normalization)
    return real.replace(class_names=()) if real.info.get("classes") else real  # names that were found are not released


def require_given_num_classes(real: RealImages) -> None:
    """Refuse a set whose classes were found in the private data.

    A number that was derived from labels is the largest label + 1, so it reveals which class is the last one with
    records.
    """
    if not real.classes_given:
        raise PrivacyError(
            "num_classes must be given: if it were derived from the private labels (the largest label + 1), it would "
            "reveal which class is the last one with records. Pass it to the call, or once to the set: "
            "LabeledImages(..., num_classes=K) or data.replace(num_classes=K); all K classes are released"
        )


def refuse_tiles(data: object) -> None:
    """Refuse private `TiledImages`: one stored image gives several images, so a record would count several times."""
    if isinstance(data, TiledImages):
        raise PrivacyError(
            "images must not be a TiledImages: one stored image gives several records, so epsilon would not cover it; "
            "pass a set of single images"
        )


def refuse_derived(info: Mapping[str, Any], name: str = "images") -> None:
    """Refuse images that were selected or computed from records, such as a coreset, or the rest of a random hold-out.

    Adding a record to the original data can change which images these are, or their labels, so a guarantee for one of
    them does not cover a record.

    Args:
        info: `info` of the set. Selections, condensations and repetitions of this library set the entry `derived`,
            readers of folders `classes`, and hold-outs `hold_out`.
        name: name of the set in the error message.

    Raises:
        PrivacyError: the set is derived, its classes come from a listing of folders, or other records were held out by
            position.
    """
    if method := info.get("derived"):
        raise PrivacyError(
            f"{name} must be records, but they were made from other records ({method}): one record may change many of "
            "them, so no guarantee would cover it. Pass the original records. If the images are public, or themselves "
            "the records to protect, say so by data.replace(info={...}) without the entry 'derived'"
        )
    if any(_mentions(info, "classes", found) for found in (FOUND_CLASSES, FOUND_LABELS)):
        raise PrivacyError(
            f"the classes of {name} must be declared: they come from the folders or labels that exist, so one picture "
            "could add a class and publish its name. Use load_folder(path, classes=[...], hold_out='content'), "
            "load_table(..., classes=[...], hold_out='content') or as_set(..., class_names=[...])"
        )
    if _mentions(info, "hold_out", "random"):
        raise PrivacyError(
            f"{name} are what a hold-out by position has left (info['hold_out'] is 'random'), so one record more or "
            "less changes which other records are used. Hold out each record by its own content: "
            "load_folder(path, classes=[...], hold_out='content'), split_by(..., hold_out='content') or, in a study, "
            "Task(..., hold_out='content'); or hold out nothing: test_fraction=0"
        )


def refuse_lost_guarantee(info: Mapping[str, Any], name: str) -> None:
    """Refuse a set as a public input if its `info` says that it has no guarantee, so that it may show private records.

    Args:
        info: `info` of the set.
        name: name of the set in the error message.

    Raises:
        PrivacyError: `info["epsilon"]` is None.
    """
    if "epsilon" in info and info["epsilon"] is None:
        raise PrivacyError(
            f"{name} must be public, but its info says that no guarantee holds for it: {info.get('reason')}. Pass a "
            "set with a guarantee; if it is public after all, say so by data.replace(info={})"
        )


def _mentions(info: object, name: str, value: str) -> bool:
    """Return whether an entry of `info`, or of the `info` of a source in it, has this value."""
    if isinstance(info, Mapping):
        return info.get(name) == value or any(_mentions(one, name, value) for one in info.values())
    return isinstance(info, list | tuple) and any(_mentions(one, name, value) for one in info)


def refuse_measured_normalization(normalization: Normalization, component: str = "a private component") -> None:
    """Refuse a normalization that was measured on images that were not declared public.

    Args:
        normalization: normalization of the private set.
        component: name of the component in the error message.

    Raises:
        PrivateStatistics: the mean and standard deviation were measured, or a whitening was fitted, on images that were
            not declared public.
    """
    if normalization.measured and normalization != IDENTITY:
        what = "mean and std were measured" if normalization.zca is None else "whitening was fitted"
        raise PrivateStatistics(
            f"the set's {what} on images, and every release of {component} shows them. Use public constants, for "
            "instance data.renormalize(Normalization((0.5,), (0.5,))). If those images are public, declare it: "
            "Normalization.of(images, public=True) or Normalization(..., measured=False)"
        )


def open_account(ledger: Ledger | Account | None, delta: float) -> Account:
    """Return the account that a call charges. If no ledger is given, create a ledger in memory.

    A new ledger gets the remark that it covers this call alone.

    Args:
        ledger: ledger or account to charge, or None for a new ledger.
        delta: delta of the call, which must equal the delta of a given ledger.

    Raises:
        ValueError: `delta` differs from the delta of the given ledger.
    """
    if ledger is None:
        ledger = Ledger(delta=delta)
        ledger.add_remark(NEW_LEDGER_REMARK)
    account = Account.of(ledger)
    if account.ledger.delta != delta:
        raise ValueError(
            f"delta must equal the ledger's, {account.ledger.delta:g}, got {delta:g}: one epsilon refers to one delta. "
            f"Pass delta={account.ledger.delta:g}, or create a ledger with delta={delta:g}"
        )
    return account


def remark_start(ledger: Ledger, init: str | LabeledImages) -> None:
    """State in a ledger that a call starts from a set with a guarantee, for which another ledger may have paid."""
    epsilon = init.info.get("epsilon") if isinstance(init, LabeledImages) else None
    if isinstance(epsilon, int | float):
        ledger.add_remark(
            f"a call started from a set of epsilon {epsilon:g}, which counts in addition unless this ledger was "
            "charged for it"
        )


def initial_images(
    init: str | LabeledImages,
    real: RealImages,
    *,
    ipc: int,
    generator: torch.Generator,
    parametrize: Tiles | None = None,
) -> tuple[Tensor, str]:
    """Return the initial images of a set that will be released, after checking that no image is private.

    Args:
        init: `"noise"`, which draws each value from N(0, 1); or a *public* set with the same image shape and
            normalization. The set has `ipc` images per class, or `ipc * factor ** 2` if `parametrize` is
            `Tiles(factor)`.
        real: private set. Its images are compared with those of `init`, and are never copied. Epsilon does not cover
            the error that is raised if two images are equal, so do not publish this error.
        ipc: number of images per class.
        generator: generator of the noise.
        parametrize: parametrization of the images, such as `Tiles(factor)`, or None. With tiles, the result consists of
            stored images, each of which is decoded to `factor ** 2` images. The stored images are noise, or those of a
            public `TiledImages` with the same factor. The images of any other public set are shrunk to tiles.

    Returns:
        Images [K * ipc, C, H, W] of the K classes, sorted by class, and the name of the initialization for the set's
        `info`.

    Raises:
        PrivacyError: `init` is a set that has lost its guarantee. The error is `PrivateInitialization` if `init` is a
            string other than `"noise"`, such as `"real"`, or a set that contains a private image.
    """
    check.positive_int(ipc, "ipc")
    tiles = Tiles.require(parametrize) or Tiles(1)
    tiles.require_shape(real.shape)
    like = real._empty
    if isinstance(init, str):
        if init != "noise":
            raise PrivateInitialization(
                f"init={init!r} would put private data into the release itself, which no later noise can undo; use "
                "init='noise', or a public set of images"
            )
        shape = (real.num_classes * ipc, *real.shape)
        return torch.randn(shape, generator=generator, dtype=like.images.dtype).to(like.images.device), init
    if not isinstance(init, LabeledImages):
        raise TypeError(f"init must be 'noise' or a public LabeledImages, got {type(init).__name__}")
    like.require_compatible(init)
    refuse_lost_guarantee(init.info, "init")
    if init.labels.ndim != 1 or init.counts().tolist() != [ipc * tiles.count] * real.num_classes:
        count = ipc * tiles.count
        raise ValueError(f"init must hold {count} images of each of {real.num_classes} classes, and class indices")
    start = init.images[init.labels.argsort(stable=True)].to(like.images)
    stored = start
    if isinstance(init, TiledImages) and init.tiles == parametrize:
        groups = init.labels.view(-1, tiles.count)
        if bool((groups != groups[:, :1]).any()):
            raise ValueError("init must have images of a single class in each stored image, got mixed classes")
        stored = init.stored[groups[:, 0].argsort(stable=True)].to(like.images)
    elif parametrize is not None:
        stored = tiles.encode(start)
    parts = [real.images] if isinstance(real, LabeledImages) else map(real._take, torch.arange(len(real)).split(_PART))
    for part in parts:
        records = active_records().joined([part])
        equal = any(bool((part == image).flatten(1).all(1).any()) for image in torch.cat([start, stored]))
        if equal or records.share(init.images) or records.contain(start) or records.contain(stored):
            raise PrivateInitialization("init holds an image of the private set; use init='noise', or a public set")
    return stored, "public set"


def refuse_half_precision(values: Tensor, name: str) -> None:
    """Refuse values in half precision, whose rounding errors can be larger than the clip norm of private training.

    Args:
        values: images or a parameter to check.
        name: name of the values in the error message.

    Raises:
        PrivacyError: the values are neither float32 nor float64.
    """
    if values.dtype not in (torch.float32, torch.float64):
        raise PrivacyError(
            f"{name} is {values.dtype}: its rounding error can exceed the clip. Private training needs float32 or "
            "float64; convert model and images, for instance with .float()"
        )


def refuse_large_delta(size: float, delta: float) -> None:
    """Refuse a delta so large that even publishing one randomly chosen record would satisfy the definition of privacy.

    Args:
        size: *public* number of records; 0 skips the check.
        delta: target delta, which must be below 1 / size.

    Raises:
        NotAccountable: delta is at least 1 / size.
    """
    if size and delta >= 1 / size:
        raise NotAccountable(
            f"delta must be below one over the number of records (1/{size:g}), got {delta:g}: at that delta even "
            "publishing a random record passes"
        )
