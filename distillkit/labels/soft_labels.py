"""One soft row for each image."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import nn

from distillkit._utils import check
from distillkit.labels._teacher import describe_teacher, require_teacher, teacher_logits, try_teacher
from distillkit.sets import Images, LabeledImages, as_set
from distillkit.sets._class_index import class_labels

__all__ = ["soft_labels"]


class Guarantee(Protocol):
    """Guarantee of differential privacy, such as a `distillkit.privacy.Guarantee`."""

    def info(self) -> dict[str, Any]:
        """Return the guarantee as JSON values with the key "epsilon"."""


def soft_labels(
    small: Images,
    teacher: nn.Module,
    *,
    temperature: float = 1.0,
    pool: Images | None = None,
    guarantee: Guarantee | None = None,
) -> LabeledImages:
    """Label every image of a set with one row of probabilities from a teacher.

    The set is then trained on as it is: `train` and `evaluate` use the cross-entropy of the rows. Use `Relabel` instead
    for new labels of every augmented view.

    Args:
        small: the set to label.
        teacher: trained network in the set's classes and normalization.
        temperature: temperature T > 0 of the softmax.
        pool: labeled images on which the teacher is tried first, best the real training images. Default: the set
            itself, with its present labels. The result publishes the accuracy, so no pool is accepted with a
            `guarantee`.
        guarantee: guarantee of differential privacy for the images and the teacher together, for a private set: train
            the teacher with the ledger that the condensation charged, and pass `ledger.guarantee()`. Default: no
            guarantee covers the teacher, so the result has none either.

    Returns:
        The set with rows of probabilities as labels. Its columns `logits` [N, K] and `class` [N] hold the teacher's
        logits and the former labels; `info["soft_labels"]` names the teacher by class and fingerprint. If the images
        are private, `info["epsilon"]` is that of `guarantee`, or None with the reason.

    Raises:
        TypeError, ValueError: an argument is invalid, the teacher is not clearly better than chance on the pool, or a
            guarantee is given with a pool or for images that have none.

    Papers: Qin et al., "A Label is Worth a Thousand Images in Dataset Distillation" (NeurIPS 2024); Guo et al., DATM
    (ICLR 2024), which learns such rows as logits.
    """
    small = as_set(small, name="small")
    temperature = check.real_number(temperature, "temperature", above=0)
    if not len(small):
        raise ValueError("small must hold at least one image, got an empty set")
    require_teacher(teacher, small.images, small.num_classes)
    if guarantee is not None and pool is not None:
        raise ValueError("pool must be None with a guarantee, because it would not cover the published accuracy on it")
    info = _with_guarantee(small.info, guarantee)
    labelled = as_set(pool, name="pool") if pool is not None else small
    small.require_compatible(labelled, names=("small", "pool"))
    accuracy = try_teacher(teacher, labelled, name="small" if pool is None else "pool")
    logits = teacher_logits(teacher, small.images)
    made = {**describe_teacher(teacher), "temperature": temperature, "teacher_accuracy": accuracy}
    return small.replace(
        labels=(logits / temperature).softmax(1).to(small.images.dtype),
        columns={**small.columns, "logits": logits, "class": class_labels(small).to(torch.int64)},
        info={**info, "soft_labels": made},
    )


def _with_guarantee(info: dict[str, Any], guarantee: Guarantee | None) -> dict[str, Any]:
    """Return a set's `info` in which the epsilon covers the labels too, or is None."""
    own = info.get("epsilon")
    if guarantee is not None:
        if own is None:
            raise ValueError("guarantee must be None, because small has no epsilon that could cover its images")
        return {**info, **guarantee.info()}
    if own is None:
        return info
    reason = f"the labels come from a teacher without a guarantee; the images alone have epsilon {own:g}"
    return {**info, "epsilon": None, "reason": reason}
