"""CelebA: faces with attributes, and whose they are; in torchvision's layout, or as LEAF deals them to clients."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from distillkit._utils import check
from distillkit.data.readers._leaf import Held, read_users, whole_numbers
from distillkit.data.readers._listing import Listing, columns_of, pictures_in, read_listing, require
from distillkit.data.readers.folder import Size
from distillkit.data.split import Split
from distillkit.normalization import Normalization

__all__ = ["list_celeba", "list_leaf_celeba", "load_celeba", "load_leaf_celeba"]

_IMAGES, _ATTRIBUTES, _PEOPLE = "img_align_celeba", "list_attr_celeba.txt", "identity_CelebA.txt"
_PARTITION = "list_eval_partition.txt"
_PARTS = {"0": "train", "1": "validation", "2": "test"}
_SOURCE = "get CelebA from https://mmlab.ie.cuhk.edu.hk/projects/CelebA.html"
_LEAF = "LEAF's data/celeba (https://github.com/TalwalkarLab/leaf): ./preprocess.sh -s niid --sf 1.0 -k 5 -t sample"


def load_celeba(
    path: str | os.PathLike[str],
    *,
    attributes: str | Sequence[str] = "Smiling",
    size: Size = 84,
    channels: int | None = None,
    normalization: Normalization | None = None,
    progress: bool = True,
) -> Split:
    """Load CelebA (Liu et al., ICCV 2015) from the authors' files, as torchvision keeps them: faces, by person.

    For a binary task over clients that are real people: the column `user` says whose face each is. The authors'
    training, validation and test sets have different people.

    Args:
        path: the folder `celeba` with `img_align_celeba/000001.jpg` and so on, `list_attr_celeba.txt` (40 attributes,
            1 or -1), `identity_CelebA.txt` (a person a picture) and `list_eval_partition.txt` (0 train, 1 validation,
            2 test).
        attributes: one attribute, which makes two classes, without and with it (LEAF's task: `Smiling`); or a list,
            which makes multi-label rows.
        size: height and width in pixels. Default 84, LEAF's: all 202,599 faces are then 17 GB of float32, at 32 2.5 GB.
        channels: 1 or 3; see `load_folder`.
        normalization: default the mean and standard deviation measured on the training split.
        progress: whether long reading shows a bar.

    Returns:
        A `Split` with `validation`; `users` are all people's numbers, in increasing order, as text.

    Raises:
        FileNotFoundError: what is missing, named.
        ValueError: an unknown attribute, or a file that is damaged or not of that layout.
    """
    listing = list_celeba(Path(path).expanduser(), attributes)
    return read_listing(listing, size, channels, normalization, progress)


def list_celeba(folder: Path, attributes: str | Sequence[str]) -> Listing:
    """Which pictures CelebA has, apart from reading them.

    Args:
        folder, attributes: see `load_celeba`.

    Raises:
        FileNotFoundError, ValueError: see `load_celeba`.
    """
    require(folder, [_IMAGES, _ATTRIBUTES, _PEOPLE, _PARTITION], "celeba", _SOURCE)
    lines = (folder / _ATTRIBUTES).read_text().splitlines()
    known = lines[1].split() if len(lines) > 1 else []
    one = isinstance(attributes, str)
    named = [attributes] if isinstance(attributes, str) else check.sequence(attributes, "attributes", "names")
    wanted = [check.one_of(name, "attributes", known) for name in named]
    if not wanted or len(set(wanted)) != len(wanted):
        raise ValueError(f"attributes must be distinct, at least one, got {wanted}")
    places = [known.index(name) for name in wanted]
    has = _table(folder / _ATTRIBUTES, lines[2:], len(known), ("1", "-1"))
    person = _table(folder / _PEOPLE, (folder / _PEOPLE).read_text().splitlines(), 1, None)
    split = _table(folder / _PARTITION, (folder / _PARTITION).read_text().splitlines(), 1, tuple(_PARTS))
    for file, table in ((_ATTRIBUTES, has), (_PEOPLE, person)):
        if lacking := [name for name in split if name not in table]:
            raise ValueError(f"{folder / file} lacks {len(lacking)} pictures of {_PARTITION}, such as {lacking[0]}")
    names: dict[str, list[str]] = {
        part: [name for name, (number,) in split.items() if number == code] for code, part in _PARTS.items()
    }
    if empty := [part for part, own in names.items() if not own]:
        raise ValueError(f"{folder / _PARTITION} has no pictures of {', '.join(empty)}")
    rows = {part: torch.tensor([[has[n][k] == "1" for k in places] for n in own]) for part, own in names.items()}
    owners = {part: [person[name][0] for name in own] for part, own in names.items()}
    users = sorted({user for own in owners.values() for user in own}, key=int)
    return Listing(
        pictures_in(folder / _IMAGES, names, _SOURCE),
        {part: own[:, 0].long() if one else own.float() for part, own in rows.items()},
        (f"not {wanted[0]}", wanted[0]) if one else tuple(wanted),
        {"dataset": "celeba"},
        columns_of(owners, users),
        tuple(users),
    )


def load_leaf_celeba(
    path: str | os.PathLike[str],
    *,
    images: str | os.PathLike[str] | None = None,
    size: Size = 84,
    channels: int | None = None,
    normalization: Normalization | None = None,
    progress: bool = True,
) -> Split:
    """Load CelebA as LEAF (Caldas et al., 2018) deals it: whether somebody smiles, with the celebrities as clients.

    Args:
        path: the folder that LEAF's `preprocess.sh` fills (`data/celeba/data`), with `train/*.json` and `test/*.json`:
            for each user, `x` (names of pictures) and `y` (1 for `Smiling`, as its script has it).
        images: the folder with the pictures. Default: `raw/img_align_celeba` in `path`, where LEAF has them.
        size: height and width in pixels; default LEAF's 84.
        channels: 1 or 3; see `load_folder`.
        normalization: default the mean and standard deviation measured on the training split.
        progress: whether long reading shows a bar.

    Returns:
        A `Split` whose `users` are the celebrities' numbers, sorted; the column `user` counts in them. With LEAF's
        `-t sample` train and test have the same users.

    Raises:
        FileNotFoundError: files are missing; names them and where they come from.
        ValueError: a file that is damaged or not of that layout, or a user in two files of one split.
    """
    folder = Path(path).expanduser()
    return read_listing(list_leaf_celeba(folder, images), size, channels, normalization, progress)


def list_leaf_celeba(folder: Path, images: str | os.PathLike[str] | None) -> Listing:
    """Which pictures LEAF's CelebA has, apart from reading them.

    Args:
        folder, images: see `load_leaf_celeba`.

    Raises:
        FileNotFoundError, ValueError: see `load_leaf_celeba`.
    """
    where = folder / "raw" / _IMAGES if images is None else Path(images).expanduser()
    read = read_users(folder, _pack, "names of pictures x and labels y (0 or 1)", _LEAF)
    users = sorted({user for held in read.values() for user in held}, key=lambda name: (len(name), name))
    names = {part: [name for own in held.values() for name in own.x] for part, held in read.items()}
    owners = {part: [user for user, own in held.items() for _ in own.x] for part, held in read.items()}
    return Listing(
        pictures_in(where, names, _SOURCE),
        {part: torch.from_numpy(np.concatenate([own.y for own in held.values()])) for part, held in read.items()},
        ("not Smiling", "Smiling"),
        {"dataset": "leaf-celeba"},
        columns_of(owners, users),
        tuple(users),
    )


def _pack(x: list[Any], y: list[Any]) -> Held | None:
    labels = whole_numbers(y, 2)
    if labels is None or len(x) != len(y) or not all(isinstance(name, str) for name in x):
        return None
    return Held(x, labels)


def _table(file: Path, lines: list[str], columns: int, allowed: Sequence[str] | None) -> dict[str, list[str]]:
    """By picture, the values of one of CelebA's tables."""
    table = {}
    for line in lines:
        name, *values = line.split() or [""]
        fits = len(values) == columns and all(v in allowed if allowed else v.isdigit() for v in values)
        if not fits or name in table:
            wanted = f"one of {', '.join(allowed)}" if allowed else "a number"
            raise ValueError(f"{file} must hold each picture once, with {columns} times {wanted}, got {line[:60]!r}")
        table[name] = values
    return table
