"""FEMNIST as LEAF lays it out: handwritten characters, and who wrote each."""

from __future__ import annotations

import json
import os
import string
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from distillkit.data.files import Size
from distillkit.data.split import Split, assemble, to_pixels
from distillkit.normalization import Normalization

__all__ = ["load_femnist"]

_CLASSES = (*string.digits, *string.ascii_uppercase, *string.ascii_lowercase)
_SIDE = 28
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
    folder = Path(path).expanduser()
    files = {part: sorted((folder / part).glob("*.json")) for part in ("train", "test")}
    if missing := [f"{part}/*.json" for part, found in files.items() if not found]:
        raise FileNotFoundError(f"{folder} lacks {' and '.join(missing)}; make them with {_SOURCE}")
    read: dict[str, dict[str, _Pictures]] = {}
    for part, found in files.items():
        read[part] = {}
        for file in found:
            for user, pictures in _users(file).items():
                if user in read[part]:
                    raise ValueError(f"{file} has user {user!r}, whom another file of {part} has too; leave one")
                read[part][user] = pictures
        if not any(len(pictures.y) for pictures in read[part].values()):
            raise ValueError(f"{folder / part} has no pictures; make it anew with {_SOURCE}")
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


class _Pictures(NamedTuple):
    """A user's pictures, bytes [n, 784], and labels int64 [n]."""

    x: NDArray[Any]
    y: NDArray[Any]


def _users(file: Path) -> dict[str, _Pictures]:
    """What the users of one file have, in its order."""
    try:
        held = json.loads(file.read_bytes(), object_hook=_packed)
        users, counts, data = (held[key] for key in ("users", "num_samples", "user_data"))
        pairs = dict(zip(users, counts, strict=True)).items()
        known = set(users)
        nobody = [user for user, found in data.items() if user not in known and _size(found)]
        wrong = [user for user, n in pairs if not isinstance(data.get(user), _Pictures) or len(data[user].y) != n]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{file} is damaged or not of LEAF's layout (users, num_samples, user_data): "
            f"{type(error).__name__}: {error}; make it anew with {_SOURCE}"
        ) from error
    if nobody or len(pairs) < len(users):
        who = f"has pictures of {nobody[0]!r}, who is not among its users" if nobody else "names a user twice"
        raise ValueError(f"{file} {who}; make it anew with {_SOURCE}")
    if wrong:
        raise ValueError(
            f"{file}: user {wrong[0]!r} must have as many pictures x (784 numbers each, k / 255 or k in 0..255) and "
            f"labels y (whole numbers in 0..{len(_CLASSES) - 1}) as num_samples says; make it anew with {_SOURCE}"
        )
    return {user: data[user] for user in users}


def _size(found: Any) -> int:
    return len(found.y if isinstance(found, _Pictures) else found)


def _packed(held: dict[str, Any]) -> Any:
    """A user's numbers as bytes, as soon as they are parsed; anything else, and what is no such picture, as it is."""
    if set(held) != {"x", "y"}:
        return held
    try:
        x = np.array(held["x"], dtype=np.float64).reshape(-1, _SIDE * _SIDE)
        y = np.array(held["y"], dtype=np.float64).reshape(-1)
    except (ValueError, TypeError):
        return held
    grey = x * 255 if x.max(initial=0) <= 1 else x
    with np.errstate(invalid="ignore"):  # NaN is no label, which the comparison says
        stored, labels = np.rint(grey), y.astype(np.int64)
    fits = len(x) == len(held["x"]) == len(y) and bool((np.abs(grey - stored) < 1e-3).all() and (labels == y).all())
    if not fits or stored.min(initial=0) < 0 or stored.max(initial=0) > 255:
        return held
    if labels.min(initial=0) < 0 or labels.max(initial=0) >= len(_CLASSES):
        return held
    return _Pictures(stored.astype(np.uint8), labels)
