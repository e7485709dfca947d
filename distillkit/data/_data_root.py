"""The data root: the folder that contains the files of all named datasets."""

from __future__ import annotations

import os
from pathlib import Path

from distillkit._utils import check
from distillkit._utils.pixels import AnyPath


def data_root(root: AnyPath | None, name: str) -> Path:
    """Return the data root: the argument `root`, or the folder in the environment variable `DISTILLKIT_DATA`.

    Args:
        root: data root that the user passed to `load`, or None.
        name: name of the dataset, used in the error message.

    Raises:
        ValueError: `root` is None and the environment variable is not set.
    """
    root = root if root is not None else os.environ.get("DISTILLKIT_DATA")
    if not root:
        raise ValueError(f"root must name the folder of {name}; give root= or set DISTILLKIT_DATA")
    return check.path(root, "root")
