"""Reader of FEMNIST, handwritten characters of many writers, in LEAF's layout."""

from __future__ import annotations

import string
from typing import Any

import numpy as np
import torch

from distillkit._utils import check
from distillkit._utils.pixels import AnyPath, Size, to_pixels
from distillkit.data._assembly import SplitBuilder
from distillkit.data.readers._leaf import UserData, as_labels, read_users
from distillkit.data.split import Split
from distillkit.normalization import Normalization

_CLASSES = (*string.digits, *string.ascii_uppercase, *string.ascii_lowercase)
_SIDE = 28
_EXPECTED = f"pictures x (784 numbers each, k / 255 or k in 0..255) and labels y (integers in 0..{len(_CLASSES) - 1})"
_SOURCE = "LEAF's data/femnist (https://github.com/TalwalkarLab/leaf): ./preprocess.sh -s niid --sf 1.0 -k 0 -t sample"


def load_femnist(
    path: AnyPath, *, size: Size | None = None, channels: int | None = None, normalization: Normalization | None = None
) -> Split:
    """Load FEMNIST (Caldas et al., "LEAF", 2018), gray 28x28 handwritten characters of 62 classes, from LEAF's files.

    Use it for clients that are real people. The column `user` identifies the writer of each image.

    Args:
        path: the output folder of LEAF's `preprocess.sh` (`data/femnist/data`), with `train/*.json` and `test/*.json`.
            Each file has `users` (names), `num_samples` (number of pictures of each user) and `user_data`, which
            contains `x` and `y` for each user. `x` has the 784 pixels of each picture, row by row, either as numbers in
            [0, 1] (LEAF's script) or as integers in 0..255 (LEAF's README). `y` has the labels: 0..9 for digits, 10..35
            for upper case and 36..61 for lower case.
        size: height and width in pixels; see `load`.
        channels: number of channels, 1 or 3; see `load`.
        normalization: normalization of the sets. Default: mean and standard deviation measured on the training split.

    Returns:
        A `Split` whose `users` are the sorted names of all users. The column `user`, int64 [N], contains indices into
        `users`. The characters are dark on white. If the files were created with LEAF's option `-t sample`, the
        training and test sets have the same users; with `-t user`, they have different users.

    The files are read one at a time, and images are converted to bytes immediately. At its peak, the memory use is the
    size of the float32 sets (2.6 GB for all 817,851 images), plus one byte per pixel of all images, plus twice the size
    of one file.

    Raises:
        FileNotFoundError: `train` or `test` is missing, or contains no `.json` file. The message says where to get the
            files.
        ValueError: a file is damaged or has another layout, or a user occurs in two files of the same split.
    """
    read = read_users(check.path(path, "path"), _convert, _EXPECTED, _SOURCE)
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
    return SplitBuilder(labels, _CLASSES, normalization, info, columns=owners, users=names).build(pixels)


def _convert(x: list[Any], y: list[Any]) -> UserData | None:
    """Convert a user's images to bytes [n, 784], and labels to int64 [n]. Return None if they are malformed."""
    labels = as_labels(y, len(_CLASSES))
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
    return UserData(stored.astype(np.uint8), labels)
