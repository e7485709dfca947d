"""The data root: the folder of the datasets that `load` knows."""

from __future__ import annotations

import os
from pathlib import Path

from distillkit.data._pixels import AnyPath

__all__ = ["data_root"]


def data_root(root: AnyPath | None, name: str) -> Path:
    """Return the given data root, or the one in the environment variable `DISTILLKIT_DATA`.

    Args:
        root: data root, see `load`.
        name: name of the dataset, used in the error message.

    Raises:
        ValueError: neither `root` nor the environment variable is given.
    """
    root = root if root is not None else os.environ.get("DISTILLKIT_DATA")
    if not root:
        raise ValueError(f"root must name the folder of {name}; give root= or set DISTILLKIT_DATA")
    return Path(root).expanduser()
