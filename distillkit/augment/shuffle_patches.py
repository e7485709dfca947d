"""Augmentation that shuffles the patches of an image."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from distillkit._utils import check
from distillkit._utils.options import PositiveInt, check_options
from distillkit.augment._validation import Augmentation, apply_augmentation, require_augmentation
from distillkit.rng import as_generator


@dataclass(frozen=True)
class ShufflePatches:
    """Augmentation that shuffles the patches of images that `condense.stitch` made of several crops.

    Pass it as `augment=`, or call it: `ShufflePatches(2)(images, generator)`. RDED uses it for training, so that
    networks do not depend on the position of a crop in the image. Each image has its own random order.

    The image is divided into `factor` x `factor` patches. The columns of patches are permuted, and then the rows of
    patches. If `factor` does not divide a side, the first patches are one pixel larger, as in `stitch`.

    Args:
        factor: number of patches along each side, equal to the `factor` of `stitch`. With 1, images are not shuffled,
            and no random numbers are drawn.
        augment: augmentation that is applied to the shuffled images, or None. RDED uses `ResizedCrop(min_scale=1 /
            factor)`.

    Deviation: if `factor` does not divide a side, the code of RDED's authors drops the last pixels; here all pixels are
    kept.
    """

    factor: PositiveInt = 2
    augment: Augmentation | None = None

    def __post_init__(self) -> None:
        check_options(self)
        require_augmentation(self.augment)

    def __call__(self, images: Tensor, generator: int | torch.Generator, *, siamese: bool = False) -> Tensor:
        """Shuffle the patches of a batch of images, and apply the option `augment` to the result.

        Args:
            images: float [N, C, H, W].
            generator: int seed, or generator for all random draws.
            siamese: whether to draw one order of patches and one augmentation for the whole batch.

        Returns:
            The augmented images, float [N, C, H, W], with the same dtype and device.
        """
        check.batch_of_images(images, values=False)
        if not len(images):
            return images
        if self.factor > min(images.shape[2:]):
            h, w = images.shape[2:]
            raise ValueError(f"factor={self.factor} must be at most the shorter side of the images, {h}x{w} pixels")
        generator = as_generator(generator)
        count = 1 if siamese else len(images)
        if self.factor > 1:
            for dim in (3, 2):
                index = self._order(images.shape[dim], count, generator).to(images.device, non_blocking=True)
                view = [-1 if d == 0 else len(index[0]) if d == dim else 1 for d in range(4)]
                images = images.gather(dim, index.view(view).expand(images.shape))
        return images if self.augment is None else apply_augmentation(self.augment, images, generator, siamese=siamese)

    def _order(self, side: int, count: int, generator: torch.Generator) -> Tensor:
        """Draw `count` random orders of the patches along one side of an image. This side is `side` pixels long.

        Return the index of the pixel that moves to each position along the side, int64 [count, side].
        """
        sizes = torch.tensor([side // self.factor + (k < side % self.factor) for k in range(self.factor)])
        patch = torch.arange(self.factor).repeat_interleave(sizes)
        place = torch.rand(count, self.factor, generator=generator, dtype=torch.float64).argsort(1)
        return place[:, patch].argsort(dim=1, stable=True)
