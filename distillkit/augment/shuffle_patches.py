"""Random order of the patches of an image."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from distillkit._utils import check
from distillkit._utils.options import PositiveInt, check_options
from distillkit.augment._validation import Augmentation, apply_augmentation, require_augmentation
from distillkit.rng import as_generator

__all__ = ["ShufflePatches"]


@dataclass(frozen=True)
class ShufflePatches:
    """Random order of the columns and rows of patches, for images that `condense.stitch` made of several crops.

    Pass it as `augment=`, or call it: `ShufflePatches(2)(images, generator)`. RDED trains on such views, so that a crop
    does not depend on its place in the mosaic. Each image has its own order.

    The image is divided into `factor` x `factor` patches. The columns of patches are permuted, then the rows. Where
    `factor` does not divide a side, the first patches are one pixel larger, as in `stitch`.

    Args:
        factor: number of patches along each side, as in the set. 1 changes nothing and draws nothing.
        augment: augmentation of the shuffled images, or None. RDED uses `ResizedCrop(min_scale=1 / factor)`.

    Deviation: where `factor` does not divide a side, the authors' code drops the last pixels.
    """

    factor: PositiveInt = 2
    augment: Augmentation | None = None

    def __post_init__(self) -> None:
        check_options(self)
        require_augmentation(self.augment)

    def __call__(self, images: Tensor, generator: int | torch.Generator, *, siamese: bool = False) -> Tensor:
        """Augment a batch.

        Args:
            images: float [N, C, H, W].
            generator: source of all random draws.
            siamese: whether to draw one order for the whole batch.

        Returns:
            Augmented images, float [N, C, H, W], same dtype and device.
        """
        if not isinstance(images, Tensor) or images.ndim != 4 or not images.is_floating_point():
            check.batch_of_images(images)
        if self.factor > min(images.shape[2:]):
            h, w = images.shape[2:]
            raise ValueError(f"factor={self.factor} must be at most the shorter side of the images, {h}x{w} pixels")
        generator = as_generator(generator)
        count = 1 if siamese else len(images)
        if self.factor > 1:
            for dim in (3, 2):
                index = self._order(images.shape[dim], count, generator).to(images.device)
                view = [-1 if d == 0 else len(index[0]) if d == dim else 1 for d in range(4)]
                images = images.gather(dim, index.view(view).expand(images.shape))
        return images if self.augment is None else apply_augmentation(self.augment, images, generator, siamese=siamese)

    def _order(self, side: int, count: int, generator: torch.Generator) -> Tensor:
        """Return the positions of a side in the order of the shuffled patches, int64 [count, side]."""
        sizes = torch.tensor([side // self.factor + (k < side % self.factor) for k in range(self.factor)])
        patch = torch.arange(self.factor).repeat_interleave(sizes)
        place = torch.rand(count, self.factor, generator=generator, dtype=torch.float64).argsort(1)
        return place[:, patch].argsort(dim=1, stable=True)
