"""FEMNIST as LEAF lays it out: handwritten characters, and who wrote each."""

from __future__ import annotations

import os
import string
from pathlib import Path
from typing import Any

import numpy as np
import torch

from distillkit.data.readers._leaf import Held, read_users, whole_numbers
from distillkit.data.readers.folder import Size
from distillkit.data.split import Split, assemble, to_pixels
from distillkit.normalization import Normalization

__all__ = ["load_femnist"]

_CLASSES = (*string.digits, *string.ascii_uppercase, *string.ascii_lowercase)
_SIDE = 28
_WANTED = (
    f"pictures x (784 numbers each, k / 255 or k in 0..255) and labels y (whole numbers in 0..{len(_CLASSES) - 1})"
)
_SOURCE = "LEAF's data/femnist (https://github.com/TalwalkarLab/leaf): ./preprocess.sh -s niid --sf 1.0 -k 0 -t sample"


def load_femnist(
    path: str | os.PathLike[str],
    *,
    size: Size | None = None,
    channels: int | None = None,
    normalization: Normalization | None = None,
) -> Split:
    """Load FEMNIST (Caldas et al., "LEAF", 2018) from LEAF's files: 28x28 grey characters of 62 classes, by writer.

    For clients that are real people: the column `user` of both sets says who wrote each picture.

    Args:
        path: the folder that LEAF's `preprocess.sh` fills (`data/femnist/data`), with `train/*.json` and
            `test/*.json`. Each file has `users` (names), `num_samples` (how many pictures each has) and `user_data`:
            for each user, `x` (784 numbers a picture, row by row, k / 255 as LEAF's script writes them, or whole k in
            0..255 as its README says) and `y` (0..9 digits, 10..35 capitals, 36..61 small letters).
        size: height and width in pixels; see `load`.
        channels: 1 or 3; see `load`.
        normalization: default the mean and standard deviation measured on the training split.

    Returns:
        A `Split` whose `users` are the names of all users, sorted; `user`, int64 [N], counts in them. With LEAF's
        `-t sample` train and test have the same users, with `-t user` each has its own. Ink is dark on white.

    The files are read one at a time and a user's pictures become bytes as soon as they are read, so that beside the
    sets' float32 (2.6 GB for all 817,851 pictures) the bytes of all and one file's text, twice, are held.

    Raises:
        FileNotFoundError: no `train` or `test`, or no `.json` in it; says where they come from.
        ValueError: a file that is damaged or not of that layout, or a user in two files of one split; both are named.
    """
    read = read_users(Path(path).expanduser(), _pack, _WANTED, _SOURCE)
    names = sorted({user for users in read.values() for user in users})
    number = {user: i for i, user in enumerate(names)}
    pixels, labels, owners = {}, {}, {}
    for part, users in read.items():
        stored = torch.from_numpy(np.concatenate([pictures.x for pictures in users.values()]))
        pixels[part] = to_pixels(stored.view(-1, 1, _SIDE, _SIDE), size, channels)
        labels[part] = torch.from_numpy(np.concatenate([pictures.y for pictures in users.values()]))
        counts = torch.tensor([len(pictures.y) for pictures in users.values()])
        owners[part] = {"user": torch.tensor([number[user] for user in users]).repeat_interleave(counts)}
    info = {"dataset": "femnist"}
    return assemble(pixels, labels, _CLASSES, normalization, info, columns=owners, users=names)


def _pack(x: list[Any], y: list[Any]) -> Held | None:
    """A user's pictures as bytes [n, 784], and labels."""
    labels = whole_numbers(y, len(_CLASSES))
    try:
        given = np.array(x, dtype=np.float64).reshape(-1, _SIDE * _SIDE)
    except (ValueError, TypeError):
        return None
    grey = given * 255 if given.max(initial=0) <= 1 else given
    stored = np.rint(grey)
    if labels is None or not len(given) == len(x) == len(y) or not (np.abs(grey - stored) < 1e-3).all():
        return None
    if stored.min(initial=0) < 0 or stored.max(initial=0) > 255:
        return None
    return Held(stored.astype(np.uint8), labels)
