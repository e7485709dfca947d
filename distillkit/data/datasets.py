"""Datasets by name, as tensors in memory."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from distillkit.data import lookalike_digits
from distillkit.data.readers import digits, medmnist, tiny_imagenet
from distillkit.data.readers._listing import read_listing
from distillkit.data.readers.npz import load_npz
from distillkit.data.split import Split, assemble, hold_out, to_pixels
from distillkit.normalization import IDENTITY, Normalization

__all__ = ["CIFAR10", "NAMES", "key_of", "load", "root_of"]

_DIGITS = tuple("0123456789")
_CIFAR10 = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
_FASHION = ("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot")


@dataclass(frozen=True)
class _Source:
    """One of torchvision's datasets: its class, its folder below the data root, its files there, its statistics."""

    loader: str
    folder: str
    files: tuple[str, ...]
    normalization: Normalization
    classes: tuple[str, ...] = ()


def _idx(folder: str, normalization: Normalization, classes: tuple[str, ...]) -> _Source:
    kinds = ("images-idx3-ubyte", "labels-idx1-ubyte")
    files = tuple(f"{folder}/raw/{part}-{kind}" for part in ("train", "t10k") for kind in kinds)
    return _Source(folder, "", files, normalization, classes)


_SOURCES = {
    "mnist": _idx("MNIST", Normalization([0.1307], [0.3081]), _DIGITS),
    "fashionmnist": _idx("FashionMNIST", Normalization([0.2860], [0.3530]), _FASHION),
    "usps": _Source("USPS", "USPS", ("usps.bz2", "usps.t.bz2"), Normalization([0.2539], [0.3842]), _DIGITS),
    "svhn": _Source(
        "SVHN",
        "SVHN",
        ("train_32x32.mat", "test_32x32.mat"),
        Normalization([0.4377, 0.4438, 0.4728], [0.1980, 0.2010, 0.1970]),
        _DIGITS,
    ),
    "cifar10": _Source(
        "CIFAR10",
        "",
        tuple(
            f"cifar-10-batches-py/{name}"
            for name in (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch", "batches.meta")
        ),
        Normalization([0.4914, 0.4822, 0.4465], [0.2470, 0.2435, 0.2616]),
        _CIFAR10,
    ),
    "cifar100": _Source(
        "CIFAR100",
        "",
        tuple(f"cifar-100-python/{name}" for name in ("train", "test", "meta")),
        Normalization([0.5071, 0.4865, 0.4409], [0.2673, 0.2564, 0.2762]),
    ),
}
CIFAR10 = _SOURCES["cifar10"]
"""For what has CIFAR-10's classes and is to be read in its space."""

NAMES = ("digits", *_SOURCES, *digits.READERS, *lookalike_digits.NAMES, tiny_imagenet.NAME, *medmnist.CLASSES)
"""The names that `load` knows."""

_DIGITS_NORMALIZATION = Normalization([0.3050], [0.3760])


def load(
    name: str,
    *,
    root: str | os.PathLike[str] | None = None,
    size: int | tuple[int, int] | None = None,
    channels: int | None = None,
    normalization: Normalization | None = None,
    download: bool = False,
) -> Split:
    """Load a dataset by name, train and test, as float32 tensors in memory; unpack it as `train, test`.

    Files are those of torchvision, read by its loaders, and MedMNIST's `.npz`, whose `validation` comes too.

    Args:
        name: `digits` (the 1,797 real 8x8 digits inside scikit-learn, no files needed), `mnist`, `fashionmnist`,
            `usps`, `svhn`, `mnistm`, `synthdigits`, `cifar10`, `cifar100`, `tiny-imagenet` or one of MedMNIST's 2D sets
            (`pathmnist`, ...; `pathmnist_64`, `_128` and `_224` are the larger pictures); or what is made here,
            `mnistm-like` (of MNIST's files) and `synthdigits-like` (of none), see `mnist_m_like` and
            `synth_digits_like`. Case, hyphens and underscores do not matter.
        root: the data root: `MNIST/raw`, `FashionMNIST/raw`, `cifar-10-batches-py`, `cifar-100-python`,
            `tiny-imagenet-200` and `pathmnist.npz` lie in it, the files of USPS, SVHN, MNIST-M and SynthDigits in its
            `USPS`, `SVHN`, `MNIST-M` and `SynthDigits`. In place of torchvision's files there may be one in MedMNIST's
            layout, `cifar10.npz` say (see `load_npz`). Default: the environment variable `DISTILLKIT_DATA`.
        size: height and width in pixels (one number: square). Default: as it is. Bilinear with antialiasing.
        channels: 1 (luma) or 3 (grey repeated). Default: as it is; 3 for Tiny-ImageNet, of which some are grey.
        normalization: default the published mean and standard deviation of the training split at its own size, or,
            for RGB turned grey, MNIST-M, SynthDigits, what is made here, Tiny-ImageNet and MedMNIST, measured on the
            training split.
        download: fetch missing files into `root` with torchvision. Nothing is fetched unless this is asked for, and
            nothing of MNIST-M, SynthDigits, Tiny-ImageNet and MedMNIST at all.

    `digits` has no test split of its own: a fixed random fifth of each class (359 images) is held back, the same in
    every call. Of SVHN, `extra` is not used. Tiny-ImageNet's `val` is the test set, as its `test` has no labels; its
    110,000 pictures are 5.4 GB of float32.

    Raises:
        ValueError: unknown name, no root, bad size or channels, or files that cannot be read or fail torchvision's
            checksum.
        FileNotFoundError: files are missing; names them, their folder and the command that gets them, or their source.
    """
    key = key_of(name)
    if file := medmnist.file_of(key):
        return medmnist.read(root_of(root, key) / file, size=size, channels=channels, normalization=normalization)
    if key == tiny_imagenet.NAME:
        listing = tiny_imagenet.list_tiny_imagenet(root_of(root, key) / tiny_imagenet.FOLDER)
        return read_listing(listing, size, channels or 3, normalization, progress=True)
    if reader := digits.READERS.get(key):
        return reader(root_of(root, key), size, channels, normalization)
    if key not in NAMES:
        raise ValueError(
            f"name must be one of {', '.join(NAMES)}, got {str(name)!r}; your own pictures come with "
            "load_folder(path), load_npz(path) or load_domains({name: path, ...})"
        )
    if stored := _stored(key, root):
        own = _SOURCES[key].normalization
        published = own if channels in (None, len(own.mean)) else None
        return load_npz(
            stored, size=size, channels=channels, normalization=normalization or published,
            classes=_SOURCES[key].classes or None,
        )  # fmt: skip
    published = None
    if key in lookalike_digits.NAMES:
        made = _made(key, root, download)
        raw, classes = {part: (data.images, data.labels) for part, data in zip(("train", "test"), made)}, _DIGITS
    elif key == "digits":
        images, labels = _digits()
        kept, held = hold_out(labels, 0.2)
        raw = {"train": (images[kept], labels[kept]), "test": (images[held], labels[held])}
        published, classes = _DIGITS_NORMALIZATION, _DIGITS
    else:
        raw, classes = _torchvision(key, root_of(root, key), download)
        published = _SOURCES[key].normalization
    pixels = {part: to_pixels(images, size, channels) for part, (images, _) in raw.items()}
    if normalization is None and published and len(published.mean) in (1, pixels["train"].shape[1]):
        normalization = published
    info = {"dataset": lookalike_digits.NAMES.get(key, key)}
    return assemble(pixels, {part: labels for part, (_, labels) in raw.items()}, classes, normalization, info)


def _made(key: str, root: str | os.PathLike[str] | None, download: bool) -> Split:
    """One of the sets that are made here, as pixels."""
    if key == "synthdigitslike":
        return lookalike_digits.synth_digits_like(normalization=IDENTITY)
    return lookalike_digits.mnist_m_like(load("mnist", root=root, download=download), normalization=IDENTITY)


def _digits() -> tuple[Tensor, Tensor]:
    from sklearn.datasets import load_digits

    bunch = load_digits()
    return torch.from_numpy(bunch.images).float()[:, None] / 16, torch.from_numpy(bunch.target).long()


def key_of(name: str) -> str:
    """A dataset's name as the tables here have it: case, hyphens and underscores do not matter.

    Args:
        name: as the user wrote it.
    """
    return str(name).lower().replace("-", "").replace("_", "")


def root_of(root: str | os.PathLike[str] | None, name: str) -> Path:
    """The data root: as given, or the environment's.

    Args:
        root: see `load`.
        name: of the dataset, for the message.

    Raises:
        ValueError: neither says it.
    """
    root = root if root is not None else os.environ.get("DISTILLKIT_DATA")
    if not root:
        raise ValueError(f"root must say where {name} is (or is to be put); give root= or set DISTILLKIT_DATA")
    return Path(root).expanduser()


def _stored(key: str, root: str | os.PathLike[str] | None) -> Path | None:
    """The `.npz` in which a dataset of torchvision's lies where its own files do not."""
    if key not in _SOURCES:
        return None
    folder = root_of(root, key)
    stored, own = folder / f"{key}.npz", folder / _SOURCES[key].folder
    return stored if stored.is_file() and not all((own / file).is_file() for file in _SOURCES[key].files) else None


def _torchvision(name: str, root: Path, download: bool) -> tuple[dict[str, tuple[Tensor, Tensor]], tuple[str, ...]]:
    """Images [N, C, H, W] uint8 and labels of train and test, and the names of the classes."""
    from torchvision import datasets

    source = _SOURCES[name]
    folder = root / source.folder
    missing = [file for file in source.files if not (folder / file).is_file()]
    if missing and not download:
        command = f"from distillkit.data import load; load({name!r}, root={str(root)!r}, download=True)"
        raise FileNotFoundError(
            f"{name} is not complete in {folder}: missing {', '.join(missing)}. Get it with\n"
            f'    python -c "{command}"\n'
            f"or give the root of your copy, with these files or a {name}.npz (see load_npz), with root= or "
            "DISTILLKIT_DATA."
        )
    raw: dict[str, tuple[Tensor, Tensor]] = {}
    for part in ("train", "test"):
        which: dict[str, Any] = {"split": part} if name == "svhn" else {"train": part == "train"}
        try:
            data = getattr(datasets, source.loader)(str(folder), download=bool(missing), **which)
        except Exception as error:
            if missing:
                raise
            raise ValueError(
                f"{name} in {folder} cannot be read ({', '.join(source.files)}): {error or type(error).__name__}; "
                "delete the files and get them again"
            ) from error
        raw[part] = _images(data.data), torch.as_tensor(data.labels if name == "svhn" else data.targets).long()
    return raw, source.classes or tuple(data.classes)


def _images(data: Tensor | np.ndarray[Any, Any]) -> Tensor:
    """Torchvision's arrays, [N, H, W], [N, H, W, 3] or SVHN's [N, 3, H, W], as [N, C, H, W]."""
    images = torch.as_tensor(data)
    if images.ndim == 3:
        return images[:, None]
    return images if images.shape[1] == 3 else images.permute(0, 3, 1, 2)
