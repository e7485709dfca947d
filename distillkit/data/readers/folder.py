"""Folders of your own pictures, with one sub-folder per class."""

from __future__ import annotations

from pathlib import Path

from distillkit._utils import check
from distillkit.data._pixels import AnyPath, Size
from distillkit.data.readers._folder_layout import SUFFIXES, list_folder
from distillkit.data.readers._picture_list import open_picture_list, read_picture_list
from distillkit.data.split import Split, StoredSplit
from distillkit.normalization import Normalization

__all__ = ["SUFFIXES", "load_folder", "open_folder"]


def load_folder(
    path: AnyPath,
    *,
    size: Size | None = None,
    channels: int | None = None,
    normalization: Normalization | None = None,
    test_fraction: float = 0.2,
    background: float | None = None,
    progress: bool = True,
) -> Split:
    """Load your own pictures from folders such as `class/picture.png`, or `train/class/picture.png` and so on.

    Args:
        path: the folder. Its sub-folders are the classes, in alphabetical order, and may be nested. If a sub-folder
            `train` has sub-folders itself, `train`, `test` and `val` are the splits. `training`, `testing`, `valid` and
            `validation` are accepted too, in upper or lower case.
        size: height and width in pixels of every picture, or one number for square pictures. Resizing is bilinear with
            antialiasing and ignores the aspect ratio. Required if the pictures differ in size.
        channels: 1 (luma) or 3 (gray repeated). Required if only some pictures are gray. 16-bit gray keeps its
            depth.
        normalization: normalization of the sets. Default: mean and standard deviation measured on the training split.
        test_fraction: share of each class that becomes the test set if there is no `test`, in [0, 1). Every call makes
            the same random choice. 0 gives an empty test set.
        background: gray value in [0, 1] behind transparent pixels: 1 for white, 0 for black. Required if pictures have
            such pixels.
        progress: whether to show a progress bar.

    Names that begin with a dot are ignored. Other files are skipped and counted in `info`; folders beside the splits
    are skipped, named in `info` and reported by a warning. Warnings also report pictures beside the class folders,
    links to folders, and classes too small for `test_fraction`.

    Raises:
        FileNotFoundError: there is no such folder, it has no classes, a class has no pictures, or a link is broken.
        ValueError: a picture is unreadable, pictures are transparent and there is no `background`, pictures differ in
            size or channels or do not fit in memory, a class occurs only in `test` or `val`, `test` has no class
            folders or pictures, there is a `test` but no `train`, there are two folders for one split,
            `test_fraction` is less than one picture of every class, or the folders are probably not classes: the
            only one holds its pictures in sub-folders, or all are named like splits.
    """
    test_fraction = check.real_number(test_fraction, "test_fraction", least=0.0, below=1.0)
    background = None if background is None else check.real_number(background, "background", least=0.0, most=1.0)
    listing = list_folder(Path(path).expanduser())
    return read_picture_list(listing, size, channels, normalization, progress, test_fraction, background)


def open_folder(
    path: AnyPath,
    *,
    size: Size | None = None,
    channels: int | None = None,
    normalization: Normalization | None = None,
    test_fraction: float = 0.2,
    background: float | None = None,
    cache: AnyPath | None = None,
    workers: int | None = None,
    progress: bool = True,
) -> StoredSplit:
    """Open a folder of pictures that do not fit in memory, like `load_folder`, but read pictures only when needed.

    The first call decodes and resizes every picture once, into a cache of one byte per value. Later calls reuse it. An
    interrupted call is resumed. If a file has been added, removed, renamed or written since, a new cache replaces the
    old one.

    Pixels, order and splits are the same as with `load_folder`. Pixels are exactly equal for 8-bit pictures that
    already have the requested size and channels. Otherwise they differ by up to 1/510, because resized pictures are
    rounded to bytes. The normalization is measured on the rounded pixels.

    Args:
        path, size, channels, normalization, test_fraction, background, progress: see `load_folder`.
        cache: folder for the cache of N x C x H x W bytes: 3 GB for 20,000 RGB pictures of 224 pixels. Default: the
            environment variable `DISTILLKIT_CACHE`, else `<path>.cache` beside the folder, with a warning when it is
            written. The pictures and a complete cache may be read-only.
        workers: number of decoding threads. Default: the number of cores of this process.

    Raises:
        FileNotFoundError, ValueError: see `load_folder`.
        OSError: the cache cannot be written, or the disk is full.
        distillkit.locking.InUse: another process has been writing this cache for a day.
    """
    test_fraction = check.real_number(test_fraction, "test_fraction", least=0.0, below=1.0)
    background = None if background is None else check.real_number(background, "background", least=0.0, most=1.0)
    path = Path(path).expanduser()
    listing = list_folder(path)
    return open_picture_list(
        listing, path, size, channels, normalization, cache, workers, progress, test_fraction, background
    )
