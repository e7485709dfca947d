"""Readers of MNIST-M and SynthDigits, colour digits of Ganin and Lempitsky (ICML 2015)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from distillkit.data._assembly import assemble_raw
from distillkit.data.readers._picture_list import PictureList, load_pictures, require_pictures
from distillkit.data.readers.npz import load_npz
from distillkit.data.split import Split

_CLASSES = tuple("0123456789")
_PARTS = ("train", "test")
_FOLDERS = ("MNIST-M", "mnist_m", "MNISTM")
_SOURCE = "http://yaroslav.ganin.net"
_INFO = {"dataset": "mnistm"}


def load_mnist_m(root: Path, **options: Any) -> Split:
    """Load MNIST-M (Ganin and Lempitsky, ICML 2015): the digits of MNIST, blended with crops of photos.

    Args:
        root: the data root. Its folder `MNIST-M`, `mnist_m` or `MNISTM` has one of three layouts. (1) The authors'
            release: the pictures `mnist_m_train/*.png`, the file `mnist_m_train_labels.txt` with a picture name and a
            label per line, and the same for `test`. (2) The files `mnist_m_train.pt` and `mnist_m_test.pt`, possibly in
            a folder `processed`. Each contains a pair of tensors: the images, uint8 with four dimensions, and the
            labels. (3) The file `mnist_m.npz` in MedMNIST's layout.
        options: the options `size`, `channels` and `normalization` of `distillkit.data.load`.

    Raises:
        FileNotFoundError: files are missing. The message lists them.
        ValueError: a file is damaged, or has another layout.
    """
    for folder in (root / name for name in _FOLDERS):
        if (folder / "mnist_m.npz").is_file():
            split = load_npz(folder / "mnist_m.npz", classes=_CLASSES, **options)
            train, test = (data.replace(info={**data.info, **_INFO}) for data in split)
            return Split(train, test, _CLASSES)
        if (folder / "mnist_m_train_labels.txt").is_file():
            return load_pictures(_list_release, folder, **options)
        for place in (folder, folder / "processed"):
            if (place / "mnist_m_train.pt").is_file():
                raw = {part: _read_pt(place / f"mnist_m_{part}.pt") for part in _PARTS}
                return assemble_raw(raw, _CLASSES, "mnistm", **options)
    raise FileNotFoundError(
        f"mnistm is not in {root}: missing MNIST-M/mnist_m_train_labels.txt (with mnist_m_train/*.png, and the same "
        f"for test), MNIST-M/mnist_m_train.pt or MNIST-M/mnist_m.npz. Get it from {_SOURCE}, not with download=. Or "
        "load mnistm-like, which is made from MNIST."
    )


def _list_release(folder: Path) -> PictureList:
    """List the pictures of the authors' release `mnist_m.tar.gz`, unpacked into `folder`."""
    labels: dict[str, Tensor] = {}
    files: dict[str, list[Path]] = {}
    for part in _PARTS:
        table = folder / f"mnist_m_{part}_labels.txt"
        if not table.is_file():
            raise FileNotFoundError(f"mnistm is not complete in {folder}: missing {table.name}; get it from {_SOURCE}")
        lines = [line.split() for line in table.read_text(encoding="utf-8").splitlines() if line.strip()]
        if invalid := [line for line in lines if len(line) != 2 or line[1] not in _CLASSES]:
            raise ValueError(
                f"{table} must hold lines of a picture's name and a digit, got {' '.join(invalid[0])[:60]!r}"
            )
        if not lines:
            raise ValueError(f"{table} names no pictures; get it from {_SOURCE}")
        labels[part] = torch.tensor([int(digit) for _, digit in lines])
        names = {part: [name for name, _ in lines]}
        files |= require_pictures(folder / f"mnist_m_{part}", names, f"get them from {_SOURCE}")
    return PictureList(files, labels, _CLASSES, _INFO)


def _read_pt(file: Path) -> tuple[Tensor, Tensor]:
    """Read images uint8 [N, 3, H, W] and labels from a `.pt` file."""
    if not file.is_file():
        raise FileNotFoundError(f"mnistm is not complete in {file.parent}: missing {file.name}")
    try:
        images, labels = torch.load(file, weights_only=True)  # constructs nothing but tensors
        images, labels = images.detach(), labels.detach().long().flatten()
    except Exception as error:
        raise ValueError(f"{file} is damaged or no pair of tensors (images, labels): {error}") from error
    if images.dtype != torch.uint8 or images.ndim != 4 or len(images) != len(labels):
        raise ValueError(
            f"{file} must hold images uint8 [N, H, W, 3] and a label for each, got {images.dtype} "
            f"{list(images.shape)} and {len(labels)} labels"
        )
    return _colour_digits(file, images if images.shape[1] == 3 else images.permute(0, 3, 1, 2), labels)


def load_synth_digits(root: Path, **options: Any) -> Split:
    """Load SynthDigits (Ganin and Lempitsky, ICML 2015).

    Args:
        root: the data root. Its folder `SynthDigits` contains `synth_train_32x32.mat` and `synth_test_32x32.mat`. As in
            SVHN, each file has the images `X`, uint8 [32, 32, 3, N], and the labels `y`, [N, 1], in which the digit 0
            may be labeled 10.
        options: the options `size`, `channels` and `normalization` of `distillkit.data.load`.

    Raises:
        FileNotFoundError: files are missing.
        ValueError: a file is damaged, or has another layout.
    """
    folder = root / "SynthDigits"
    files = {part: folder / f"synth_{part}_32x32.mat" for part in _PARTS}
    if missing := [file.name for file in files.values() if not file.is_file()]:
        raise FileNotFoundError(
            f"synthdigits is not complete in {folder}: missing {', '.join(missing)}. Get them from {_SOURCE}, not "
            "with download=. Or load synthdigits-like, which needs no files."
        )
    raw = {part: _read_mat(file) for part, file in files.items()}
    return assemble_raw(raw, _CLASSES, "synthdigits", **options)


def _read_mat(file: Path) -> tuple[Tensor, Tensor]:
    """Read images uint8 [N, 3, H, W] and labels from a `.mat` file in SVHN's layout."""
    from scipy.io import loadmat

    try:
        content = loadmat(file)
        images, labels = content["X"], np.asarray(content["y"]).reshape(-1)
    except Exception as error:
        raise ValueError(f"{file} is damaged or lacks X or y: {str(error) or type(error).__name__}") from error
    if images.dtype != np.uint8 or images.ndim != 4 or images.shape[2:] != (3, len(labels)):
        raise ValueError(
            f"{file} must hold X, uint8 [H, W, 3, N], and y, N labels, got {images.dtype} {list(images.shape)} and "
            f"{len(labels)} labels"
        )
    digits = torch.from_numpy(labels.astype(np.int64))
    digits[digits == 10] = 0
    return _colour_digits(file, torch.from_numpy(np.ascontiguousarray(images.transpose(3, 2, 0, 1))), digits)


def _colour_digits(file: Path, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Check that the content of a file is color images [N, 3, H, W] of digits, and return images and labels."""
    if not len(images) or images.shape[1] != 3 or int(labels.min()) < 0 or int(labels.max()) > 9:
        raise ValueError(f"{file} must hold colour pictures of the digits 0..9, at least one")
    return images, labels
