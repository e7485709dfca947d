"""List of the picture files of a dataset, with labels and users, and functions to load or open these pictures."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from distillkit._utils import check
from distillkit._utils.pixels import AnyPath, Size, height_and_width, to_bytes
from distillkit.data._assembly import SplitBuilder
from distillkit.data._cache import CacheWriter, files_key, fill_in_threads, open_cache
from distillkit.data._hold_out import HOLD_OUTS, HoldOut, hold_out_classes, hold_out_content, record_digests
from distillkit.data.readers._picture_decoding import (
    Problems,
    read_picture,
    read_pictures,
    require_readable,
    require_same_shape,
)
from distillkit.data.split import Split, StoredSplit
from distillkit.normalization import Normalization
from distillkit.sets._validation import class_of_rows


@dataclass(frozen=True)
class PictureList:
    """List of the picture files of a dataset, with their labels. The pictures are not read yet.

    Attributes:
        files: picture files of each part ("train", "test" and possibly "validation").
        labels: labels of each part: class indices, int64 [N], or multi-label rows, float [N, K].
        classes: class names, in label order.
        info: description of the data's origin, which is stored in the `info` of every set.
        columns: further columns of each part by name, such as `user`.
        users: names of the users. The column `user` contains indices into this tuple.
        open_with: name of the function that opens these pictures without loading them, for error messages.
        problems: what is known to be wrong with the files.
        key: text that distinguishes lists of pictures in the same folder.
    """

    files: dict[str, list[Path]]
    labels: dict[str, Tensor]
    classes: tuple[str, ...]
    info: dict[str, Any]
    columns: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    users: tuple[str, ...] = ()
    open_with: str = "open_dataset"
    problems: Problems = field(default_factory=dict)
    key: str = ""

    def require_readable(self, path: Path, size: Size | None, channels: int | None, *, progress: bool) -> None:
        """Refuse pictures and folders with all that is wrong with them, before any picture is decoded."""
        files = [file for part in self.files.values() for file in part]
        require_readable(str(path), files, size, channels, self.problems, progress=progress)


def load_pictures(
    list_pictures: Callable[..., PictureList],
    path: AnyPath,
    *,
    size: Size | None = None,
    channels: int | None = None,
    normalization: Normalization | None = None,
    progress: bool = True,
    test_fraction: float = 0.0,
    background: float | None = None,
    hold_out: HoldOut = "random",
    **options: Any,
) -> Split:
    """Read all pictures of a dataset into memory.

    Args:
        list_pictures: function of the folder and `options` that lists the pictures.
        path: the folder of the dataset.
        size, channels, normalization, progress: as in `load_folder`.
        test_fraction: share of each class that becomes the test set, if the list has no part `test`.
        background: gray value behind transparent pixels, as in `load_folder`.
        hold_out: choice of the test set, as in `load_folder`.
        options: further arguments of `list_pictures`.

    Raises:
        ValueError: a picture cannot be read, the pictures have different shapes, or they do not fit in memory.
    """
    path = _checked(path, test_fraction, background, hold_out)
    listing = list_pictures(path, **options)
    listing.require_readable(path, size, channels, progress=progress)
    pixels = read_pictures(listing.files, size, channels, background, open_with=listing.open_with, progress=progress)
    digests = record_digests(to_bytes(pixels["train"])) if hold_out == "content" else None
    pixels, builder = _with_test(listing, pixels, normalization, test_fraction, digests)
    return builder.build(pixels)


def open_pictures(
    list_pictures: Callable[..., PictureList],
    path: AnyPath,
    *,
    size: Size | None = None,
    channels: int | None = None,
    normalization: Normalization | None = None,
    cache: AnyPath | None = None,
    workers: int | None = None,
    progress: bool = True,
    test_fraction: float = 0.0,
    background: float | None = None,
    hold_out: HoldOut = "random",
    **options: Any,
) -> StoredSplit:
    """Open a dataset of pictures, whose sets read images from a cache on disk. The cache is named after the folder.

    Args:
        list_pictures, path, test_fraction, background, options: as in `load_pictures`.
        size, channels, normalization, cache, workers, progress, hold_out: as in `open_folder`.

    Raises:
        ValueError, OSError, distillkit.locking.InUse: for the same reasons as in `open_folder`.
    """
    path = _checked(path, test_fraction, background, hold_out)
    listing = list_pictures(path, **options)
    files = [file for part in listing.files.values() for file in part]
    first = files[0] if files else path
    try:
        if listing.problems:
            raise ValueError("some are missing")
        c, h, w = read_picture(first, size, channels, background).shape
    except ValueError:
        listing.require_readable(path, size, channels, progress=progress)  # names all that is wrong
        raise

    def picture(row: int) -> Tensor:
        decoded = read_picture(files[row], size, channels, background)
        return to_bytes(require_same_shape(decoded, files[row], first, (c, h, w)))

    key = files_key((os.path.relpath(file, path), file.stat()) for file in files)

    def fill(cache: CacheWriter, done: Callable[[int], object]) -> None:
        listing.require_readable(path, size, channels, progress=progress)
        fill_in_threads(cache, done, picture, workers)

    wanted = f"{height_and_width(size)} {channels}" + ("" if background is None else f" {background}") + listing.key
    opened = open_cache(path, key, len(files), (c, h, w), fill, options=wanted, folder=cache, progress=progress)
    rows = dict(zip(listing.files, torch.arange(len(files)).split([len(part) for part in listing.files.values()])))
    digests = [d.tobytes() for d in opened.file.digests[rows["train"]].numpy()] if hold_out == "content" else None
    rows, builder = _with_test(listing, rows, normalization, test_fraction, digests)
    return builder.build_stored(opened, rows)


def _checked(path: AnyPath, test_fraction: float, background: float | None, hold_out: str) -> Path:
    check.real_number(test_fraction, "test_fraction", least=0.0, below=1.0)
    if background is not None:
        check.real_number(background, "background", least=0.0, most=1.0)
    check.one_of(hold_out, "hold_out", HOLD_OUTS)
    return check.path(path, "path")


def _with_test(
    listing: PictureList,
    parts: dict[str, Tensor],
    normalization: Normalization | None,
    fraction: float,
    digests: list[bytes] | None,
) -> tuple[dict[str, Tensor], SplitBuilder]:
    """Hold out a test set if the list has none, and return the parts and a `SplitBuilder` for them."""
    parts, labels, columns, info = dict(parts), dict(listing.labels), dict(listing.columns), dict(listing.info)
    if "test" not in parts:
        info["test_fraction"] = fraction
        if digests is None:
            kept, held_out = hold_out_classes(class_of_rows(labels["train"], {}), listing.classes, fraction)
        else:
            kept, held_out = hold_out_content(digests, fraction, "test")
        info |= {} if not fraction else {"hold_out": "random" if digests is None else "content"}
        for table in (parts, labels):
            table["train"], table["test"] = table["train"][kept], table["train"][held_out]
        own = columns.get("train", {})
        columns["train"], columns["test"] = ({name: c[rows] for name, c in own.items()} for rows in (kept, held_out))
    given = "classes" not in info
    builder = SplitBuilder(labels, listing.classes, normalization, info, given, columns, users=listing.users)
    return parts, builder


def require_files(folder: Path, names: list[str], dataset: str, source: str) -> None:
    """Refuse a dataset folder in which required files or folders are missing.

    Args:
        folder: folder that must contain the files.
        names: required paths below `folder`.
        dataset: name of the dataset, for the error message.
        source: where to get the dataset, for the error message.

    Raises:
        FileNotFoundError: files are missing. The message lists at most five of them.
    """
    if missing := [name for name in names if not (folder / name).exists()]:
        more = f" and {len(missing) - 5} more" if len(missing) > 5 else ""
        raise FileNotFoundError(
            f"{dataset} is not complete in {folder}: missing {', '.join(missing[:5])}{more}; {source}"
        )


def require_pictures(folder: Path, names: dict[str, list[str]], source: str) -> dict[str, list[Path]]:
    """Return the picture files of each part of a split, and check that all exist.

    Args:
        folder: the folder of the pictures.
        names: file names of the pictures of each part ("train", "test" and possibly "validation").
        source: where to get the pictures, for the error message.

    Raises:
        FileNotFoundError: files are missing. The message states how many, and gives one as an example.
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
    """Return the `PictureList` of a dataset whose pictures belong to users, with the column `user`.

    Args:
        dataset: name of the dataset.
        files, labels: picture files and labels of each part, as in `PictureList`.
        classes: class names, in label order.
        owners: for each part ("train", "test" and possibly "validation"), the name of the user to whom each picture
            belongs.
        users: names of all users. The column `user` contains indices into this list.
    """
    number = {user: i for i, user in enumerate(users)}
    columns = {part: {"user": torch.tensor([number[u] for u in own])} for part, own in owners.items()}
    return PictureList(files, labels, tuple(classes), {"dataset": dataset}, columns, tuple(users))
