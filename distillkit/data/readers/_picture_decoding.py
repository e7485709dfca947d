"""Decoding of picture files into tensors."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from distillkit._utils.conversion import require_memory
from distillkit._utils.pictures import picture_array, picture_shape
from distillkit._utils.pixels import Size, height_and_width, to_pixels
from distillkit._utils.progress import bar

Problems = dict[str, list[str]]
"""What is wrong with a list of pictures: names of files, folders or rows by the kind of the problem."""


_TRANSPARENT = "give the gray value behind them: background=1 for white, background=0 for black"


def read_picture(file: Path, size: Size | None, channels: int | None, background: float | None = None) -> Tensor:
    """Read one picture file as float pixels [C, H, W] in [0, 1]."""
    from PIL import Image

    try:
        with Image.open(file) as picture:
            array = picture_array(picture, background, _TRANSPARENT)
    except Exception as error:
        raise ValueError(f"cannot read picture {file}: {str(error) or type(error).__name__}") from error
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
    require_memory(count, shape, open_with)
    pixels = {part: torch.empty(len(own), *shape) for part, own in files.items()}
    with bar(count, "reading pictures", unit="picture", progress=progress) as shown:
        for part, own in files.items():
            for file, out in zip(own, pixels[part]):
                out.copy_(require_same_shape(read_picture(file, size, channels, background), file, first, shape))
                shown.update()
    return pixels


def require_readable(
    source: str, files: Sequence[Path], size: Size | None, channels: int | None, problems: Problems, *, progress: bool
) -> None:
    """Refuse pictures that are no set of one shape, after a look at all headers, with all that is wrong with them.

    Args:
        source: name of the folder or table in the message.
        files: all picture files.
        size, channels: size and number of channels to which the pictures will be converted.
        problems: what is already known to be wrong. Kinds that begin with "missing" are files that do not exist.
        progress: whether to show a progress bar if there are many pictures.

    Raises:
        FileNotFoundError, ValueError: the message has a line for each kind of problem, with the first three examples.
    """
    from PIL import Image

    def short(file: Path) -> str:
        return str(file).removeprefix(f"{source}{os.sep}")

    problems, counts, sizes = dict(problems), dict[Any, list[str]](), dict[Any, list[str]]()
    files = [file for file in files if file.is_file()] if problems else files
    with bar(len(files), "checking pictures", unit="picture", progress=progress) as shown:
        for file in files:
            try:
                with Image.open(file) as picture:
                    c, h, w = picture_shape(picture)
                counts.setdefault(channels or c, []).append(short(file))
                sizes.setdefault(height_and_width(size) or (h, w), []).append(short(file))
            except Exception as error:  # Pillow raises errors of many kinds
                reason = str(error).replace(f" {str(file)!r}", "") or type(error).__name__
                problems.setdefault("pictures that cannot be read", []).append(f"{short(file)} ({reason})")
            shown.update()
    for found, what, remedy in (
        (counts, "channels", "channels=1 or channels=3"),
        (sizes, "pixels (height, width)", "size=, for example size=32"),
    ):
        if len(found) > 1:
            most = max(found, key=lambda value: len(found[value]))
            like = f"{found[most][0]} and {len(found[most]) - 1} more"
            kind = f"pictures without the {most} {what} of {like}; give {remedy}"
            problems[kind] = [name for value, own in found.items() if value != most for name in own]
    if problems:
        lines = [f"{source} cannot be read as one set:"]
        for kind, own in problems.items():
            examples = ", ".join(own[:3]) + ", ..." * (len(own) > 3)
            lines.append(f"- {len(own)} {kind}: {examples}")
        only = all(kind.startswith("missing") for kind in problems)
        raise (FileNotFoundError if only else ValueError)("\n".join(lines))


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
