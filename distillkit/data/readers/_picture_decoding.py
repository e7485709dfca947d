"""Decoding of picture files into tensors."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from distillkit._utils.conversion import format_bytes
from distillkit._utils.pictures import picture_array
from distillkit._utils.pixels import Size, to_pixels
from distillkit._utils.progress import bar
from distillkit._utils.user_warnings import warn

__all__ = ["read_picture", "read_pictures", "require_same_shape"]


_TRANSPARENT = "give the gray value behind them: background=1 for white, background=0 for black"


def read_picture(file: Path, size: Size | None, channels: int | None, background: float | None = None) -> Tensor:
    """Read one picture file as float pixels [C, H, W] in [0, 1]."""
    from PIL import Image

    try:
        with Image.open(file) as picture:
            array = picture_array(picture, background, _TRANSPARENT)
    except Exception as error:
        raise ValueError(f"cannot read picture {file}: {error or type(error).__name__}") from error
    tensor = torch.from_numpy(array).reshape(*array.shape[:2], -1).permute(2, 0, 1)
    return to_pixels(tensor[None], size, channels)[0]


def read_pictures(
    files: Mapping[str, list[Path]],
    size: Size | None,
    channels: int | None,
    background: float | None,
    *,
    open_with: str,
    progress: bool,
) -> dict[str, Tensor]:
    """Read all pictures of a dataset, and return float pixels [N, C, H, W] in [0, 1] for each part."""
    first = files["train"][0]
    shape = read_picture(first, size, channels, background).shape
    count = sum(map(len, files.values()))
    _require_memory(count, shape, open_with)
    pixels = {part: torch.empty(len(own), *shape) for part, own in files.items()}
    with bar(count, "reading pictures", unit="picture", progress=progress) as shown:
        for part, own in files.items():
            for file, out in zip(own, pixels[part]):
                out.copy_(require_same_shape(read_picture(file, size, channels, background), file, first, shape))
                shown.update()
    return pixels


def require_same_shape(picture: Tensor, file: Path, first: Path, shape: Sequence[int]) -> Tensor:
    """Return the picture, after checking that it has the shape of the dataset's first picture.

    Args:
        picture: pixels [C, H, W].
        file, first: paths of this picture's file and of the first picture's file.
        shape: shape (C, H, W) of the first picture.

    Raises:
        ValueError: the picture has another shape. The message names both files and the option that converts them to the
            same shape.
    """
    if tuple(picture.shape) == tuple(shape):
        return picture
    remedy = "channels=1 or channels=3" if picture.shape[0] != shape[0] else "size=, for example size=32"
    raise ValueError(
        f"pictures differ: {first} is {list(shape)} (C, H, W), {file} is {list(picture.shape)}; give {remedy}"
    )


def _require_memory(count: int, shape: Sequence[int], open_with: str) -> None:
    """Refuse pictures that exceed the machine's memory as floats, and warn if they need more than half of it."""
    if not hasattr(os, "sysconf"):
        return
    size, memory = 4 * count * math.prod(shape), os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    message = (
        f"{count} pictures of {list(shape)} take {format_bytes(size)} as floats, and this machine has "
        f"{format_bytes(memory)} of memory; use {open_with}(...), which reads them when needed, or give a smaller size="
    )
    if size > memory:
        raise ValueError(message)
    if size > memory / 2:
        warn(message)
