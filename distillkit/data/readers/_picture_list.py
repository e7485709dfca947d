"""List of a dataset's picture files with labels and owners, and functions to load or open the list."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from distillkit.data._assembly import SplitBuilder
from distillkit.data._cache import files_key, fill_in_threads, open_cache
from distillkit.data._hold_out import hold_out_classes
from distillkit.data._pixels import AnyPath, Size, height_and_width, to_bytes
from distillkit.data.readers._picture_decoding import read_picture, read_pictures, require_same_shape
from distillkit.data.split import Split, StoredSplit
from distillkit.normalization import Normalization

__all__ = [
    "PictureList",
    "open_picture_list",
    "read_picture_list",
    "require_files",
    "require_pictures",
    "user_picture_list",
]


@dataclass(frozen=True)
class PictureList:
    """List of a dataset's picture files, which are not decoded yet.

    Attributes:
        files: picture files of each part ("train", "test" and perhaps "validation"), in reading order.
        labels: labels of each part: class indices int64 [N] or rows float [N, K].
        classes: class names, in label order.
        info: origin of the data, stored in the `info` of every set.
        columns: further columns of each part.
        users: names of the users; the column `user` is an index into them.
        open_with: name of the function that opens these pictures without loading them.
    """

    files: dict[str, list[Path]]
    labels: dict[str, Tensor]
    classes: tuple[str, ...]
    info: dict[str, Any]
    columns: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    users: tuple[str, ...] = ()
    open_with: str = "open_dataset"


def read_picture_list(
    listing: PictureList,
    size: Size | None = None,
    channels: int | None = None,
    normalization: Normalization | None = None,
    progress: bool = True,
    test_fraction: float = 0.0,
    background: float | None = None,
) -> Split:
    """Read all pictures of a listing into memory.

    Args:
        listing: the pictures.
        size, channels, normalization, progress: see `load_folder`.
        test_fraction: share of each class held out for testing, if the listing has no `test`.
        background: see `load_folder`.

    Raises:
        ValueError: an unreadable picture, pictures with different shapes, or more pictures than fit in memory.
    """
    pixels = read_pictures(listing.files, size, channels, background, open_with=listing.open_with, progress=progress)
    pixels, builder = _with_test(listing, pixels, normalization, test_fraction)
    return builder.build(pixels)


def open_picture_list(
    listing: PictureList,
    path: Path,
    size: Size | None = None,
    channels: int | None = None,
    normalization: Normalization | None = None,
    cache: AnyPath | None = None,
    workers: int | None = None,
    progress: bool = True,
    test_fraction: float = 0.0,
    background: float | None = None,
) -> StoredSplit:
    """Open all pictures of a listing through a cache.

    Args:
        listing: the pictures.
        path: the folder that contains the pictures. The cache is named after this folder.
        size, channels, normalization, cache, workers, progress: see `open_folder`.
        test_fraction, background: see `read_picture_list`.

    Raises:
        ValueError, OSError, distillkit.locking.InUse: see `open_folder`.
    """
    files = [file for part in listing.files.values() for file in part]
    first = listing.files["train"][0]
    c, h, w = read_picture(first, size, channels, background).shape

    def picture(row: int) -> Tensor:
        decoded = read_picture(files[row], size, channels, background)
        return to_bytes(require_same_shape(decoded, files[row], first, (c, h, w)))

    key = files_key((os.path.relpath(file, path), file.stat()) for file in files)
    fill, options = fill_in_threads(picture, workers), f"{height_and_width(size)} {channels}"
    options += "" if background is None else f" {background}"
    opened = open_cache(path, key, len(files), (c, h, w), fill, options=options, folder=cache, progress=progress)
    rows = dict(zip(listing.files, torch.arange(len(files)).split([len(part) for part in listing.files.values()])))
    rows, builder = _with_test(listing, rows, normalization, test_fraction)
    return builder.build_stored(opened, rows)


def _with_test(
    listing: PictureList, parts: dict[str, Tensor], normalization: Normalization | None, fraction: float
) -> tuple[dict[str, Tensor], SplitBuilder]:
    """Return `parts` and the builder of a listing, with a test set held out of `train` if it has none."""
    parts, labels, columns, info = dict(parts), dict(listing.labels), dict(listing.columns), dict(listing.info)
    if "test" not in parts:
        info["test_fraction"] = fraction
        kept, held_out = hold_out_classes(labels["train"], listing.classes, fraction)
        for table in (parts, labels):
            table["train"], table["test"] = table["train"][kept], table["train"][held_out]
        own = columns.get("train", {})
        columns["train"], columns["test"] = ({name: c[rows] for name, c in own.items()} for rows in (kept, held_out))
    return parts, SplitBuilder(labels, listing.classes, normalization, info, columns=columns, users=listing.users)


def require_files(folder: Path, names: list[str], dataset: str, source: str) -> None:
    """Refuse a folder that lacks files or folders.

    Args:
        folder: folder that must contain the files.
        names: required paths below `folder`.
        dataset: name of the dataset, used in the error message.
        source: where to get the dataset, used in the error message.

    Raises:
        FileNotFoundError: files are missing. The message names at most five of them.
    """
    if missing := [name for name in names if not (folder / name).exists()]:
        more = f" and {len(missing) - 5} more" if len(missing) > 5 else ""
        raise FileNotFoundError(
            f"{dataset} is not complete in {folder}: missing {', '.join(missing[:5])}{more}; {source}"
        )


def require_pictures(folder: Path, names: dict[str, list[str]], source: str) -> dict[str, list[Path]]:
    """Return the picture files of each part, and check that all exist.

    Args:
        folder: the folder of the pictures.
        names: file names of the pictures of each part.
        source: where to get the pictures, used in the error message.

    Raises:
        FileNotFoundError: files are missing. The message gives the number of missing files and names one of them.
    """
    existing = set(os.listdir(folder)) if folder.is_dir() else set()
    if missing := [name for own in names.values() for name in own if name not in existing]:
        raise FileNotFoundError(f"{folder} lacks {len(missing)} pictures, such as {missing[0]}; {source}")
    return {part: [folder / name for name in own] for part, own in names.items()}


def user_picture_list(
    dataset: str,
    files: dict[str, list[Path]],
    labels: dict[str, Tensor],
    classes: Sequence[str],
    owners: dict[str, list[str]],
    users: list[str],
) -> PictureList:
    """Return the listing of a dataset whose pictures belong to users, with the column `user`.

    Args:
        dataset: name of the dataset, for example "leaf-celeba" if `open_leaf_celeba` opens it.
        files, labels, classes: see `PictureList`.
        owners: for each part, the name of each picture's user.
        users: names of all users, in the order of the indices in the column `user`.
    """
    number = {user: i for i, user in enumerate(users)}
    columns = {part: {"user": torch.tensor([number[u] for u in own]).long()} for part, own in owners.items()}
    opener = f"open_{dataset.replace('-', '_')}"
    return PictureList(files, labels, tuple(classes), {"dataset": dataset}, columns, tuple(users), opener)
