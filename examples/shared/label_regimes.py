"""Accuracy of a set under three kinds of labels, and with other networks."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from safetensors.torch import load_file, save_file
from torch import nn
from torchvision.models import VisionTransformer

from distillkit import LabeledImages
from distillkit.evaluate import evaluate
from distillkit.labels import CutMix, Relabel, soft_labels
from distillkit.locking import locked
from distillkit.networks import KeepInit, named_network
from distillkit.rng import derive
from distillkit.sets import TiledImages
from distillkit.study import Job
from distillkit.training import Protocol, accuracy
from shared.teacher import train_teacher, untrained_teacher


def _teacher_of(job: Job, real: LabeledImages, images: int) -> nn.Module:
    """Return the task's teacher, which all runs share (`teacher-TASK.safetensors` in the study's folder)."""
    path = job.folder.parent / f"teacher-{job.task.name}.safetensors"
    with locked(path.with_suffix(".lock"), f"the teacher {path}", wait=3600.0):
        if not path.exists():
            unfinished = path.with_suffix(".unfinished")
            save_file(train_teacher(real, images).state_dict(), unfinished)
            unfinished.replace(path)
    teacher = untrained_teacher(real)
    teacher.load_state_dict(load_file(path))
    return teacher.to(real.images)


def per_view(hard: Protocol, teacher: nn.Module) -> Protocol:
    """Return RDED's protocol with a teacher's labels of every view, with the epochs, batch and augmentation of another.

    Args:
        hard: protocol with hard labels.
        teacher: network that labels the views.
    """
    labels = Relabel(teacher, temperature=20.0, mix=CutMix())
    return replace(
        hard, epochs=hard.num_epochs, lr=0.002, weight_decay=0.01, optimizer="adamw", schedule="half-cosine",
        relabel=labels,
    )  # fmt: skip


def vit(shape: tuple[int, int, int], classes: int) -> VisionTransformer:
    """Return a small vision transformer with patches of 4 x 4 pixels.

    Args:
        shape: shape (C, H, W) of an image; H and W are equal, and multiples of 4.
        classes: number of classes.
    """
    network = VisionTransformer(shape[1], 4, 4, num_heads=4, hidden_dim=64, mlp_dim=128, num_classes=classes)
    network.conv_proj = nn.Conv2d(shape[0], 64, 4, 4)
    return network


TRANSFER: dict[str, Callable[..., nn.Module]] = {"resnet8": partial(named_network, "resnet8"), "vit": KeepInit(vit)}
"""Further networks, by name: functions of a shape and a number of classes."""


def label_regimes(
    small: LabeledImages, job: Job, *, protocol: Protocol, teacher_images: int, transfer: Sequence[str] = ()
) -> dict[str, Any]:
    """Train networks on a set with a teacher's labels, and other networks with hard labels.

    Args:
        small: the set, with hard labels.
        job: the run.
        protocol: protocol with hard labels.
        teacher_images: number of images that the training of the teacher sees.
        transfer: names in `TRANSFER` of further networks to train with hard labels.

    Returns:
        The columns `labels` (accuracy with one row per image, with labels per view, and of the teacher), `transfer`
        (accuracy of each further network), `cpu_seconds_labels` (CPU seconds of each training) and `bytes` (of the
        images as float32, and of the labels: 8 bytes for a class, float32 rows, and stored logits in half precision).
    """
    real, test = (part.to(job.device) for part in job.task.pooled(job.split, keep=job.keep))
    teacher = _teacher_of(job, real, teacher_images)
    network = partial(job.task.network(job.split), small.num_classes)
    seconds = dict[str, float]()

    def measured(name: str, data: LabeledImages, protocol: Protocol, factory: Any = network) -> float:
        began, seed = time.process_time(), derive(job.seed, "evaluate")
        options: dict[str, Any] = {"num_networks": 1, "protocol": protocol, "generator": seed, "progress": job.progress}
        found = evaluate(data, test, factory, **options).accuracy
        seconds[name] = time.process_time() - began
        return found

    views = per_view(protocol, teacher)
    labels = {
        "row": measured("row", soft_labels(small, teacher, pool=real), protocol),
        "view": measured("view", small, views), "teacher": accuracy(teacher, test),
    }  # fmt: skip
    others = {
        name: measured(name, small, protocol, partial(TRANSFER[name], small.shape, small.num_classes))
        for name in transfer
    }
    size, classes = len(small), small.num_classes
    pixels = small.stored if isinstance(small, TiledImages) else small.images
    stored = {
        "images": 4 * pixels.numel(), "hard": 8 * size, "row": 4 * size * classes,
        "view": 2 * views.num_epochs * size * classes,
    }  # fmt: skip
    return {"labels": labels, "transfer": others, "cpu_seconds_labels": seconds, "bytes": stored}
