"""The user's own images when they are too many for memory: read a part at a time, from a cache that is made once."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from distillkit._utils import check
from distillkit.data._cache import Cache, as_bytes, in_threads, listing_key, measured, open_cache
from distillkit.data.readers.folder import Size, held_out, like_first, read_picture
from distillkit.data.readers.folder_layout import Listing, survey
from distillkit.data.split import sides
from distillkit.normalization import Normalization
from distillkit.sets import StoredImages

__all__ = ["StoredSplit", "open_folder", "open_listing", "stored"]

AnyPath = str | os.PathLike[str]


@dataclass(frozen=True)
class StoredSplit:
    """One dataset in a file, as `open_folder` and `open_npz` return it; unpacks as `train, test`.

    Attributes:
        train: the training set.
        test: the test set, in the same normalisation.
        classes: the names of the classes, in label order.
        validation: the validation set, where the source has one.
        users: the names of the people whose images these are; see `Split`.
    """

    train: StoredImages
    test: StoredImages
    classes: tuple[str, ...]
    validation: StoredImages | None = None
    users: tuple[str, ...] = ()

    def __iter__(self) -> Iterator[StoredImages]:
        yield self.train
        yield self.test


def open_folder(
    path: AnyPath,
    *,
    size: Size | None = None,
    channels: int | None = None,
    normalization: Normalization | None = None,
    test_fraction: float = 0.2,
    cache: AnyPath | None = None,
    workers: int | None = None,
    progress: bool = True,
) -> StoredSplit:
    """Open a folder of more, or larger, pictures than memory holds as floats: `load_folder`, but read when needed.

    The first call decodes and resizes every picture once, into a cache of one byte a value, and takes its time; a
    later one finds it, and takes as long as looking at the files. A killed call is gone on with; a folder that has
    changed since (a file came, went, moved, or has another size or time) gets a new cache in place of the old one.

    What is read is what `load_folder` gives, in the same order and the same splits: bit for bit, for pictures of 8 bits
    that already have the size and channels wanted; otherwise every pixel within 1/510, the rounding to bytes. The
    normalisation is measured on the rounded pixels.

    Args:
        path, size, channels, normalization, test_fraction, progress: see `load_folder`.
        cache: a folder for the cache, of N x C x H x W bytes: 3 GB for 20,000 RGB pictures of 224 pixels. Default: the
            environment variable `DISTILLKIT_CACHE`, else `<path>.cache` beside the folder, of which a warning tells
            when it is written. A cache that is there may be read-only, as the pictures may always be.
        workers: threads that decode. Default: as many as this process has cores.

    Raises:
        FileNotFoundError, ValueError: see `load_folder`.
        OSError: the cache cannot be written, or there is no room for it.
        distillkit.locking.InUse: another process has been making this cache for a day.
    """
    path = Path(path).expanduser()
    test_fraction = check.real_number(test_fraction, "test_fraction", least=0.0, below=1.0)
    options: dict[str, Any] = {"cache": cache, "workers": workers, "progress": progress}
    return open_listing(survey(path), path, size, channels, normalization, test_fraction=test_fraction, **options)


def open_listing(
    listing: Listing,
    path: Path,
    size: Size | None,
    channels: int | None,
    normalization: Normalization | None,
    *,
    cache: AnyPath | None,
    workers: int | None,
    progress: bool,
    test_fraction: float = 0.0,
) -> StoredSplit:
    """Open all pictures of a listing: `read_listing`, but read when needed.

    Args:
        listing: what to open.
        path: the folder that its files are below, which the cache is named after.
        size, channels, normalization, cache, workers, progress: see `open_folder`.
        test_fraction: of each class, where the listing has no `test`.

    Raises:
        ValueError, OSError, distillkit.locking.InUse: see `open_folder`.
    """
    files = [file for part in listing.files.values() for file in part]
    first = listing.files["train"][0]
    c, h, w = read_picture(first, size, channels).shape

    def picture(row: int) -> Tensor:
        return as_bytes(like_first(read_picture(files[row], size, channels), files[row], first, (c, h, w)))

    key = listing_key((os.path.relpath(file, path), file.stat()) for file in files)
    fill, asked = in_threads(picture, workers), f"{sides(size)} {channels}"
    opened = open_cache(path, key, len(files), (c, h, w), fill, asked=asked, folder=cache, progress=progress)
    rows = dict(zip(listing.files, torch.arange(len(files)).split([len(part) for part in listing.files.values()])))
    labels, info, columns = dict(listing.labels), dict(listing.info), dict(listing.columns)
    if "test" not in rows:
        info["test_fraction"] = test_fraction
        kept, held = held_out(labels["train"], listing.classes, test_fraction)
        for table in (rows, labels):
            table["train"], table["test"] = table["train"][kept], table["train"][held]
        own = columns.get("train", {})
        columns["train"], columns["test"] = ({name: c[which] for name, c in own.items()} for which in (kept, held))
    return stored(opened, rows, labels, listing.classes, normalization, info, columns=columns, users=listing.users)


def stored(
    cache: Cache,
    rows: Mapping[str, Tensor],
    labels: Mapping[str, Tensor],
    classes: Sequence[str],
    normalization: Normalization | None,
    info: Mapping[str, Any],
    *,
    classes_given: bool = True,
    columns: Mapping[str, Mapping[str, Tensor]] | None = None,
    users: Sequence[str] = (),
) -> StoredSplit:
    """Build a `StoredSplit` on a cache, as `assemble` builds a `Split`.

    Args:
        cache: the pictures of all parts.
        rows: by part, which pictures of the cache it has.
        labels: by part.
        classes: their names, in label order.
        normalization: of all parts; None measures mean and standard deviation on `train`.
        info: what every set says of its origin.
        classes_given: whether the classes are known apart from the labels, as by their names.
        columns: by part, what else belongs to each picture.
        users: what the column `user` counts in.
    """
    normalization = normalization or measured(cache.sums[rows["train"]], cache.file.shape)
    sets = {
        part: StoredImages(
            cache.file,
            which,
            labels[part],
            num_classes=len(classes),
            normalization=normalization,
            columns=(columns or {}).get(part),
            info={**info, "split": part},
            classes_given=classes_given,
        )
        for part, which in rows.items()
    }
    return StoredSplit(sets["train"], sets["test"], tuple(classes), sets.get("validation"), users=tuple(users))
