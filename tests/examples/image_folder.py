"""A folder of user images for tests of `--data`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from PIL import Image


def folder(
    path: Path, shade: int = 0, mode: str = "RGB", each: int = 10, classes: Sequence[str] = ("cats", "dogs")
) -> Path:
    """Write distinct images of each class."""
    for label, name in enumerate(classes):
        (path / name).mkdir(parents=True)
        for i in range(each):
            colour = (shade + 20 * i + label) if mode == "L" else (shade, 20 * i, label)
            Image.new(mode, (9, 7), colour).save(path / name / f"{i}.png")
    return path
