"""Indices of the images of each class of a set, and random choice of images by class."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeVar, cast

import torch
from torch import Tensor

from distillkit._utils import check
from distillkit._utils.user_warnings import warn
from distillkit.sets._stored import RealImages
from distillkit.sets._validation import class_of_rows

Set = TypeVar("Set", bound=RealImages)


def class_rows(real: RealImages, classes: Sequence[int] | None = None) -> dict[int, Tensor]:
    """Return a mapping from each class to the indices of its images, as ascending int64 tensors on the CPU.

    Args:
        real: set with class indices as labels.
        classes: requested classes. Default: all classes with images.

    Raises:
        ValueError: the labels are not class indices, the set is empty, or `classes` is empty, repeats a class, contains
            a value that is out of range, or contains a class without images.
    """
    check.default_device()
    if real.labels.ndim != 1:
        raise ValueError(f"labels must be class indices [N], got rows of shape {list(real.labels.shape)}")
    if not len(real):
        raise ValueError("images must hold at least one image, got an empty set")
    labels = real.labels.cpu()
    counts = torch.bincount(labels, minlength=real.num_classes)
    rows = torch.argsort(labels, stable=True).split(counts.tolist())
    owned = [c for c in range(real.num_classes) if len(rows[c])]
    wanted = owned if classes is None else class_indices(classes, real.num_classes)
    absent = sorted(set(wanted) - set(owned))
    if absent:
        raise ValueError(f"classes must have at least one image each, but {absent} have none; the data has {owned}")
    return {c: rows[c] for c in wanted}


def class_indices(classes: Sequence[int], num_classes: int) -> list[int]:
    """Check an argument `classes`, and return the classes as ascending ints.

    Args:
        classes: distinct class indices, ints or one-element tensors.
        num_classes: number of classes, K. The indices must be in [0, K).

    Raises:
        TypeError, ValueError: `classes` is not a sequence of ints, is empty, repeats a class, or has a value that is
            out of range.
    """
    listed = check.sequence(classes, "classes", "class indices")
    chosen = sorted(check.positive_int(int(c) if isinstance(c, Tensor) else c, "classes", least=0) for c in listed)
    if not chosen or len(set(chosen)) != len(chosen) or chosen[-1] >= num_classes:
        raise ValueError(f"classes must be distinct and in [0, {num_classes}), at least one, got {list(classes)}")
    return chosen


def random_rows(
    rows: Mapping[int, Tensor], counts: Sequence[int], generator: torch.Generator
) -> tuple[Tensor, list[int]]:
    """Draw random images of each class without replacement.

    If a class has too few images, all of them are drawn, and the missing number is drawn from them with replacement.

    Args:
        rows: mapping from classes to the indices of their images, as `class_rows` returns it.
        counts: number of images to draw from each class, in the order of `rows`.
        generator: CPU generator, whose state advances.

    Returns:
        The indices of the drawn images, int64 [sum of counts], sorted by class, and a list of the classes with repeated
        images.
    """
    chosen, short = list[Tensor](), list[int]()
    for (c, own), count in zip(rows.items(), counts, strict=True):
        chosen += [own[torch.randperm(len(own), generator=generator)[:count]]]
        if len(own) < count:
            short += [c]
            chosen += [own[torch.randint(len(own), (count - len(own),), generator=generator)]]
    return torch.cat(chosen), short


def warn_of_repeats(name: str, wanted: int, counts: dict[int, int]) -> None:
    """Warn about classes that have fewer images than requested. The caller repeats the images of these classes.

    Args:
        name: name of the argument with the requested number, used in the warning.
        wanted: requested number of images per class.
        counts: number of images by class.
    """
    short = {c: n for c, n in counts.items() if n < wanted}
    if short:
        listed = ", ".join(f"{c} ({n})" for c, n in list(short.items())[:5]) + (", ..." if len(short) > 5 else "")
        warn(
            f"{name}={wanted} is more than {len(short)} of {len(counts)} classes have: {listed}; their images are "
            "repeated, see info['with_replacement']"
        )


def class_labels(data: RealImages) -> Tensor:
    """Return the class index of each image, int64 [N].

    Args:
        data: a set with class indices or soft labels as labels. With soft labels, the class is read from
            `data.columns["class"]`. Without this column, it is the index of the largest entry of the soft label.
    """
    return class_of_rows(data.labels, data.columns)


def with_class_labels(data: Set) -> Set:
    """Return the set with class indices as labels. Soft labels are replaced by the class of each image.

    Args:
        data: a set with class indices or soft labels as labels. With soft labels, the class is read from
            `data.columns["class"]`. Without this column, it is the index of the largest entry of the soft label.
    """
    if data.labels.ndim == 1:
        return data
    return cast(Set, data._with(labels=class_labels(data).to(data.labels.device)))
