"""What a set is made of, checked at its door: images with their labels, columns, and JSON values about it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from distillkit._utils import check, conversion

__all__ = ["as_index", "checked_columns", "checked_images", "checked_info", "checked_labels", "class_counts"]


def checked_images(images: Any, labels: Any, num_classes: int | None) -> tuple[Tensor, Tensor, int]:
    """What a set's constructor was given as images and labels, as tensors that fit together.

    Args:
        images: [N, C, H, W], floating point and finite; a tensor or an array.
        labels: class indices [N], or finite float rows [N, K]; a tensor, an array or a list.
        num_classes: K, if it was given.

    Returns:
        Images float [N, C, H, W], labels int64 [N] or float [N, K], and K: as given, else the largest label + 1 or the
        width of the rows.

    Raises:
        TypeError, ValueError: what is wrong with which of them.
    """
    images = conversion.as_tensor(images, "images")
    labels = conversion.as_tensor(labels, "labels", lists=True)
    empty = isinstance(images, Tensor) and images.ndim == 4 and len(images) == 0 and images.is_floating_point()
    images = images if empty else check.batch_of_images(images)
    return images, *checked_labels(labels, len(images), num_classes)


def checked_labels(labels: Any, n: int, num_classes: int | None) -> tuple[Tensor, int]:
    """The labels of `n` images, and how many classes there are.

    Args:
        labels: class indices [N], or finite float rows [N, K].
        n: how many images there are.
        num_classes: K, if it was given; needed if there are no images.

    Returns:
        Labels int64 [N] or float [N, K], and K: as given, else the largest label + 1 or the width of the rows.

    Raises:
        TypeError, ValueError: what is wrong with them.
    """
    if isinstance(labels, Tensor) and labels.ndim == 2 and labels.is_floating_point():
        if len(labels) != n or not bool(torch.isfinite(labels).all()):
            raise ValueError(f"labels must be {n} finite rows, one an image, got shape {list(labels.shape)}")
        if num_classes is not None and labels.shape[1] != num_classes:
            raise ValueError(
                f"labels have {labels.shape[1]} columns, but num_classes={num_classes}; leave num_classes out"
            )
        num_classes = labels.shape[1]
    else:
        if num_classes is None and n == 0:
            raise ValueError("num_classes must be given for an empty set")
        labels = check.class_labels(labels, n, num_classes)
        num_classes = int(labels.max()) + 1 if num_classes is None else num_classes
    return labels, check.positive_int(num_classes, "num_classes")


def class_counts(labels: Tensor, num_classes: int) -> Tensor:
    """How many images each class has, int64 [K]; of rows, how many entries of each column are above one half.

    Args:
        labels: class indices [N] or rows [N, K].
        num_classes: K.
    """
    if labels.ndim == 2:
        return (labels > 0.5).sum(0)
    return torch.bincount(labels, minlength=num_classes)


def as_index(index: int | slice | Tensor | Sequence[int]) -> slice | Tensor:
    """What stands between a set's brackets, as PyTorch takes it: an empty list selects nothing.

    Args:
        index: a number, a slice, a mask, an index tensor or a list.
    """
    if isinstance(index, slice | Tensor):
        return index
    found = torch.as_tensor(index)
    return found if found.numel() else found.long()


def checked_columns(columns: Mapping[str, Any], n: int) -> dict[str, Tensor]:
    """What a set's constructor was given as columns, once every one has a row for each image.

    Args:
        columns: name -> tensor.
        n: how many images there are.

    Raises:
        TypeError, ValueError: what is no tensor, or has another number of rows; the column is named.
    """
    found = dict(columns)
    for name, column in found.items():
        if not isinstance(column, Tensor):
            raise TypeError(f"column {name!r} must be a torch.Tensor, got {type(column).__name__}")
        if column.ndim == 0 or len(column) != n:
            raise ValueError(f"column {name!r} must have {n} rows, one an image, got shape {list(column.shape)}")
    return found


def checked_info(info: Mapping[str, Any]) -> dict[str, Any]:
    """What a set's constructor was given as `info`, as a JSON file would give it back, so that saving changes nothing.

    Args:
        info: a mapping of JSON values; tuples become lists, NumPy numbers Python's.

    Raises:
        TypeError: no mapping, or a value that JSON does not have.
    """
    try:
        copied: dict[str, Any] = json.loads(json.dumps(dict(info), default=_plain))
    except (TypeError, ValueError) as error:
        raise TypeError(f"info must be a mapping of JSON values: {error}") from error
    return copied


def _plain(value: Any) -> Any:
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"{type(value).__name__} is no JSON value")
