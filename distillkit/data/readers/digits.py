"""Digits that are no dataset of torchvision's: MNIST-M and SynthDigits, in the layouts in which people have them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from distillkit.data.readers._listing import Listing, pictures_in, read_listing
from distillkit.data.readers.folder import Size
from distillkit.data.readers.npz import load_npz
from distillkit.data.split import Split, assemble, to_pixels
from distillkit.normalization import Normalization

__all__ = ["CLASSES", "READERS"]

CLASSES = tuple("0123456789")
_PARTS = ("train", "test")
_MNISTM_FOLDERS = ("MNIST-M", "mnist_m", "MNISTM")
_GANIN = "http://yaroslav.ganin.net"


def read_mnistm(root: Path, size: Size | None, channels: int | None, normalization: Normalization | None) -> Split:
    """Read MNIST-M (Ganin and Lempitsky, ICML 2015): MNIST's digits, each the difference to a crop of a photo.

    Args:
        root: the data root. In its `MNIST-M`, `mnist_m` or `MNISTM` lies the release (`mnist_m_train/*.png` with
            `mnist_m_train_labels.txt`, a name and a label a line, and the same of `test`); or `mnist_m_train.pt` and
            `mnist_m_test.pt`, perhaps in `processed`, as ports of torchvision's MNIST write them (a pair of images and
            labels); or `mnist_m.npz` in MedMNIST's layout.
        size, channels: see `load`.
        normalization: default measured on the training split.

    Raises:
        FileNotFoundError: none of these is there, or one that is not complete; says what is missing.
        ValueError: a file that is damaged or not of that layout.
    """
    info = {"dataset": "mnistm"}
    for folder in (root / name for name in _MNISTM_FOLDERS):
        if (folder / "mnist_m.npz").is_file():
            split = load_npz(
                folder / "mnist_m.npz", size=size, channels=channels, normalization=normalization, classes=CLASSES
            )
            train, test = (data.replace(info={**data.info, **info}) for data in split)
            return Split(train, test, CLASSES)
        if (folder / "mnist_m_train_labels.txt").is_file():
            listing = _released(folder, info)
            return read_listing(listing, size, channels, normalization, progress=True)
        for place in (folder, folder / "processed"):
            if (place / "mnist_m_train.pt").is_file():
                raw = {part: _ported(place / f"mnist_m_{part}.pt") for part in _PARTS}
                return _assembled(raw, size, channels, normalization, info)
    raise FileNotFoundError(
        f"mnistm is not in {root}: missing MNIST-M/mnist_m_train_labels.txt (with mnist_m_train/*.png, and the same of "
        f"test), MNIST-M/mnist_m_train.pt or MNIST-M/mnist_m.npz. Get it from {_GANIN}, which is not done here, or "
        "load mnistm-like, which is made of MNIST."
    )


def read_synthdigits(root: Path, size: Size | None, channels: int | None, normalization: Normalization | None) -> Split:
    """Read SynthDigits (Ganin and Lempitsky, ICML 2015): digits drawn from the fonts of Windows.

    Args:
        root: the data root, whose `SynthDigits` has `synth_train_32x32.mat` and `synth_test_32x32.mat`, as SVHN's:
            `X`, uint8 [32, 32, 3, N], and `y`, [N, 1], in which 10 may stand for 0.
        size, channels: see `load`.
        normalization: default measured on the training split.

    Raises:
        FileNotFoundError: they are missing.
        ValueError: a file that is damaged or not of that layout.
    """
    folder = root / "SynthDigits"
    files = {part: folder / f"synth_{part}_32x32.mat" for part in _PARTS}
    if missing := [file.name for file in files.values() if not file.is_file()]:
        raise FileNotFoundError(
            f"synthdigits is not complete in {folder}: missing {', '.join(missing)}. Get them from {_GANIN}, which is "
            "not done here, or load synthdigits-like, which needs no files."
        )
    raw = {part: _matlab(file) for part, file in files.items()}
    return _assembled(raw, size, channels, normalization, {"dataset": "synthdigits"})


READERS: dict[str, Callable[[Path, Size | None, int | None, Normalization | None], Split]] = {
    "mnistm": read_mnistm,
    "synthdigits": read_synthdigits,
}
"""By the name that `load` knows."""


def _assembled(
    raw: dict[str, tuple[Tensor, Tensor]],
    size: Size | None,
    channels: int | None,
    normalization: Normalization | None,
    info: dict[str, Any],
) -> Split:
    pixels = {part: to_pixels(images, size, channels) for part, (images, _) in raw.items()}
    return assemble(pixels, {part: labels for part, (_, labels) in raw.items()}, CLASSES, normalization, info)


def _released(folder: Path, info: dict[str, Any]) -> Listing:
    """The pictures that Ganin's `mnist_m.tar.gz` has."""
    names: dict[str, list[str]] = {}
    labels: dict[str, Tensor] = {}
    files: dict[str, list[Path]] = {}
    for part in _PARTS:
        table = folder / f"mnist_m_{part}_labels.txt"
        if not table.is_file():
            raise FileNotFoundError(f"mnistm is not complete in {folder}: missing {table.name}; get it from {_GANIN}")
        lines = [line.split() for line in table.read_text().splitlines() if line.strip()]
        if odd := [line for line in lines if len(line) != 2 or line[1] not in CLASSES]:
            raise ValueError(f"{table} must hold lines of a picture's name and a digit, got {' '.join(odd[0])[:60]!r}")
        if not lines:
            raise ValueError(f"{table} names no pictures; get it from {_GANIN}")
        names[part] = [name for name, _ in lines]
        labels[part] = torch.tensor([int(digit) for _, digit in lines])
        files |= pictures_in(folder / f"mnist_m_{part}", {part: names[part]}, f"get them from {_GANIN}")
    return Listing(files, labels, CLASSES, info)


def _ported(file: Path) -> tuple[Tensor, Tensor]:
    """Images uint8 [N, 3, H, W] and labels of a `.pt` file."""
    if not file.is_file():
        raise FileNotFoundError(f"mnistm is not complete in {file.parent}: missing {file.name}")
    try:
        images, labels = torch.load(file, weights_only=True)  # makes nothing but tensors, whatever the file says
        images, labels = images.detach(), labels.detach().long().flatten()
    except Exception as error:
        raise ValueError(f"{file} is damaged or no pair of tensors (images, labels): {error}") from error
    if images.dtype != torch.uint8 or images.ndim != 4 or len(images) != len(labels):
        raise ValueError(
            f"{file} must hold images uint8 [N, H, W, 3] and a label each, got {images.dtype} {list(images.shape)} and "
            f"{len(labels)} labels"
        )
    return _digits(file, images if images.shape[1] == 3 else images.permute(0, 3, 1, 2), labels)


def _matlab(file: Path) -> tuple[Tensor, Tensor]:
    """Images uint8 [N, 3, H, W] and labels of a `.mat` file as SVHN's."""
    from scipy.io import loadmat

    try:
        held = loadmat(file)
        images, labels = held["X"], np.asarray(held["y"]).reshape(-1)
    except Exception as error:
        raise ValueError(f"{file} is damaged or lacks X or y: {error or type(error).__name__}") from error
    if images.dtype != np.uint8 or images.ndim != 4 or images.shape[2:] != (3, len(labels)):
        raise ValueError(
            f"{file} must hold X, uint8 [H, W, 3, N], and y, N labels, got {images.dtype} {list(images.shape)} and "
            f"{len(labels)} labels"
        )
    digits = torch.from_numpy(labels.astype(np.int64))
    digits[digits == 10] = 0
    return _digits(file, torch.from_numpy(np.ascontiguousarray(images.transpose(3, 2, 0, 1))), digits)


def _digits(file: Path, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """What a file held, if it is colour pictures [N, 3, H, W] of digits."""
    if not len(images) or images.shape[1] != 3 or int(labels.min()) < 0 or int(labels.max()) > 9:
        raise ValueError(f"{file} must hold colour pictures of the digits 0..9, at least one")
    return images, labels
