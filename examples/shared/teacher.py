"""Teacher that labels images, and sets made from it: inverted, or stitched from the crops that it recognizes."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import partial
from typing import Any

import torch
from torch import nn

from distillkit import LabeledImages
from distillkit.augment import CropFlip
from distillkit.condense import stitch
from distillkit.fingerprint import set_fingerprint
from distillkit.generate import invert
from distillkit.networks import ConvNet, build
from distillkit.rng import derive
from distillkit.training import Protocol, train

_KEPT: dict[Any, Any] = {}


def kept(key: Hashable, make: Callable[[], nn.Module]) -> nn.Module:
    """Return the result of `make`, or its earlier result for this key. The last two are kept in memory."""
    if key not in _KEPT:
        for old in list(_KEPT)[:-1]:
            del _KEPT[old]
        _KEPT[key] = make()
    return _KEPT[key]


def untrained_teacher(real: LabeledImages) -> ConvNet:
    """Return a ConvNet of width 32 with batch normalization for the images of a set."""
    depth = 3 if min(real.shape[1:]) >= 28 else 2
    return ConvNet(real.shape, real.num_classes, width=32, depth=depth, norm="batch")


def train_teacher(real: LabeledImages, images: int) -> nn.Module:
    """Train a teacher on real images.

    Args:
        real: the real images.
        images: number of images that the training sees, with repetition; at most 60 epochs.
    """

    def fresh() -> nn.Module:
        epochs, augment = max(1, min(60, images // len(real))), CropFlip(real.normalization, pad=2, flip=0.0)
        protocol = Protocol(epochs, lr=0.02, batch=64, schedule="cosine", augment=augment)
        network = build(partial(untrained_teacher, real), derive(0, "teacher")).to(real.images)
        return train(network, real, protocol, generator=derive(0, "order"), progress=False)

    return kept((set_fingerprint(real.to("cpu")), images), fresh)


def inverted(
    real: LabeledImages, *, ipc: int, steps: int, lr: float, images: int, generator: int, progress: bool = False
) -> LabeledImages:
    """Train a network with batch normalization on the real images, and invert it (DeepInversion).

    Args:
        real: the real images, which only the network sees.
        ipc: number of images per class.
        steps: number of steps on the pixels.
        lr: learning rate of the pixels.
        images: number of images that the network's training sees.
        generator: seed.
        progress: whether to show a progress bar.
    """
    targets = torch.arange(real.num_classes).repeat_interleave(ipc)
    weights: dict[str, Any] = {"batch_norm": 1.0, "total_variation": 1e-3, "image_l2": 1e-4, "disagreement": 0.0}
    found = invert(
        train_teacher(real, images), targets, shape=real.shape, steps=steps, lr=lr, generator=generator,
        normalization=real.normalization, progress=progress, **weights,
    )  # fmt: skip
    return real.replace(images=found.images.to(real.images), labels=found.labels, columns={}, info=dict(found.info))


def stitched(
    real: LabeledImages, *, ipc: int, crops: int, images: int, generator: int, progress: bool = False
) -> LabeledImages:
    """Train the teacher on the real images, and stitch the crops that it recognizes best (RDED).

    Args:
        real: the real images.
        ipc: number of images per class.
        crops: number of crops of each real image that are compared.
        images: number of images that the teacher's training sees.
        generator: seed.
        progress: whether to show a progress bar.
    """
    observer = train_teacher(real, images)
    return stitch(real, observer=observer, ipc=ipc, crops=crops, generator=generator, progress=progress)
