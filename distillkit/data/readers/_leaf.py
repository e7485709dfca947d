"""Reader of the `.json` files that LEAF's scripts write to the folders `train` and `test`."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray


class UserData(NamedTuple):
    """One user's n images `x`, as an array [n, ...] or a list of file names, and labels `y`, int64 [n]."""

    x: Any
    y: NDArray[Any]


def read_users(
    folder: Path, convert: Callable[[list[Any], list[Any]], UserData | None], expected: str, source: str
) -> dict[str, dict[str, UserData]]:
    """Read the data of every user in the folders `train` and `test`, one file at a time.

    Args:
        folder: the output of LEAF's `preprocess.sh`, with `train/*.json` and `test/*.json`. Each file has the keys
            `users`, `num_samples` and `user_data`.
        convert: function that converts a user's `x` and `y` as soon as they are parsed, and returns None if they are
            invalid.
        expected: description of valid `x` and `y` for error messages.
        source: command that creates the files, for error messages.

    Raises:
        FileNotFoundError: `train` or `test` is missing, or contains no `.json` file.
        ValueError: a file is damaged or has another layout, or a user occurs in two files of the same split.
    """
    files = {part: sorted((folder / part).glob("*.json")) for part in ("train", "test")}
    if missing := [f"{part}/*.json" for part, found in files.items() if not found]:
        raise FileNotFoundError(f"{folder} lacks {' and '.join(missing)}; make them with {source}")
    read: dict[str, dict[str, UserData]] = {}
    for part, found in files.items():
        read[part] = {}
        for file in found:
            for user, data in _read_file(file, convert, expected, source).items():
                if user in read[part]:
                    raise ValueError(f"{file} has user {user!r}, but so does another file of {part}; keep one of them")
                read[part][user] = data
        if not any(len(data.y) for data in read[part].values()):
            raise ValueError(f"{folder / part} has no pictures; make it again with {source}")
    return read


def as_labels(values: list[Any], num_classes: int) -> NDArray[Any] | None:
    """Return the values as int64 [n], or None if they are not class indices.

    Args:
        values: numbers from a `.json` file. A float such as 1.0 is accepted as an integer.
        num_classes: number of classes.
    """
    try:
        given = np.array(values, dtype=np.float64).reshape(-1)
    except (ValueError, TypeError):
        return None
    with np.errstate(invalid="ignore"):  # the comparison below refuses NaN
        labels = given.astype(np.int64)
    if len(labels) != len(values) or not (labels == given).all():
        return None
    return labels if labels.min(initial=0) >= 0 and labels.max(initial=0) < num_classes else None


def _read_file(
    file: Path, convert: Callable[[list[Any], list[Any]], UserData | None], expected: str, source: str
) -> dict[str, UserData]:
    """Read one `.json` file of LEAF, and return the data of each user, in the order of the file.

    The arguments `convert`, `expected` and `source` are those of `read_users`.
    """

    def converted(found: dict[str, Any]) -> Any:
        if set(found) != {"x", "y"} or not isinstance(found["x"], list) or not isinstance(found["y"], list):
            return found
        return convert(found["x"], found["y"]) or found

    try:
        content = json.loads(file.read_bytes(), object_hook=converted)
        users, counts, data = (content[key] for key in ("users", "num_samples", "user_data"))
        pairs = dict(zip(users, counts, strict=True)).items()
        known = set(users)
        unlisted = [user for user, found in data.items() if user not in known and _size(found)]
        wrong = [user for user, n in pairs if not isinstance(data.get(user), UserData) or len(data[user].y) != n]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{file} is damaged or not of LEAF's layout (users, num_samples, user_data): "
            f"{type(error).__name__}: {error}; make it again with {source}"
        ) from error
    if unlisted or len(pairs) < len(users):
        what = f"has pictures of {unlisted[0]!r}, who is not among its users" if unlisted else "names a user twice"
        raise ValueError(f"{file} {what}; make it again with {source}")
    if wrong:
        raise ValueError(
            f"{file}: user {wrong[0]!r} must have as many {expected} as num_samples says; make it again with {source}"
        )
    return {user: data[user] for user in users}


def _size(found: Any) -> int:
    return len(found.y if isinstance(found, UserData) else found)
