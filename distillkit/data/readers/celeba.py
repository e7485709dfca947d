"""Readers of CelebA (faces with attributes and identities), in torchvision's layout and in LEAF's."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from distillkit._utils import check
from distillkit._utils.pixels import AnyPath
from distillkit.data.readers._leaf import UserData, as_labels, read_users
from distillkit.data.readers._picture_list import (
    PictureList,
    require_files,
    require_pictures,
    user_picture_list,
)

_IMAGES, _ATTRIBUTES, _IDENTITIES = "img_align_celeba", "list_attr_celeba.txt", "identity_CelebA.txt"
_PARTITION = "list_eval_partition.txt"
_PARTS = {"0": "train", "1": "validation", "2": "test"}
_SOURCE = "get CelebA from https://mmlab.ie.cuhk.edu.hk/projects/CelebA.html"
_LEAF = "LEAF's data/celeba (https://github.com/TalwalkarLab/leaf): ./preprocess.sh -s niid --sf 1.0 -k 5 -t sample"


def list_celeba(folder: Path, attributes: str | Sequence[str] = "Smiling") -> PictureList:
    """List the pictures of CelebA (Liu et al., ICCV 2015), faces of celebrities, in torchvision's file layout.

    Args:
        folder: the folder `celeba`. It contains the pictures `img_align_celeba/000001.jpg` and so on, and the files
            `list_attr_celeba.txt` (40 attributes of each picture, 1 or -1), `identity_CelebA.txt` (the person in each
            picture) and `list_eval_partition.txt` (0 for training, 1 for validation, 2 for test).
        attributes: name of one attribute, or a list of names. One name gives two classes, without and with the
            attribute. The federated benchmark LEAF uses `Smiling`. A list gives multi-label rows.

    Returns:
        A listing whose `users` are the ids of all people as text, in increasing order.

    Raises:
        FileNotFoundError: files are missing.
        ValueError: an attribute is unknown, or a file is damaged or has another layout.
    """
    require_files(folder, [_IMAGES, _ATTRIBUTES, _IDENTITIES, _PARTITION], "celeba", _SOURCE)
    lines = (folder / _ATTRIBUTES).read_text(encoding="utf-8").splitlines()
    known = lines[1].split() if len(lines) > 1 else []
    one = isinstance(attributes, str)
    named = [attributes] if isinstance(attributes, str) else check.sequence(attributes, "attributes", "names")
    wanted = [check.one_of(name, "attributes", known) for name in named]
    if not wanted or len(set(wanted)) != len(wanted):
        raise ValueError(f"attributes must be distinct, at least one, got {wanted}")
    columns = [known.index(name) for name in wanted]
    has = _table(folder / _ATTRIBUTES, lines[2:], len(known), ("1", "-1"))
    person = _table(folder / _IDENTITIES, (folder / _IDENTITIES).read_text(encoding="utf-8").splitlines(), 1, None)
    split = _table(
        folder / _PARTITION, (folder / _PARTITION).read_text(encoding="utf-8").splitlines(), 1, tuple(_PARTS)
    )
    for file, table in ((_ATTRIBUTES, has), (_IDENTITIES, person)):
        if lacking := [name for name in split if name not in table]:
            raise ValueError(f"{folder / file} lacks {len(lacking)} pictures of {_PARTITION}, such as {lacking[0]}")
    names = {part: [name for name, (number,) in split.items() if number == code] for code, part in _PARTS.items()}
    if empty := [part for part, own in names.items() if not own]:
        raise ValueError(f"{folder / _PARTITION} has no pictures of {', '.join(empty)}")
    rows = {part: torch.tensor([[has[n][k] == "1" for k in columns] for n in own]) for part, own in names.items()}
    owners = {part: [person[name][0] for name in own] for part, own in names.items()}
    users = sorted({user for own in owners.values() for user in own}, key=int)
    labels = {part: own[:, 0].long() if one else own.float() for part, own in rows.items()}
    classes = (f"not {wanted[0]}", wanted[0]) if one else tuple(wanted)
    files = require_pictures(folder / _IMAGES, names, _SOURCE)
    return user_picture_list("celeba", files, labels, classes, owners, users)


def list_leaf_celeba(folder: Path, images: AnyPath | None = None) -> PictureList:
    """List the pictures of LEAF's version of CelebA (Caldas et al., 2018): smiling or not, of celebrities.

    Args:
        folder: the output folder of LEAF's `preprocess.sh` (`data/celeba/data`), with `train/*.json` and `test/*.json`.
            For each user, these files contain the names of the pictures (`x`), and their labels (`y`), 1 for `Smiling`.
        images: the folder with the pictures. Default: the folder that LEAF uses, `raw/img_align_celeba` below `folder`.

    Returns:
        A listing whose `users` are the sorted ids of the celebrities. If the files were created with LEAF's option
        `-t sample`, the training and test sets have the same users.

    Raises:
        FileNotFoundError: files are missing. The message says where to get them.
        ValueError: a file is damaged or has another layout, or a user occurs in two files of the same split.
    """
    where = folder / "raw" / _IMAGES if images is None else Path(images).expanduser()
    read = read_users(folder, _convert, "names of pictures x and labels y (0 or 1)", _LEAF)
    users = sorted({user for users_of in read.values() for user in users_of}, key=lambda name: (len(name), name))
    names = {part: [name for own in data.values() for name in own.x] for part, data in read.items()}
    owners = {part: [user for user, own in data.items() for _ in own.x] for part, data in read.items()}
    labels = {part: torch.from_numpy(np.concatenate([u.y for u in data.values()])) for part, data in read.items()}
    files = require_pictures(where, names, _SOURCE)
    return user_picture_list("leaf-celeba", files, labels, ("not Smiling", "Smiling"), owners, users)


def _convert(x: list[Any], y: list[Any]) -> UserData | None:
    """Convert a user's picture names `x` and labels `y` from a `.json` file. Return None if they are malformed."""
    labels = as_labels(y, 2)
    if labels is None or len(x) != len(y) or not all(isinstance(name, str) for name in x):
        return None
    return UserData(x, labels)


def _table(file: Path, lines: list[str], columns: int, allowed: Sequence[str] | None) -> dict[str, list[str]]:
    """Parse one of CelebA's tables, and return the values of each picture by the picture's name."""
    table = {}
    for line in lines:
        name, *values = line.split() or [""]
        fits = len(values) == columns and all(v in allowed if allowed else v.isdigit() for v in values)
        if not fits or name in table:
            value = f"one of {', '.join(allowed)}" if allowed else "a number"
            raise ValueError(f"{file} must hold each picture once, with {columns} times {value}, got {line[:60]!r}")
        table[name] = values
    return table
