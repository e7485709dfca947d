"""Reader of datasets that are already assigned to clients, with two `.npy` files per client and split."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from distillkit._utils import check
from distillkit._utils.pixels import AnyPath, Size, to_pixels
from distillkit.data._assembly import SplitBuilder
from distillkit.data.split import Split
from distillkit.normalization import Normalization

__all__ = ["load_client_arrays"]


def load_client_arrays(
    path: AnyPath,
    *,
    classes: Sequence[str] | None = None,
    size: Size | None = None,
    channels: int | None = None,
    normalization: Normalization | None = None,
) -> Split:
    """Load images that are already assigned to clients, from `train/client0_images.npy` and so on.

    This is the layout of FedLGD's `CIFAR-10-C/preprocessed` (Huang et al., TMLR 2024; 57 clients). It is also a simple
    layout for your own clients.

    Args:
        path: the folder. For each client i = 0, 1, ... without gaps, it contains `train/client{i}_images.npy`, uint8
            [n, H, W, C] with 1 or 3 channels, and `train/client{i}_labels.npy`, int [n]. The folder `test` contains
            files of the same names with the test images and labels.
        classes: the class names in label order. Default: "0", "1", ... up to the largest label.
        size: height and width in pixels; see `load_folder`. FedLGD uses 28.
        channels: number of channels, 1 or 3; see `load_folder`.
        normalization: normalization of the sets. Default: mean and standard deviation measured on the training split.
            FedLGD uses none (`distillkit.normalization.IDENTITY`).

    Returns:
        A `Split` whose `users` are `client0`, `client1`, ... The column `user`, int64 [N], contains indices into
        `users`. `partition.by_domain(split.train.columns["user"])` gives the image indices of each client.

    Raises:
        FileNotFoundError: files are missing.
        ValueError: a file is damaged or has another layout, or pictures have different shapes.
    """
    folder = check.path(path, "path")
    found = {part: _client_numbers(folder / part) for part in ("train", "test")}
    total = max((number + 1 for numbers in found.values() for number in numbers), default=1)
    wanted = [f"{part}/client{i}_{kind}.npy" for part in found for i in range(total) for kind in ("images", "labels")]
    if missing := [name for name in wanted if not (folder / name).is_file()]:
        more = f" and {len(missing) - 8} more" if len(missing) > 8 else ""
        raise FileNotFoundError(
            f"{folder} lacks {', '.join(missing[:8])}{more}; expected train/client{{i}}_images.npy, "
            "train/client{i}_labels.npy and the same below test, for i = 0, 1, ..."
        )
    pixels: dict[str, Tensor] = {}
    labels: dict[str, Tensor] = {}
    owners: dict[str, dict[str, Tensor]] = {}
    for part in found:
        pairs = [_read_client(folder / part / f"client{i}") for i in range(total)]
        shapes = [tuple(images.shape[3 if size else 1 :]) for images, _ in pairs]
        if other := [i for i, shape in enumerate(shapes) if shape != shapes[0]]:
            raise ValueError(
                f"{folder / part}: client0's pictures are {list(shapes[0])}, client{other[0]}'s "
                f"{list(shapes[other[0]])}; give size= if heights and widths differ, and store all pictures as grey or "
                "all as colour"
            )
        pixels[part] = torch.cat(
            [to_pixels(torch.from_numpy(images).permute(0, 3, 1, 2), size, channels) for images, _ in pairs]
        )
        labels[part] = torch.from_numpy(np.concatenate([own for _, own in pairs]).astype(np.int64))
        counts = torch.tensor([len(own) for _, own in pairs])
        owners[part] = {"user": torch.arange(total).repeat_interleave(counts)}
    total_classes = max(check.classes_of(own, f"labels of {folder}") for own in labels.values())
    names = [str(k) for k in range(total_classes)] if classes is None else check.sequence(classes, "classes", "names")
    info = {"dataset": folder.resolve().name}
    users = [f"client{i}" for i in range(total)]
    return SplitBuilder(labels, names, normalization, info, classes is not None, owners, users).build(pixels)


def _client_numbers(folder: Path) -> list[int]:
    """Return the client index in the name of each file in the folder. A client with two files occurs twice."""
    names = [entry.name for entry in folder.iterdir()] if folder.is_dir() else []
    found = [re.fullmatch(r"client(\d+)_(images|labels)\.npy", name) for name in names]
    return [int(match[1]) for match in found if match]


def _read_client(stem: Path) -> tuple[NDArray[Any], NDArray[Any]]:
    """Read a client's pictures and labels from `<stem>_images.npy` and `<stem>_labels.npy`."""
    arrays = []
    for kind in ("images", "labels"):
        file = stem.with_name(f"{stem.name}_{kind}.npy")
        try:
            arrays.append(np.load(file, allow_pickle=False))
        except (ValueError, OSError, EOFError) as error:
            raise ValueError(f"{file} is damaged or not a .npy of plain numbers: {error}") from error
    images, labels = arrays
    if images.dtype != np.uint8 or images.ndim != 4 or images.shape[3] not in (1, 3) or 0 in images.shape[1:]:
        raise ValueError(
            f"{stem}_images.npy must hold uint8 pictures [n, H, W, C], C 1 or 3, "
            f"got {images.dtype} {list(images.shape)}"
        )
    if not np.issubdtype(labels.dtype, np.integer) or labels.shape != images.shape[:1]:
        raise ValueError(
            f"{stem}_labels.npy must hold {len(images)} integers, one per picture, got {labels.dtype} "
            f"{list(labels.shape)}"
        )
    return images, labels
