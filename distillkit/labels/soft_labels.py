"""Soft labels from a teacher, one for each image."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn

from distillkit._utils import check
from distillkit.labels._teacher import describe_teacher, teacher_logits, try_teacher
from distillkit.networks._base import require_network
from distillkit.networks._validation import check_network
from distillkit.sets import Images, LabeledImages, StoredImages, as_set
from distillkit.sets._class_index import class_labels
from distillkit.sets._devices import on_device
from distillkit.sets._info import GUARANTEE, combined_info
from distillkit.sets.as_set import open_set


@runtime_checkable
class Guarantee(Protocol):
    """Interface of guarantees of differential privacy, such as `distillkit.privacy.Guarantee`."""

    def info(self) -> dict[str, Any]:
        """Return the guarantee as a dictionary of JSON values. It has the key "epsilon", and may have other keys."""


@on_device("small", "pool", makes=False)
def soft_labels(
    small: Images,
    teacher: nn.Module,
    *,
    temperature: float = 1.0,
    pool: Images | StoredImages | None = None,
    guarantee: Guarantee | None = None,
    device: torch.device | str | None = None,
    precision: str | None = None,
) -> LabeledImages:
    """Label every image of a set with the probabilities that a teacher predicts for it.

    You can pass the result to `train` and `evaluate`, which use the cross-entropy with soft labels. To get new labels
    for every augmented version of an image, use `Relabel` instead.

    Args:
        small: the set to label.
        teacher: network that was trained on the same classes, with the same normalization.
        temperature: temperature T > 0 of the softmax.
        pool: labeled images on which the teacher's accuracy is checked first, preferably the real training images.
            Default: the set `small` with its current labels. The accuracy is stored in the result's `info`. A
            `guarantee` does not cover the accuracy on a pool, so pass only one of `pool` and `guarantee`.
        guarantee: guarantee of differential privacy that covers both the images and the teacher. Pass it if `small` was
            condensed with differential privacy: train the teacher with the same `privacy.Ledger` as the condensation,
            and pass `ledger.guarantee()`. Default: None, so the result has no guarantee.
        device: device that computes, or "auto"; results return to the device of `small`. Default: nothing moves.
        precision: "bf16" or "tf32" for faster, less exact products; see `docs/gpu.md`. Default: float32.

    Returns:
        The set with soft labels, float [N, K]. Its columns `logits` [N, K] and `class` [N] contain the teacher's logits
        and the previous labels. `info["soft_labels"]` records the name of the teacher's Python class, and a fingerprint
        of its weights. If `small` has a privacy guarantee, `info["epsilon"]` is the epsilon of `guarantee`. If
        `guarantee` is None, `info["epsilon"]` is None, and `info["reason"]` states why.

    Raises:
        TypeError, ValueError: an argument is invalid, the teacher's accuracy on the pool is not clearly above chance,
            or `guarantee` is given together with `pool`, for images that have no guarantee, or with a smaller epsilon,
            another delta or another relation than that of the images.

    Papers: Qin et al., "A Label is Worth a Thousand Images in Dataset Distillation" (NeurIPS 2024); Guo et al., DATM
    (ICLR 2024), which learns soft labels as logits.
    """
    small = as_set(small, name="small")
    temperature = check.temperature(temperature)
    if not len(small):
        raise ValueError("small must hold at least one image, got an empty set")
    network = require_network(teacher, "teacher")
    check_network(network, small.images, classes=small.num_classes, probabilities="refuse", name="teacher")
    if guarantee is not None and pool is not None:
        raise ValueError("pool must be None with a guarantee, because it would not cover the published accuracy on it")
    info = _with_guarantee(small.info, guarantee)
    labelled = open_set(pool, name="pool") if pool is not None else small
    small.require_compatible(labelled._empty, names=("small", "pool"))
    accuracy = try_teacher(teacher, labelled, name="small" if pool is None else "pool")
    logits = teacher_logits(teacher, small.images)
    made = {**describe_teacher(teacher), "temperature": temperature, "teacher_accuracy": accuracy}
    made |= {} if precision is None else {"precision": precision}
    return small.replace(
        labels=(logits / temperature).softmax(1).to(small.images.dtype),
        columns={**small.columns, "logits": logits, "class": class_labels(small).to(torch.int64)},
        info={**info, "soft_labels": made},
    )


def _with_guarantee(info: dict[str, Any], guarantee: Guarantee | None) -> dict[str, Any]:
    """Update the guarantee in the `info` of a set whose images get labels from a teacher."""
    if guarantee is None:
        return combined_info([info], "labels of a teacher without a guarantee")
    check.instance(guarantee, Guarantee, "guarantee", "a Guarantee, as ledger.guarantee() returns it")
    own, new = info.get("epsilon"), guarantee.info()
    if own is None:
        raise ValueError("guarantee must be None, because small has no epsilon that could cover its images")
    terms = [{name: stated.get(name) for name in ("delta", "relation")} for stated in (info, new)]
    if new.get("epsilon") is not None and (terms[0] != terms[1] or new["epsilon"] < own):
        raise ValueError(
            f"guarantee must cover the images and the teacher, but its epsilon {new['epsilon']:.4g} ({terms[1]}) is "
            f"not at least the images' {own:.4g} ({terms[0]}); pass the guarantee of the ledger that paid for both"
        )
    return {name: value for name, value in info.items() if name not in GUARANTEE} | new
