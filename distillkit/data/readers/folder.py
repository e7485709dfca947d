"""Reader of folders of pictures, with one sub-folder per class."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from distillkit._utils.pixels import AnyPath, Size
from distillkit.data._hold_out import HoldOut
from distillkit.data.readers._folder_layout import SUFFIXES, list_folder
from distillkit.data.readers._picture_list import load_pictures, open_pictures
from distillkit.data.split import Split, StoredSplit, warn_of_repeats
from distillkit.normalization import Normalization

__all__ = ["SUFFIXES"]


def load_folder(
    path: AnyPath,
    *,
    size: Size | None = None,
    channels: int | None = None,
    normalization: Normalization | None = None,
    test_fraction: float = 0.2,
    hold_out: HoldOut = "random",
    classes: Sequence[str] | None = None,
    background: float | None = None,
    progress: bool = True,
) -> Split:
    """Load your own pictures from class folders (`class/picture.png`), which may be in `train` and `test` folders.

    Args:
        path: the folder. Its sub-folders are the classes, in alphabetical order; they may contain further folders. If
            there is a sub-folder `train` with sub-folders of its own, `train`, `test` and `val` are the splits, and
            each contains class folders. The names `training`, `testing`, `valid` and `validation` are accepted too, in
            upper or lower case.
        size: height and width in pixels of every picture, or one number for square pictures. Resizing is bilinear with
            antialiasing and ignores the aspect ratio. Required if the pictures differ in size.
        channels: 1 to convert RGB to gray, or 3 to repeat gray as RGB. Required if only some pictures are gray.
            Pictures in 16-bit gray are not reduced to 8 bits. Pictures are turned as their EXIF orientation states.
        normalization: normalization of the sets. Default: mean and standard deviation measured on the training split.
        test_fraction: share of each class that becomes the test set if there is no folder `test`, in [0, 1). Every call
            makes the same random choice. 0 gives an empty test set.
        hold_out: choice of this test set. "random": an even share of each class, so one picture more or less changes
            the choice for others. "content": a keyed hash of its pixels decides for each picture, so equal pictures go
            together, and a class may have no test picture. Differentially private functions require "content".
        classes: names of the class folders, in label order; a folder may be missing or empty. Default: the folders that
            exist. Differentially private functions require names, because one picture could add a folder.
        background: gray value in [0, 1] behind transparent pixels: 1 for white, 0 for black. Required if pictures have
            transparent pixels.
        progress: whether to show a progress bar.

    Files and folders whose names begin with a dot are ignored. Files that are not pictures are skipped and counted in
    `info`. Folders beside the splits are skipped, listed in `info` and reported by a warning. Warnings also report
    pictures beside the class folders, links to folders, classes that are too small for `test_fraction`, and equal
    pictures in two classes, or in `train` and another part.

    Raises:
        FileNotFoundError: the folder does not exist, it has no classes, a class has no pictures, or a link is broken.
        ValueError: the folder was written by `LabeledImages.export`; read it with `LabeledImages.load`. A picture
            cannot be read, a picture is transparent and `background` is None, or the pictures differ
            in size or channels or do not fit in memory. A class occurs only in `test` or `val`, `test` has no class
            folders or no pictures, a folder is not in `classes`, there is a `test` but no `train`, or two folders are
            the same split (such as `val` and `valid`). `test_fraction` is so small that no class has a test picture.
            The sub-folders are probably not classes: all of them have names of splits, a table beside them probably
            contains the labels, or there is only one sub-folder, and its pictures are in further sub-folders.
    """
    own: dict[str, Any] = {"test_fraction": test_fraction, "hold_out": hold_out, "background": background}
    form: dict[str, Any] = {"size": size, "channels": channels, "normalization": normalization}
    return warn_of_repeats(load_pictures(list_folder, path, progress=progress, declared=classes, **form, **own))


def open_folder(
    path: AnyPath,
    *,
    size: Size | None = None,
    channels: int | None = None,
    normalization: Normalization | None = None,
    test_fraction: float = 0.2,
    hold_out: HoldOut = "random",
    classes: Sequence[str] | None = None,
    background: float | None = None,
    cache: AnyPath | None = None,
    workers: int | None = None,
    progress: bool = True,
) -> StoredSplit:
    """Open a folder of pictures that do not fit in memory, like `load_folder`, but read pictures only when needed.

    The first call decodes and resizes every picture, and writes it to a cache, with one byte per value. Later calls
    reuse the cache. If the first call is interrupted, the next one continues it. If a picture file has been added,
    removed, renamed or written since, a new cache replaces the old one.

    The pictures, their order and the splits are the same as with `load_folder`. The pixels are equal to those of
    `load_folder` for 8-bit pictures that already have the requested size and channels. Other pixels differ by up to
    1/510, because the cache rounds them to bytes. The normalization is measured on the rounded pixels.

    Args:
        path, size, channels, normalization, test_fraction, hold_out, classes, background, progress: as in
            `load_folder`.
        cache: folder for the cache, which takes N x C x H x W bytes, for example 3 GB for 20,000 RGB pictures of
            224x224. Default: the folder in the environment variable `DISTILLKIT_CACHE` or, if it is not set, the folder
            `<path>.cache` beside the pictures; a warning is given when this default folder is written. The folder of
            the pictures and a complete cache may be read-only.
        workers: number of decoding threads. Default: the number of cores of this process.

    Raises:
        FileNotFoundError, ValueError: for the same reasons as in `load_folder`.
        OSError: the cache cannot be written, for example because the disk is full.
        distillkit.locking.InUse: another process has been writing this cache for a day.
    """
    own: dict[str, Any] = {"test_fraction": test_fraction, "hold_out": hold_out, "background": background}
    form: dict[str, Any] = {"size": size, "channels": channels, "normalization": normalization}
    where: dict[str, Any] = {"cache": cache, "workers": workers, "progress": progress}
    return warn_of_repeats(open_pictures(list_folder, path, declared=classes, **form, **where, **own))
