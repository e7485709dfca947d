"""The user's own images: a folder of pictures, or an `.npz` of arrays."""

from __future__ import annotations

import os
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from distillkit import check
from distillkit.data.layout import survey
from distillkit.data.split import Split, assemble, hold_out, to_pixels
from distillkit.normalization import Normalization
from distillkit.plausible import warn
from distillkit.progress import Bar, bar

__all__ = ["Size", "held_out", "like_first", "load_folder", "load_npz", "read_picture"]

_PARTS = {"train": "train", "test": "test", "val": "validation"}

Size = int | tuple[int, int]


def load_folder(
    path: str | os.PathLike[str],
    *,
    size: Size | None = None,
    channels: int | None = None,
    normalization: Normalization | None = None,
    test_fraction: float = 0.2,
    progress: bool = True,
) -> Split:
    """Load your own pictures from folders: `class/picture.png`, or the same below `train`, `test` and `val`.

    Args:
        path: the folder. Its sub-folders are the classes, in alphabetical order; pictures may lie deeper. Where a
            sub-folder `train` has sub-folders itself, `train`, `test` and `val` are the splits; `training`, `testing`,
            `valid` and `validation` mean the same, in any case of letters.
        size: height and width in pixels (one number: square) that every picture is resized to, bilinear with
            antialiasing, aspect ratio ignored. Needed if the pictures differ in size.
        channels: 1 (luma) or 3 (grey repeated). Needed if some pictures are grey and some are not. Transparency is
            dropped; 16-bit grey keeps its depth.
        normalization: default the mean and standard deviation measured on the training split.
        test_fraction: where there is no `test`, the part of each class that is held back as the test set, in [0, 1):
            a fixed random choice, the same in every call. 0 gives an empty test set.
        progress: whether long reading shows a bar.

    Names that begin with a dot are not looked at. Files that are no pictures, and folders beside the splits, are not
    read; `info` counts the former and names the latter, of which a warning tells as well; so it does of pictures beside
    the class folders, of links to folders, and of classes too small for `test_fraction`.

    Raises:
        FileNotFoundError: no such folder, no classes, a class without pictures, or a link to nothing.
        ValueError: a picture that cannot be read (it is named), differing sizes or channels, a class that only
            `test` or `val` has, a `test` without class folders or pictures, a `test` without `train`, two folders for
            one split, or a `test_fraction` that is less than a picture of every class.
    """
    path = Path(path).expanduser()
    test_fraction = check.real_number(test_fraction, "test_fraction", least=0.0, most=1 - 1e-9)
    found = survey(path)
    first = found.files["train"][0]
    shape = read_picture(first, size, channels).shape
    with bar(sum(map(len, found.files.values())), "reading pictures", unit="picture", progress=progress) as b:
        pixels = {part: _read_all(files, size, channels, first, shape, b) for part, files in found.files.items()}
    labels, info = dict(found.labels), dict(found.info)
    if "test" not in pixels:
        info["test_fraction"] = test_fraction
        kept, held = held_out(labels["train"], found.classes, test_fraction)
        for table in (pixels, labels):
            table["train"], table["test"] = table["train"][kept], table["train"][held]
    return assemble(pixels, labels, found.classes, normalization, info)


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
    if not path.is_file():
        raise FileNotFoundError(f"no file {path}; want an .npz with train_images, train_labels, test_images, ...")
    try:
        with path.open("rb") as stream, np.load(stream, allow_pickle=False) as file:  # closed, even if it is no zip
            arrays = {key: file[key] for key in file.files}
    except (ValueError, OSError, EOFError, zipfile.BadZipFile, AttributeError, TypeError) as error:
        raise ValueError(f"{path} is damaged or not an .npz of plain arrays: {error}") from error
    wanted = [name for name in _PARTS if name != "val" or "val_images" in arrays]
    if missing := [key for name in wanted for key in (f"{name}_images", f"{name}_labels") if key not in arrays]:
        raise ValueError(f"{path} lacks {', '.join(missing)}; it holds {', '.join(sorted(arrays)) or 'nothing'}")
    pixels = {_PARTS[name]: to_pixels(_images(arrays, name), size, channels) for name in wanted}
    labels = {_PARTS[name]: _labels(arrays, name) for name in wanted}
    if len({found.ndim for found in labels.values()}) > 1:
        raise ValueError(
            f"the splits of {path} have labels of different kinds: class indices and rows; store all as one of them"
        )
    given = classes is not None
    if classes is None:
        rows = labels["train"].ndim == 2
        total = labels["train"].shape[1] if rows else 1 + max(int(found.max()) for found in labels.values())
        classes = tuple(str(k) for k in range(total))
    given = given or labels["train"].ndim == 2
    return assemble(pixels, labels, classes, normalization, {"dataset": path.stem}, classes_given=given)


def held_out(labels: Tensor, classes: Sequence[str], fraction: float) -> tuple[Tensor, Tensor]:
    """Hold a part of every class back, and say which classes are so small that it is not one picture.

    Args:
        labels: class indices int [N].
        classes: their names.
        fraction: see `load_folder`.

    Returns:
        Indices (kept, held back), see `hold_out`.

    Raises:
        ValueError: not one picture of any class.
    """
    kept, held = hold_out(labels, fraction)
    if not fraction:
        return kept, held
    tested = labels[held].unique().tolist()
    if not tested:
        raise ValueError(
            f"test_fraction={fraction:g} holds back not one picture of classes of at most "
            f"{int(labels.bincount().max())}; give a larger one, a test folder, or test_fraction=0 for no test set"
        )
    if untested := [name for label, name in enumerate(classes) if label not in tested]:
        warn(
            f"test_fraction={fraction:g} holds back no picture of {len(untested)} of {len(classes)} classes, which "
            f"will not be tested: {', '.join(untested[:5])}"
        )
    return kept, held


def _read_all(
    files: list[Path], size: Size | None, channels: int | None, first: Path, shape: torch.Size, shown: Bar
) -> Tensor:
    pixels = torch.empty(len(files), *shape)
    for file, out in zip(files, pixels):
        out.copy_(like_first(read_picture(file, size, channels), file, first, shape))
        shown.update()
    return pixels


def like_first(picture: Tensor, file: Path, first: Path, shape: Sequence[int]) -> Tensor:
    """The picture, if it has the first one's shape.

    Args:
        picture: pixels [C, H, W].
        file, first: where it and the first one are from.
        shape: (C, H, W) of the first one.

    Raises:
        ValueError: with both shapes, and the option that makes them alike.
    """
    if tuple(picture.shape) == tuple(shape):
        return picture
    remedy = "channels=1 or channels=3" if picture.shape[0] != shape[0] else "size=, for example size=32"
    raise ValueError(
        f"pictures differ: {first} is {list(shape)} (C, H, W), {file} is {list(picture.shape)}; give {remedy}"
    )


def read_picture(file: Path, size: Size | None, channels: int | None) -> Tensor:
    """One picture as float pixels [C, H, W] in [0, 1].

    Args:
        file: of the picture.
        size, channels: what it is brought to; see `load_folder`.

    Raises:
        ValueError: it cannot be read; it is named.
    """
    from PIL import Image

    try:
        with Image.open(file) as picture:
            if picture.mode.startswith("I;16"):
                array = np.asarray(picture).astype(np.float32)[..., None] / 65535
            elif picture.mode in ("I", "F"):
                raise ValueError(
                    f"32-bit pixels (mode {picture.mode}) have no defined range; save the picture with 8 or 16 bits"
                )
            else:
                array = np.array(picture.convert("L" if picture.mode in ("1", "L", "LA") else "RGB"))
    except Exception as error:
        raise ValueError(f"cannot read picture {file}: {error or type(error).__name__}") from error
    tensor = torch.from_numpy(array).reshape(*array.shape[:2], -1).permute(2, 0, 1)
    return to_pixels(tensor[None], size, channels)[0]


def _images(arrays: dict[str, np.ndarray[Any, Any]], name: str) -> Tensor:
    array = arrays[f"{name}_images"]
    if array.ndim == 3:
        array = array[..., None]
    if array.ndim != 4 or array.shape[3] not in (1, 3) or 0 in array.shape:
        raise ValueError(f"{name}_images must be [N, H, W], [N, H, W, 1] or [N, H, W, 3], got {list(array.shape)}")
    if array.dtype != np.uint8 and not np.issubdtype(array.dtype, np.floating):
        raise ValueError(f"{name}_images must be uint8 or float, got {array.dtype}")
    if array.dtype != np.uint8 and not (array.min() >= 0 and array.max() <= 1):
        raise ValueError(f"{name}_images must be in [0, 1] if float, got {array.min():g} to {array.max():g}")
    return torch.from_numpy(array).permute(0, 3, 1, 2)


def _labels(arrays: dict[str, np.ndarray[Any, Any]], name: str) -> Tensor:
    array, count = arrays[f"{name}_labels"], len(arrays[f"{name}_images"])
    if array.ndim not in (1, 2) or len(array) != count or not np.issubdtype(array.dtype, np.integer):
        raise ValueError(
            f"{name}_labels must be {count} integers [N] or [N, 1], or rows [N, K], got {array.dtype} "
            f"{list(array.shape)}"
        )
    labels = torch.from_numpy(array.astype(np.int64))
    if labels.ndim == 2 and labels.shape[1] > 1:
        return labels.float()
    return labels.flatten()
