"""Reader of the datasets that torchvision can read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from distillkit.data._assembly import assemble_raw
from distillkit.data.readers.npz import load_npz
from distillkit.data.split import Split
from distillkit.normalization import Normalization

CIFAR10_CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
CIFAR10_NORMALIZATION = Normalization([0.4914, 0.4822, 0.4465], [0.2470, 0.2435, 0.2616])
"""Mean and standard deviation of CIFAR-10's training pixels."""
CIFAR10_FILES = tuple(
    f"cifar-10-batches-py/{name}" for name in (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch", "batches.meta")
)
CIFAR100_FILES = tuple(f"cifar-100-python/{name}" for name in ("train", "test", "meta"))
SVHN_FILES = ("SVHN/train_32x32.mat", "SVHN/test_32x32.mat")
USPS_FILES = ("USPS/usps.bz2", "USPS/usps.t.bz2")
_TRAIN_FLAG = ({"train": True}, {"train": False})


def idx_files(folder: str) -> tuple[str, ...]:
    """Return the paths of the four files of a dataset in MNIST's format."""
    kinds = ("images-idx3-ubyte", "labels-idx1-ubyte")
    return tuple(f"{folder}/raw/{part}-{kind}" for part in ("train", "t10k") for kind in kinds)


def load_torchvision(
    root: Path,
    *,
    name: str,
    loader: str,
    files: tuple[str, ...],
    folder: str = "",
    split_options: tuple[dict[str, Any], dict[str, Any]] = _TRAIN_FLAG,
    labels: str = "targets",
    classes: tuple[str, ...] | None = None,
    download: bool = False,
    **options: Any,
) -> Split:
    """Load a dataset of torchvision from its files or, if these are missing, from `<name>.npz` in MedMNIST's layout."""
    missing = [file for file in files if not (root / file).is_file()]
    stored = root / f"{name}.npz"
    if missing and stored.is_file():
        return load_npz(stored, classes=classes, **options)
    if missing and not download:
        command = f"from distillkit.data import load; load({name!r}, root={str(root)!r}, download=True)"
        raise FileNotFoundError(
            f"{name} is not complete in {root}: missing {', '.join(missing)}. Get it with\n"
            f'    python -c "{command}"\n'
            f"or give the root of your copy, with these files or a {name}.npz (see load_npz), with root= or "
            "DISTILLKIT_DATA."
        )
    from torchvision import datasets

    raw: dict[str, tuple[Tensor, Tensor]] = {}
    for part, split in zip(("train", "test"), split_options):
        try:
            data = getattr(datasets, loader)(str(root / folder), download=bool(missing), **split)
        except Exception as error:
            if missing:
                raise
            raise ValueError(
                f"{name} in {root} cannot be read ({', '.join(files)}): {str(error) or type(error).__name__}; "
                "delete the files and get them again"
            ) from error
        raw[part] = _as_images(data.data), torch.as_tensor(getattr(data, labels))
    return assemble_raw(raw, classes or tuple(data.classes), name, **options)


def _as_images(data: Tensor | np.ndarray[Any, Any]) -> Tensor:
    """Convert images as torchvision stores them, [N, H, W], [N, H, W, 3] or [N, 3, H, W] (SVHN), to [N, C, H, W]."""
    images = torch.as_tensor(data)
    if images.ndim == 3:
        return images[:, None]
    return images if images.shape[1] == 3 else images.permute(0, 3, 1, 2)
