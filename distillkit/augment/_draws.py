"""Random parameters of augmentations."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["Draws"]


class Draws:
    """Random parameters for a batch, `count` at a time (one if Siamese). Integers stay on the CPU, for slicing."""

    def __init__(self, images: Tensor, generator: torch.Generator, count: int) -> None:
        self.images, self.generator, self.count = images, generator, count

    def uniform(self, low: float, high: float) -> Tensor:
        drawn = torch.rand(self.count, generator=self.generator, dtype=torch.float64) * (high - low) + low
        return drawn.to(self.images).view(-1, 1, 1, 1)

    def integers(self, low: int, high: int) -> Tensor:
        return torch.randint(low, high, (self.count,), generator=self.generator)
