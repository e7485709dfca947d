"""One soft row for each image."""

from __future__ import annotations

import torch
from torch import nn

from distillkit._utils import check
from distillkit.labels._teacher import describe_teacher, require_teacher, teacher_logits, try_teacher
from distillkit.sets import Images, LabeledImages, as_set
from distillkit.sets._class_index import class_labels

__all__ = ["soft_labels"]


def soft_labels(
    small: Images, teacher: nn.Module, *, temperature: float = 1.0, pool: Images | None = None
) -> LabeledImages:
    """Label every image of a set with one row of probabilities from a teacher.

    The set is then trained on as it is: `train` and `evaluate` use the cross-entropy of the rows. Use `Relabel` instead
    for new labels of every augmented view.

    Args:
        small: the set to label.
        teacher: trained network in the set's classes and normalization.
        temperature: temperature T > 0 of the softmax.
        pool: labeled images on which the teacher is tried first, best the real training images. Default: the set
            itself, with its present labels.

    Returns:
        The set with rows of probabilities as labels. Its columns `logits` [N, K] and `class` [N] hold the teacher's
        logits and the former labels; `info["soft_labels"]` names the teacher by class and fingerprint.

    Raises:
        TypeError, ValueError: an invalid argument, or a teacher that is not clearly better than chance on the pool.

    Papers: Qin et al., "A Label is Worth a Thousand Images in Dataset Distillation" (NeurIPS 2024); Guo et al., DATM
    (ICLR 2024), which learns such rows as logits.
    """
    small = as_set(small, name="small")
    temperature = check.real_number(temperature, "temperature", above=0)
    if not len(small):
        raise ValueError("small must hold at least one image, got an empty set")
    require_teacher(teacher, small.images, small.num_classes)
    labelled = as_set(pool, name="pool") if pool is not None else small
    small.require_compatible(labelled, names=("small", "pool"))
    accuracy = try_teacher(teacher, labelled, name="small" if pool is None else "pool")
    logits = teacher_logits(teacher, small.images)
    made = {**describe_teacher(teacher), "temperature": temperature, "teacher_accuracy": accuracy}
    return small.replace(
        labels=(logits / temperature).softmax(1).to(small.images.dtype),
        columns={**small.columns, "logits": logits, "class": class_labels(small).to(torch.int64)},
        info={**small.info, "soft_labels": made},
    )
