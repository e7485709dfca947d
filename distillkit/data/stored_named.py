"""Datasets with names that are more than memory holds, read a part at a time."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from distillkit._utils import check
from distillkit.data.datasets import key_of, root_of
from distillkit.data.readers import medmnist, tiny_imagenet
from distillkit.data.readers.celeba import list_celeba, list_leaf_celeba
from distillkit.data.readers.flair import list_flair
from distillkit.data.readers.folder import Size
from distillkit.data.stored_folder import StoredSplit, open_listing
from distillkit.data.stored_npz import open_npz
from distillkit.normalization import Normalization

__all__ = ["open_celeba", "open_dataset", "open_flair", "open_leaf_celeba"]

AnyPath = str | os.PathLike[str]


def open_dataset(
    name: str,
    *,
    root: AnyPath | None = None,
    size: Size | None = None,
    channels: int | None = None,
    normalization: Normalization | None = None,
    cache: AnyPath | None = None,
    workers: int | None = None,
    progress: bool = True,
) -> StoredSplit:
    """Open Tiny-ImageNet or a set of MedMNIST: `load`, but read when needed.

    For `tinyimagenet` (5.4 GB as floats), and for the larger pictures of MedMNIST, as `pathmnist_224` (65 GB).

    Args:
        name: `tinyimagenet` or one of MedMNIST's; see `load`. All else is small: `load(name)`.
        root, size, channels, normalization: see `load`.
        cache, progress: see `open_folder`.
        workers: threads that decode Tiny-ImageNet. Default: as many as this process has cores.

    Raises:
        ValueError: another name, or files that cannot be read.
        FileNotFoundError: files are missing; says where they come from.
        OSError, distillkit.locking.InUse: see `open_folder`.
    """
    key = key_of(name)
    if file := medmnist.file_of(key):
        path = root_of(root, key) / file
        split = open_npz(
            path, size=size, channels=channels, normalization=normalization, classes=medmnist.classes_in(path),
            cache=cache, progress=progress,
        )  # fmt: skip
        medmnist.require_validation(path, split.validation)
        return split
    if key != tiny_imagenet.NAME:
        raise ValueError(
            f"name must be {tiny_imagenet.NAME} or a set of MedMNIST, got {str(name)!r}; the other datasets are small: "
            "load(name)"
        )
    folder = root_of(root, key) / tiny_imagenet.FOLDER
    listing = tiny_imagenet.list_tiny_imagenet(folder)
    options: dict[str, Any] = {"cache": cache, "workers": workers, "progress": progress}
    return open_listing(listing, folder, size, channels or 3, normalization, **options)


def open_flair(
    path: AnyPath,
    *,
    size: Size,
    labels: Literal["coarse", "fine"] = "coarse",
    channels: int = 3,
    normalization: Normalization | None = None,
    cache: AnyPath | None = None,
    workers: int | None = None,
    progress: bool = True,
) -> StoredSplit:
    """Open FLAIR, photos with several labels each, by user: `load_flair`, but read when needed.

    Args:
        path, labels, channels, normalization, progress: see `load_flair`.
        size: height and width in pixels. The cache of all 429,078 photos is 5.3 GB at 64, 84 GB at their own 256.
        cache, workers: see `open_folder`.

    Raises:
        FileNotFoundError, ValueError: see `load_flair`.
        OSError, distillkit.locking.InUse: see `open_folder`.
    """
    folder = Path(path).expanduser()
    listing = list_flair(folder, check.one_of(labels, "labels", ("coarse", "fine")))
    options: dict[str, Any] = {"cache": cache, "workers": workers, "progress": progress}
    return open_listing(listing, folder, size, channels, normalization, **options)


def open_celeba(
    path: AnyPath,
    *,
    attributes: str | Sequence[str] = "Smiling",
    size: Size = 84,
    channels: int | None = None,
    normalization: Normalization | None = None,
    cache: AnyPath | None = None,
    workers: int | None = None,
    progress: bool = True,
) -> StoredSplit:
    """Open CelebA, faces by person: `load_celeba`, but read when needed.

    Args:
        path, attributes, channels, normalization, progress: see `load_celeba`.
        size: height and width in pixels. The cache of all 202,599 faces is 4.3 GB at 84, 31 GB at 224.
        cache, workers: see `open_folder`.

    Raises:
        FileNotFoundError, ValueError: see `load_celeba`.
        OSError, distillkit.locking.InUse: see `open_folder`.
    """
    folder = Path(path).expanduser()
    options: dict[str, Any] = {"cache": cache, "workers": workers, "progress": progress}
    return open_listing(list_celeba(folder, attributes), folder, size, channels, normalization, **options)


def open_leaf_celeba(
    path: AnyPath,
    *,
    images: AnyPath | None = None,
    size: Size = 84,
    channels: int | None = None,
    normalization: Normalization | None = None,
    cache: AnyPath | None = None,
    workers: int | None = None,
    progress: bool = True,
) -> StoredSplit:
    """Open CelebA as LEAF deals it, with the celebrities as clients: `load_leaf_celeba`, but read when needed.

    Args:
        path, images, channels, normalization, progress: see `load_leaf_celeba`.
        size: height and width in pixels; see `open_celeba`.
        cache, workers: see `open_folder`.

    Raises:
        FileNotFoundError, ValueError: see `load_leaf_celeba`.
        OSError, distillkit.locking.InUse: see `open_folder`.
    """
    folder = Path(path).expanduser()
    listing = list_leaf_celeba(folder, images)
    options: dict[str, Any] = {"cache": cache, "workers": workers, "progress": progress}
    return open_listing(listing, folder, size, channels, normalization, **options)
