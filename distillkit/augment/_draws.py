"""Source of random parameters of augmentations."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["Draws"]


class Draws:
    """Source of random parameters of an augmentation.

    Each method returns `count` values: one per image, or a single one for a Siamese augmentation. Random integers are
    on the CPU; other values are on the images' device.
    """

    def __init__(self, images: Tensor, generator: torch.Generator, count: int) -> None:
        self.images, self.generator, self.count = images, generator, count

    def uniform(self, low: float, high: float) -> Tensor:
        drawn = torch.rand(self.count, generator=self.generator, dtype=torch.float64) * (high - low) + low
        return drawn.to(self.images).view(-1, 1, 1, 1)

    def integers(self, low: int, high: int) -> Tensor:
        return torch.randint(low, high, (self.count,), generator=self.generator)
