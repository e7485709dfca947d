"""Validation of the constructor arguments of sets: images, labels, columns and info."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from distillkit._utils import check, conversion
from distillkit.normalization import Normalization

FOUND_CLASSES = "folders"
"""Value of `info["classes"]` of a set whose classes, and so the labels, come from a listing of folders."""
FOUND_LABELS = "labels"
"""Value of `info["classes"]` of a set whose classes are the different labels that occur in its data."""


def checked_images(images: Any, labels: Any, num_classes: int | None) -> tuple[Tensor, Tensor, int]:
    """Check the images and labels of a set, and return them as tensors, with the number of classes."""
    images = conversion.as_tensor(images, "images")
    labels = conversion.as_tensor(labels, "labels", lists=True)
    empty = isinstance(images, Tensor) and images.ndim == 4 and len(images) == 0 and images.is_floating_point()
    images = images if empty else check.batch_of_images(images)
    return images, *checked_labels(labels, len(images), num_classes)


def checked_class_names(names: Any, num_classes: int | None = None) -> tuple[str, ...]:
    """Check the class names of a set, and return them as a tuple, which is empty if there are none."""
    if not isinstance(names, Sequence) or isinstance(names, str) or not all(isinstance(n, str) for n in names):
        raise TypeError(f"class_names must be a sequence of strings, one per class, got {names!r:.80}")
    if names and (not all(names) or num_classes not in (None, len(names))):
        wanted = "" if num_classes is None else f"{num_classes} "
        raise ValueError(f"class_names must be {wanted}names, one per class and none empty, got {list(names)!r:.80}")
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"class_names must differ, but {twice[0]!r} names several classes; number such names")
    return tuple(names)


def checked_labels(labels: Any, n: int, num_classes: int | None) -> tuple[Tensor, int]:
    """Check the labels of a set, and return them with the number of classes."""
    if isinstance(labels, Tensor) and labels.ndim == 2 and labels.is_floating_point():
        if len(labels) != n or not bool(torch.isfinite(labels).all()):
            raise ValueError(f"labels must be {n} finite rows, one per image, got shape {list(labels.shape)}")
        if num_classes is not None and labels.shape[1] != num_classes:
            raise ValueError(
                f"labels have {labels.shape[1]} columns, but num_classes={num_classes}; leave num_classes out"
            )
        num_classes = labels.shape[1]
    else:
        if num_classes is None and n == 0:
            raise ValueError("num_classes must be given for an empty set")
        labels = check.class_labels(labels, n, num_classes)
        num_classes = check.classes_of(labels) if num_classes is None else num_classes
    return labels, check.positive_int(num_classes, "num_classes", most=10**6)


def checked_normalization(normalization: Normalization, channels: int) -> Normalization:
    """Check that a normalization fits the number of channels, and return it."""
    Normalization.require(normalization)
    if len(normalization.mean) not in (1, channels):
        raise ValueError(
            f"images have {channels} channels, normalization has {len(normalization.mean)}; pass one number per "
            "channel, or one for all"
        )
    return normalization


def repeats_images(index: slice | Tensor, n: int) -> bool:
    """Return whether an index of a set of `n` images, from `as_index`, selects an image more than once."""
    return isinstance(index, Tensor) and index.dtype != torch.bool and len((index % max(1, n)).unique()) < len(index)


def as_index(index: int | slice | Tensor | Sequence[int], n: int) -> slice | Tensor:
    """Convert an index of a set to a slice or a tensor that PyTorch accepts. An empty list selects no images."""
    if isinstance(index, slice):
        try:
            rows = range(n)[index]
        except (TypeError, ValueError) as error:
            raise TypeError(f"index must be a slice of ints, got {index!r:.80}: {error}") from None
        # PyTorch has no negative steps.
        return index if rows.step > 0 else torch.tensor(rows, dtype=torch.long, device="cpu")
    try:
        found = index if isinstance(index, Tensor) else torch.as_tensor(index, device="cpu")
    except (TypeError, ValueError, RuntimeError):
        raise TypeError(f"index must be an int, a slice, a mask or a list of ints, got {index!r:.80}") from None
    check.has_values(found, "index")
    found = found if found.numel() or isinstance(index, Tensor) else found.long()
    if found.is_floating_point() or found.is_complex() or found.ndim > 1:
        raise TypeError(
            f"index must be an int, a slice, a mask [N] or ints [n], got {found.dtype} of shape {list(found.shape)}"
        )
    if found.dtype == torch.bool:
        if found.shape != (n,):
            raise IndexError(f"index must be a mask of {n} values, one per image, got shape {list(found.shape)}")
    elif found.numel() and not -n <= int(found.min()) <= int(found.max()) < n:
        raise IndexError(f"index must be in [{-n}, {n}), got {int(found.min())} to {int(found.max())}")
    return found


class Columns(Mapping[str, Tensor]):
    """Columns of a set by name. They are replaced together, so that the set notices it and its guarantee ends."""

    def __init__(self, columns: Mapping[str, Tensor]) -> None:
        self._columns = dict(columns)

    def __getitem__(self, name: str) -> Tensor:
        return self._columns[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._columns)

    def __len__(self) -> int:
        return len(self._columns)

    def __repr__(self) -> str:
        return repr(self._columns)

    def __setitem__(self, name: str, column: Tensor) -> None:
        raise TypeError(f"columns cannot be changed in place; assign data.columns = {{**data.columns, {name!r}: ...}}")


def checked_columns(columns: Mapping[str, Any] | None, n: int) -> Columns:
    """Check that every column has one row per image, and return the columns."""
    found = dict(check.mapping({} if columns is None else columns, "columns"))
    for name, column in found.items():
        if not isinstance(column, Tensor):
            raise TypeError(f"column {name!r} must be a torch.Tensor, got {type(column).__name__}")
        if column.ndim == 0 or len(column) != n:
            raise ValueError(f"column {name!r} must have {n} rows, one per image, got shape {list(column.shape)}")
    return Columns(found)


def checked_info(info: Mapping[str, Any] | None) -> dict[str, Any]:
    """Convert `info` to JSON values, so that it does not change when it is saved and loaded."""
    try:
        copied: dict[str, Any] = json.loads(json.dumps(dict({} if info is None else info), default=_plain))
    except (TypeError, ValueError) as error:
        raise TypeError(f"info must be a mapping of JSON values: {error}") from error
    return copied


def _plain(value: Any) -> Any:
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"{type(value).__name__} is not a JSON value")


def class_of_rows(labels: Tensor, columns: Mapping[str, Tensor]) -> Tensor:
    """Return the class index of each image, int64 [N]."""
    if labels.ndim == 1:
        return labels
    column = columns.get("class")
    if column is None or column.ndim != 1 or column.is_floating_point():
        return labels.argmax(1)
    column = column.long()
    if len(column) and not 0 <= int(column.min()) <= int(column.max()) < labels.shape[1]:
        raise ValueError(
            f"the column 'class' must be in [0, {labels.shape[1]}), got {int(column.min())} to {int(column.max())}"
        )
    return column


def require_same_order(a: Sequence[str], b: Sequence[str], names: tuple[str, str] | None) -> None:
    """Refuse two sets whose class names show, or suggest, that equal labels mean different classes."""
    both = " and ".join(names) if names else "the sets"
    if a and b:
        if moved := [name for name in a if name in b and a.index(name) != b.index(name)]:
            same = "the same classes" if sorted(a) == sorted(b) else f"the class {moved[0]!r}"
            raise ValueError(
                f"{both} have {same} in another order: {', '.join(a)} and {', '.join(b)}; read both with the same "
                "class_names, or change the labels of one of them"
            )
        if names and not set(a) & set(b):
            raise ValueError(
                f"{both} have no class in common: {', '.join(a)[:80]} and {', '.join(b)[:80]}; give both the same "
                "class_names, or leave them out of one"
            )
    elif names and (named := a or b):
        parts = [re.fullmatch(r"(\D*)(\d+)(\D*)", name) for name in named]
        numbers = [int(part[2]) for part in parts if part]
        alike = len(numbers) == len(named) and len({(part[1], part[3]) for part in parts if part}) == 1
        if alike and numbers != sorted(numbers):
            first, second = names if a else names[::-1]
            raise ValueError(
                f"only {first} has class names, and they are not in the order of their numbers: "
                f"{', '.join(named[:4])}, ...; if the labels of {second} have this order, state it by "
                f"`{second}.replace(class_names={first}.class_names)`, otherwise change its labels first"
            )
