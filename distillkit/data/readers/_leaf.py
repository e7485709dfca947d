"""LEAF's `.json` files: `users`, `num_samples` and `user_data`, some users a file, below `train` and `test`."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

__all__ = ["Held", "read_users", "whole_numbers"]


class Held(NamedTuple):
    """What a user has: `x` [n, ...] or n names, and labels `y`, int64 [n]."""

    x: Any
    y: NDArray[Any]


def read_users(
    folder: Path, pack: Callable[[list[Any], list[Any]], Held | None], wanted: str, source: str
) -> dict[str, dict[str, Held]]:
    """What every user has, of `train` and `test`. The files are read one at a time.

    Args:
        folder: what LEAF's `preprocess.sh` fills, with `train/*.json` and `test/*.json`.
        pack: makes of a user's `x` and `y` what is kept, as soon as they are parsed; None if they are not as wanted.
        wanted: what `x` and `y` are, for messages.
        source: the command that makes the files.

    Raises:
        FileNotFoundError: no `train` or `test`, or no `.json` in it.
        ValueError: a file that is damaged or not of that layout, or a user in two files of one split; both are named.
    """
    files = {part: sorted((folder / part).glob("*.json")) for part in ("train", "test")}
    if missing := [f"{part}/*.json" for part, found in files.items() if not found]:
        raise FileNotFoundError(f"{folder} lacks {' and '.join(missing)}; make them with {source}")
    read: dict[str, dict[str, Held]] = {}
    for part, found in files.items():
        read[part] = {}
        for file in found:
            for user, held in _users(file, pack, wanted, source).items():
                if user in read[part]:
                    raise ValueError(f"{file} has user {user!r}, whom another file of {part} has too; leave one")
                read[part][user] = held
        if not any(len(held.y) for held in read[part].values()):
            raise ValueError(f"{folder / part} has no pictures; make it anew with {source}")
    return read


def whole_numbers(values: list[Any], below: int) -> NDArray[Any] | None:
    """Labels as int64 [n], if that is what they are; None otherwise.

    Args:
        values: numbers; 1.0 is a whole one too.
        below: how many classes there are.
    """
    try:
        given = np.array(values, dtype=np.float64).reshape(-1)
    except (ValueError, TypeError):
        return None
    with np.errstate(invalid="ignore"):  # NaN is no label, which the comparison says
        labels = given.astype(np.int64)
    if len(labels) != len(values) or not (labels == given).all():
        return None
    return labels if labels.min(initial=0) >= 0 and labels.max(initial=0) < below else None


def _users(
    file: Path, pack: Callable[[list[Any], list[Any]], Held | None], wanted: str, source: str
) -> dict[str, Held]:
    """What the users of one file have, in its order."""

    def packed(held: dict[str, Any]) -> Any:
        if set(held) != {"x", "y"} or not isinstance(held["x"], list) or not isinstance(held["y"], list):
            return held
        return pack(held["x"], held["y"]) or held

    try:
        held = json.loads(file.read_bytes(), object_hook=packed)
        users, counts, data = (held[key] for key in ("users", "num_samples", "user_data"))
        pairs = dict(zip(users, counts, strict=True)).items()
        known = set(users)
        nobody = [user for user, found in data.items() if user not in known and _size(found)]
        wrong = [user for user, n in pairs if not isinstance(data.get(user), Held) or len(data[user].y) != n]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{file} is damaged or not of LEAF's layout (users, num_samples, user_data): "
            f"{type(error).__name__}: {error}; make it anew with {source}"
        ) from error
    if nobody or len(pairs) < len(users):
        who = f"has pictures of {nobody[0]!r}, who is not among its users" if nobody else "names a user twice"
        raise ValueError(f"{file} {who}; make it anew with {source}")
    if wrong:
        raise ValueError(
            f"{file}: user {wrong[0]!r} must have as many {wanted} as num_samples says; make it anew with {source}"
        )
    return {user: data[user] for user in users}


def _size(found: Any) -> int:
    return len(found.y if isinstance(found, Held) else found)
