"""Source of random parameters of augmentations."""

from __future__ import annotations

import torch
from torch import Tensor

from distillkit._utils.devices import is_accelerator


class Draws:
    """Source of random parameters of an augmentation.

    Each method returns `count` values: one per image, or a single one for a Siamese augmentation. Random integers are
    on the CPU; other values are on the images' device. For an accelerator, a single value is a scalar on the CPU, which
    needs no copy; other values are copied without waiting.
    """

    def __init__(self, images: Tensor, generator: torch.Generator, count: int) -> None:
        self.images, self.generator, self.count = images, generator, count

    def uniform(self, low: float, high: float) -> Tensor:
        drawn = torch.rand(self.count, generator=self.generator, dtype=torch.float64) * (high - low) + low
        if self.count == 1 and is_accelerator(self.images.device):
            return drawn.to(self.images.dtype).view(())
        return drawn.to(self.images, non_blocking=True).view(-1, 1, 1, 1)

    def integers(self, low: int, high: int) -> Tensor:
        return torch.randint(low, high, (self.count,), generator=self.generator)


def choose(condition: Tensor, first: Tensor, second: Tensor) -> Tensor:
    """Return images from `first` where the condition of an image holds, and from `second` elsewhere."""
    if not condition.ndim:
        return first if bool(condition) else second
    return torch.where(condition, first, second)
