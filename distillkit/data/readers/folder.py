"""The user's own images: a folder of pictures."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from distillkit._sanity_checks import warn
from distillkit._utils import check
from distillkit._utils.conversion import format_bytes
from distillkit._utils.progress import Bar, bar
from distillkit.data.readers.folder_layout import survey
from distillkit.data.split import Split, assemble, hold_out, to_pixels
from distillkit.normalization import Normalization

__all__ = ["Size", "held_out", "like_first", "load_folder", "read_parts", "read_picture", "require_memory"]

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
        ValueError: a picture that cannot be read (it is named), differing sizes or channels, more than the machine's
            memory holds, a class that only `test` or `val` has, a `test` without class folders or pictures, a `test`
            without `train`, two folders for one split, or a `test_fraction` that is less than a picture of every class.
    """
    path = Path(path).expanduser()
    test_fraction = check.real_number(test_fraction, "test_fraction", least=0.0, below=1.0)
    found = survey(path)
    pixels = read_parts(found.files, size, channels, instead="open_folder", progress=progress)
    labels, info = dict(found.labels), dict(found.info)
    if "test" not in pixels:
        info["test_fraction"] = test_fraction
        kept, held = held_out(labels["train"], found.classes, test_fraction)
        for table in (pixels, labels):
            table["train"], table["test"] = table["train"][kept], table["train"][held]
    return assemble(pixels, labels, found.classes, normalization, info)


def read_parts(
    files: Mapping[str, list[Path]], size: Size | None, channels: int | None, *, instead: str, progress: bool
) -> dict[str, Tensor]:
    """Read all pictures of a dataset's parts: by part, float pixels [N, C, H, W] in [0, 1].

    Args:
        files: by part; `train` has one at least.
        size, channels: see `load_folder`.
        instead: what opens them where they are too many; see `require_memory`.
        progress: whether long reading shows a bar.

    Raises:
        ValueError: see `read_picture`, `like_first` and `require_memory`.
    """
    first = files["train"][0]
    shape = read_picture(first, size, channels).shape
    count = sum(map(len, files.values()))
    require_memory(count, shape, instead)
    with bar(count, "reading pictures", unit="picture", progress=progress) as shown:
        return {part: _read_all(own, size, channels, first, shape, shown) for part, own in files.items()}


def require_memory(count: int, shape: Sequence[int], instead: str) -> None:
    """Refuse to read more pictures than the machine's memory holds as floats, and warn of more than half of that.

    Args:
        count: how many pictures.
        shape: (C, H, W) of each.
        instead: what opens them to be read a part at a time.

    Raises:
        ValueError: what they take, what there is, and the remedy.
    """
    if not hasattr(os, "sysconf"):
        return
    size, there = 4 * count * math.prod(shape), os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    words = (
        f"{count} pictures of {list(shape)} take {format_bytes(size)} as floats, and this machine has "
        f"{format_bytes(there)} of memory; {instead}(...) reads them a part at a time, or give a smaller size="
    )
    if size > there:
        raise ValueError(words)
    if size > there / 2:
        warn(words)


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
