"""The user's own arrays: an `.npz` in MedMNIST's layout."""

from __future__ import annotations

import os
import zipfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from distillkit.data.readers.folder import Size
from distillkit.data.split import Split, assemble, to_pixels
from distillkit.normalization import Normalization

__all__ = ["classes_of", "damage_named", "images_of", "labels_of", "load_npz", "opened_npz", "parts_in"]

_PARTS = {"train": "train", "test": "test", "val": "validation"}


def load_npz(
    path: str | os.PathLike[str],
    *,
    size: Size | None = None,
    channels: int | None = None,
    normalization: Normalization | None = None,
    classes: tuple[str, ...] | None = None,
) -> Split:
    """Load your own arrays from an `.npz` in MedMNIST's layout: `train_images`, `train_labels`, `test_images`, ...

    It may have `val_images` and `val_labels` too.

    Args:
        path: the file. Images are [N, H, W] or [N, H, W, C], C in {1, 3}, uint8 in 0..255 or float in [0, 1]; labels
            are integers [N] or [N, 1] (class indices) or [N, K] (multi-label rows, which become float).
        size: height and width in pixels; see `load_folder`.
        channels: 1 or 3; see `load_folder`.
        normalization: default the mean and standard deviation measured on the training split.
        classes: their names. Default: "0", "1", ... up to the largest label in the file; the sets then remember that
            their class count was derived from labels (see `LabeledImages`).

    Raises:
        FileNotFoundError: no such file.
        ValueError: not an `.npz`, an array that is missing, or one of the wrong shape, type or range.
    """
    path = Path(path).expanduser()
    with opened_npz(path) as file:
        arrays = {key: file[key] for key in file.files}
    names = parts_in(path, list(arrays))
    pixels = {part: to_pixels(images_of(arrays[f"{n}_images"], n), size, channels) for part, n in names.items()}
    labels = {part: labels_of(arrays[f"{n}_labels"], n, len(pixels[part])) for part, n in names.items()}
    classes, given = classes_of(path, labels, classes)
    return assemble(pixels, labels, classes, normalization, {"dataset": path.stem}, classes_given=given)


@contextmanager
def opened_npz(path: Path) -> Iterator[Any]:
    """NumPy's view of an `.npz`, closed at the end of the block, even if it is no zip.

    Args:
        path: of the file.

    Raises:
        FileNotFoundError: no such file.
        ValueError: not an `.npz`, or it turns out to be damaged in the block.
    """
    if not path.is_file():
        raise FileNotFoundError(f"no file {path}; want an .npz with train_images, train_labels, test_images, ...")
    with damage_named(path), path.open("rb") as stream, np.load(stream, allow_pickle=False) as file:
        yield file


@contextmanager
def damage_named(path: Path) -> Iterator[None]:
    """What reading an `.npz` raises when it is none, as an error that names it.

    Args:
        path: of the file.

    Raises:
        ValueError: the block met a damaged file, or one of another kind.
    """
    try:
        yield
    except (ValueError, OSError, EOFError, zipfile.BadZipFile, zlib.error, AttributeError, TypeError) as error:
        raise ValueError(f"{path} is damaged or not an .npz of plain arrays: {error}") from error


def parts_in(path: Path, keys: Sequence[str]) -> dict[str, str]:
    """The parts that an `.npz` has: "train", "test" and perhaps "validation", with what its arrays call each.

    Args:
        path: for the message.
        keys: the arrays' names.

    Raises:
        ValueError: an array is missing.
    """
    wanted = [name for name in _PARTS if name != "val" or "val_images" in keys]
    if missing := [key for name in wanted for key in (f"{name}_images", f"{name}_labels") if key not in keys]:
        raise ValueError(f"{path} lacks {', '.join(missing)}; it holds {', '.join(sorted(keys)) or 'nothing'}")
    return {_PARTS[name]: name for name in wanted}


def classes_of(
    path: Path, labels: Mapping[str, Tensor], classes: tuple[str, ...] | None
) -> tuple[tuple[str, ...], bool]:
    """The classes' names, and whether they are known apart from the labels.

    Args:
        path: for the message.
        labels: by part, as `labels_of` gives them.
        classes: the names, if they were given.

    Raises:
        ValueError: the parts have labels of different kinds.
    """
    if len({found.ndim for found in labels.values()}) > 1:
        raise ValueError(
            f"the splits of {path} have labels of different kinds: class indices and rows; store all as one of them"
        )
    rows = labels["train"].ndim == 2
    if classes is not None:
        return classes, True
    total = labels["train"].shape[1] if rows else 1 + max(int(found.max()) for found in labels.values())
    return tuple(str(k) for k in range(total)), rows


def images_of(array: np.ndarray[Any, Any], name: str) -> Tensor:
    """The images of one part of an `.npz`, as [N, C, H, W].

    Args:
        array: as stored; see `load_npz`.
        name: what its arrays call the part.

    Raises:
        ValueError: another shape, dtype or range.
    """
    if array.ndim == 3:
        array = array[..., None]
    if array.ndim != 4 or array.shape[3] not in (1, 3) or 0 in array.shape:
        raise ValueError(f"{name}_images must be [N, H, W], [N, H, W, 1] or [N, H, W, 3], got {list(array.shape)}")
    if array.dtype != np.uint8 and not np.issubdtype(array.dtype, np.floating):
        raise ValueError(f"{name}_images must be uint8 or float, got {array.dtype}")
    if array.dtype != np.uint8 and not (array.min() >= 0 and array.max() <= 1):
        raise ValueError(f"{name}_images must be in [0, 1] if float, got {array.min():g} to {array.max():g}")
    return torch.from_numpy(array).permute(0, 3, 1, 2)


def labels_of(array: np.ndarray[Any, Any], name: str, count: int) -> Tensor:
    """The labels of one part of an `.npz`: class indices int64 [N], or rows float [N, K].

    Args:
        array: as stored; see `load_npz`.
        name: what its arrays call the part.
        count: how many images the part has.

    Raises:
        ValueError: another shape, dtype or number.
    """
    if array.ndim not in (1, 2) or len(array) != count or not np.issubdtype(array.dtype, np.integer):
        raise ValueError(
            f"{name}_labels must be {count} integers [N] or [N, 1], or rows [N, K], got {array.dtype} "
            f"{list(array.shape)}"
        )
    labels = torch.from_numpy(array.astype(np.int64))
    if labels.ndim == 2 and labels.shape[1] > 1:
        return labels.float()
    return labels.flatten()
