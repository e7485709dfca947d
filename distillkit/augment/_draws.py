"""Source of random parameters of augmentations."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["Draws"]


class Draws:
    """Source of random parameters of an augmentation, drawn per image or, if Siamese, once per batch.

    `count` is the number of parameters per draw: the number of images, or 1. Integer parameters stay on the CPU.
    """

    def __init__(self, images: Tensor, generator: torch.Generator, count: int) -> None:
        self.images, self.generator, self.count = images, generator, count

    def uniform(self, low: float, high: float) -> Tensor:
        drawn = torch.rand(self.count, generator=self.generator, dtype=torch.float64) * (high - low) + low
        return drawn.to(self.images).view(-1, 1, 1, 1)

    def integers(self, low: int, high: int) -> Tensor:
        return torch.randint(low, high, (self.count,), generator=self.generator)
