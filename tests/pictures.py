"""Picture files for tests, and the bytes of images."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from torch import Tensor

__all__ = ["bytes_of", "class_folder", "npz_arrays", "picture", "save"]

Array = np.ndarray[Any, Any]


def picture(seed: int, *shape: int) -> Array:
    """Return noise, uint8 [H, W] or [H, W, 3]."""
    return np.random.default_rng(seed).integers(0, 256, shape or (6, 6, 3), dtype=np.uint8)


def save(path: Path, array: Array) -> Array:
    """Write a picture without loss, whatever the ending of its file; return it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(array).save(path, format=None if path.suffix.lower() == ".tiff" else "PNG")
    return array


def class_folder(path: Path, classes: Any = ("cat", "dog"), each: int = 5, shift: int = 0, shape: Any = ()) -> Path:
    """Write a folder of pictures for each class."""
    for k, name in enumerate(classes):
        for i in range(each):
            save(path / name / f"{i}.png", picture(shift + 100 * k + i, *shape))
    return path


def npz_arrays(shape: Any = (5, 3), dtype: Any = np.uint8, train: int = 6, val: bool = False) -> dict[str, Array]:
    """Return pictures and labels of three classes in MedMNIST's layout."""
    found: dict[str, Array] = {}
    for seed, (part, n) in enumerate((("train", train), ("test", 4), *([("val", 2)] if val else []))):
        images = picture(seed, n, *shape)
        found[f"{part}_images"] = images if dtype == np.uint8 else (images / 255).astype(dtype)
        found[f"{part}_labels"] = (np.arange(n)[:, None] % 3).astype(np.uint8)
    return found


def bytes_of(images: Tensor) -> Array:
    """Return pixels in [0, 1] as uint8 [N, H, W, C]."""
    return (images * 255).round().byte().permute(0, 2, 3, 1).numpy()
