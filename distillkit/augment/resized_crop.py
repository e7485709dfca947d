"""Random crop of random area and aspect ratio, resized to the size of the image, with horizontal flip."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from distillkit._utils import check
from distillkit._utils.options import CheckedOptions, Fraction
from distillkit.augment._draws import Draws, choose
from distillkit.rng import as_generator

_TRIALS = 10
_RATIO = (3 / 4, 4 / 3)


@dataclass(frozen=True)
class ResizedCrop(CheckedOptions):
    """Random crop of random area and aspect ratio, enlarged to the size of the image, with horizontal flip.

    Pass it as `augment=`, or call it: `ResizedCrop()(images, generator)`. This is the usual training augmentation for
    ImageNet (torchvision's `RandomResizedCrop` and `RandomHorizontalFlip`), which SRe2L and RDED use. Each image has
    its own crop.

    The area of a crop, as a fraction of the image's area, is uniform in [min_scale, 1], and the aspect ratio is
    log-uniform in [3/4, 4/3]. As in torchvision, ten crops are drawn, and the first one that fits into the image is
    used. If none fits, the whole image is used. The crop is enlarged bilinearly.

    Args:
        min_scale: smallest area of a crop, as a fraction of the image's area. 1 keeps the whole image.
        flip: probability of the flip. Use 0 for digits.

    Deviation: torchvision interpolates between pixels of the crop only. Here, pixels next to the crop contribute to the
    interpolation at its border.
    """

    min_scale: Fraction = 0.08
    flip: Fraction = 0.5

    def __call__(self, images: Tensor, generator: int | torch.Generator, *, siamese: bool = False) -> Tensor:
        """Augment a batch of images.

        Args:
            images: float [N, C, H, W].
            generator: int seed, or generator for all random draws. The draws depend on H, W and (if `siamese` is False)
                N, but not on pixel values.
            siamese: whether to draw the crop and the flip once for the whole batch.

        Returns:
            The augmented images, float [N, C, H, W], with the same dtype and device.
        """
        check.batch_of_images(images, values=False)
        if not len(images):
            return images
        generator = as_generator(generator)
        count, (h, w) = 1 if siamese else len(images), images.shape[2:]
        mirrored = Draws(images, generator, count).uniform(0, 1) < self.flip
        if self.min_scale < 1:
            images = _resized(images, *self._boxes(count, h, w, generator))
        return choose(mirrored, images.flip(3), images)

    def _boxes(self, count: int, h: int, w: int, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Draw the top, left, height and width of `count` crops of an image with `h` x `w` pixels, in pixels."""
        area, ratio, down, right = torch.rand(4, count, _TRIALS, generator=generator, dtype=torch.float64)
        area = (self.min_scale + (1 - self.min_scale) * area) * h * w
        ratio = (math.log(_RATIO[0]) + math.log(_RATIO[1] / _RATIO[0]) * ratio).exp()
        height, width = (area / ratio).sqrt().round(), (area * ratio).sqrt().round()
        fits = (height >= 1) & (width >= 1) & (height <= h) & (width <= w)
        first = fits.to(torch.uint8).argmax(1, keepdim=True)
        height = torch.where(fits, height, h).gather(1, first)[:, 0]
        width = torch.where(fits, width, w).gather(1, first)[:, 0]
        top = (down.gather(1, first)[:, 0] * (h - height + 1)).floor()
        left = (right.gather(1, first)[:, 0] * (w - width + 1)).floor()
        return top, left, height, width


def _resized(images: Tensor, top: Tensor, left: Tensor, height: Tensor, width: Tensor) -> Tensor:
    h, w = images.shape[2:]
    zero = torch.zeros_like(top)
    rows = [[width / w, zero, (2 * left + width) / w - 1], [zero, height / h, (2 * top + height) / h - 1]]
    theta = torch.stack([torch.stack(row, 1) for row in rows], 1).to(images, non_blocking=True)
    grid = F.affine_grid(theta, [len(theta), *images.shape[1:]], align_corners=False)
    grid = grid.expand(len(images), -1, -1, -1)
    return F.grid_sample(images, grid, mode="bilinear", padding_mode="border", align_corners=False)
