"""A folder of user images for tests of `--data`."""

from __future__ import annotations

from pathlib import Path

from PIL import Image


def folder(path: Path, shade: int = 0, mode: str = "RGB", each: int = 10) -> Path:
    """Write images of two classes, bright and dark ones."""
    for label, name in enumerate(("cats", "dogs")):
        (path / name).mkdir(parents=True)
        for i in range(each):
            Image.new(mode, (9, 7), (shade + 20 * i + label) if mode == "L" else (shade, 20 * i, label)).save(
                path / name / f"{i}.png"
            )
    return path
