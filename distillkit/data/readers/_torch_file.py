"""Reader of condensed sets in the `.pt` files that authors of papers release, in several layouts."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

SUFFIXES = (".pt", ".pth")

_IMAGES = ("images", "image", "image_syn", "images_syn", "syn_images", "imgs", "x")
_LABELS = ("labels", "label", "label_syn", "labels_syn", "syn_labels", "targets", "y")
_LAYOUTS = (
    "tensors `images` and `labels`, a list [images, labels], a dictionary whose `data` is a list of such lists, or a "
    "file images*.pt beside a file labels*.pt"
)


@dataclass(frozen=True)
class ReleasedTensors:
    """One condensed set from a file that the authors of a paper released.

    Attributes:
        images: images [N, C, H, W], float or uint8.
        labels: class indices int64 [N], or soft labels float [N, K].
        runs: number of sets that the file contains.
        lr: learning rate for training networks on the set, if the authors' method learned one.
    """

    images: Tensor
    labels: Tensor
    runs: int = 1
    lr: float | None = None


def read_torch_file(path: Path, run: int | None) -> ReleasedTensors:
    """Read a condensed set that the authors of a paper released. Code in the file is not run.

    Args:
        path: a `.pt` or `.pth` file, or a folder with the files `images_best.pt` and `labels_best.pt` of MTT or DATM.
        run: index of the set, if the file contains several: DC, DSA and DM store one per repetition. None reads the
            last set.

    Raises:
        FileNotFoundError: the file, or the file of its labels, does not exist.
        ValueError: the file cannot be read without running code from it, has another layout, or has no set with the
            index `run`.
    """
    path = path / "images_best.pt" if path.is_dir() else path
    content = _load(path)
    if isinstance(content, Tensor):
        beside, lr = _beside(path, ("labels", "label")), _beside(path, ("lr",))
        if beside is None:
            raise FileNotFoundError(
                f"{path} holds images only; expected their labels beside it in {_sibling(path, 'labels').name}"
            )
        return _checked(path, content, _load(beside), 1, _load(lr) if lr else None)
    if isinstance(content, dict) and "data" in content:
        content = content["data"]
    if isinstance(content, dict):
        images, labels = ([content[name] for name in names if name in content] for names in (_IMAGES, _LABELS))
        if not images or not labels:
            raise ValueError(f"{path} holds a dictionary of {', '.join(map(str, content))}; expected {_LAYOUTS}")
        return _checked(path, images[0], labels[0], 1)
    pairs = [content] if _is_pair(content) else content
    if not isinstance(pairs, list | tuple) or not pairs or not all(map(_is_pair, pairs)):
        raise ValueError(f"{path} holds a {type(content).__name__} of another layout; expected {_LAYOUTS}")
    run = len(pairs) - 1 if run is None else run
    if run >= len(pairs):
        raise ValueError(f"run must be in [0, {len(pairs)}), the number of sets in {path}, got {run}")
    images, labels, *rest = pairs[run]
    return _checked(path, images, labels, len(pairs), rest[0] if rest else None)


def _load(path: Path) -> Any:
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist; it should hold a released set")
    scalar = np.float64(0).__reduce__()[0]  # allows NumPy numbers, which often store accuracies beside the images
    known: list[Any] = [
        scalar,
        (scalar, "numpy.core.multiarray.scalar"),
        np.dtype,
        type(np.dtype("f8")),
        type(np.dtype("f4")),
    ]
    try:
        with torch.serialization.safe_globals(known):
            return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise ValueError(
            f"{path} cannot be read as tensors alone: {str(error).splitlines()[0]} If you trust its authors, read it "
            "with torch.load(path, weights_only=False), and pass the tensors to LabeledImages(images, labels, "
            "normalization=...)"
        ) from error


def _is_pair(value: Any) -> bool:
    """Return whether a value is a list [images, labels], optionally followed by a learning rate."""
    if not isinstance(value, list | tuple) or not 2 <= len(value) <= 3:
        return False
    return isinstance(value[0], Tensor) and value[0].ndim == 4 and isinstance(value[1], Tensor)


def _sibling(path: Path, word: str) -> Path:
    return path.with_name(re.sub("images?", word, path.name, count=1))


def _beside(path: Path, words: Sequence[str]) -> Path | None:
    found = (_sibling(path, word) for word in words)
    return next((file for file in found if file != path and file.is_file()), None)


def _checked(path: Path, images: Any, labels: Any, runs: int, lr: Any = None) -> ReleasedTensors:
    if not isinstance(images, Tensor) or images.ndim != 4 or not isinstance(labels, Tensor):
        raise ValueError(f"{path} must hold images [N, C, H, W] and their labels; expected {_LAYOUTS}")
    images, labels = images.detach(), labels.detach()
    if labels.ndim == 2 and labels.shape[1] == 1:
        labels = labels[:, 0]
    if labels.ndim == 1 and not bool((labels % 1).any()):
        labels = labels.long()
    rate = torch.as_tensor(lr).flatten() if isinstance(lr, Tensor | float) else torch.zeros(0)
    return ReleasedTensors(images, labels, runs, float(rate[0]) if len(rate) == 1 else None)
