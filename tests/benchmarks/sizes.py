"""Sizes of the benchmarks, and random images and networks of these sizes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from distillkit import LabeledImages
from distillkit.networks import ConvNet, build
from distillkit.normalization import IDENTITY
from distillkit.rng import derive


@dataclass(frozen=True)
class Sizes:
    """Sizes of all benchmarks.

    Attributes:
        classes, ipc, side, width: of the sets, and of ConvNet-3.
        real, real_gm: real images a class of distribution and of gradient matching.
        inverted: images that are inverted together.
        records, private_width: of a private step.
        tested: images of an evaluation.
        lenet, convnet: (clients, images of each) of a round of FedAvg.
        condensing: (clients, real images a class) of a round of FedDM.
        batch: of a client.
    """

    classes: int = 10
    ipc: int = 10
    side: int = 32
    width: int = 128
    real: int = 256
    real_gm: int = 64
    inverted: int = 128
    records: int = 64
    private_width: int = 64
    tested: int = 1000
    lenet: tuple[int, int] = (10, 500)
    convnet: tuple[int, int] = (4, 128)
    condensing: tuple[int, int] = (2, 32)
    batch: int = 32

    @property
    def shape(self) -> tuple[int, int, int]:
        """Return the shape of an image."""
        return 3, self.side, self.side


FULL = Sizes()
TINY = Sizes(
    classes=3, ipc=2, side=8, width=4, real=6, real_gm=5, inverted=4, records=5, private_width=4, tested=20,
    lenet=(2, 6), convnet=(2, 6), condensing=(2, 4), batch=4,
)  # fmt: skip


def images(shape: tuple[int, int, int], classes: int, each: int, *keys: int) -> LabeledImages:
    """Return random images, class by class."""
    labels = torch.arange(classes).repeat_interleave(each)
    pixels = torch.randn(len(labels), *shape, generator=derive(0, "images", *keys))
    return LabeledImages(pixels, labels, num_classes=classes, normalization=IDENTITY)


def convnet(s: Sizes, width: int | None = None, seed: int = 0) -> Any:
    """Return a ConvNet-3 in eval mode."""
    return build(lambda: ConvNet(s.shape, s.classes, width=width or s.width), seed).eval()
