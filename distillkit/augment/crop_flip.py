"""Standard augmentation of small images: random crop with black padding, horizontal flip, cutout."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from distillkit._utils import check
from distillkit._utils.options import Fraction, NonNegativeInt, check_options
from distillkit.augment._draws import Draws
from distillkit.augment._validation import Augment
from distillkit.normalization import Normalization
from distillkit.rng import as_generator

__all__ = ["CropFlip", "adapt_normalization"]


@dataclass(frozen=True)
class CropFlip:
    """Standard training augmentation of small images: crop, flip and optional cutout, drawn for each image.

    Pass it as `augment=`, or call it: `CropFlip(train.normalization)(images, generator)`.

    It takes a random crop of the image's size after padding with `pad` black pixels, then a horizontal flip and an
    optional cutout. The clients of VHL, FedCOG and the single-image method use this augmentation (torchvision's
    `RandomCrop(32, padding=4)` and `RandomHorizontalFlip()` before normalization).

    Padding is black, as if the images were padded before normalization. The normalized value of black differs by
    channel, so the normalization must be given. The cutout (DeVries and Taylor, 2017; `Cutout(16)` on CIFAR-100 in
    VHL's code, data_preprocessing/utils/utils.py) comes last and sets a square to 0 in normalized space, the mean
    color. The center can be any pixel, so part of the square may be outside.

    Args:
        normalization: normalization of the images; `IDENTITY` for pixels in [0, 1].
        pad: number of pixels added on each side, less than the images' height and width.
        flip: probability of the flip; use 0 for digits. The single-image method's code uses 0 for MedMNIST.
        cutout: side of the square in pixels, even (the authors' code rounds odd sides down to even ones) and at most
            the images' sides. 0 for no cutout.

    The result is differentiable in the images to any order. Whitened images (ZCA) are padded as pixels and whitened
    again.

    Raises:
        TypeError, ValueError: an option out of range; in a call, images that are too small or have another number of
            channels.
    """

    normalization: Normalization
    pad: NonNegativeInt = 4
    flip: Fraction = 0.5
    cutout: NonNegativeInt = 0

    def __post_init__(self) -> None:
        if not isinstance(self.normalization, Normalization):
            got = type(self.normalization).__name__
            raise TypeError(f"normalization must be the images' Normalization (train.normalization), got {got}")
        check_options(self)
        if self.cutout % 2:
            raise ValueError(f"cutout must be even, got {self.cutout}")

    def __call__(self, images: Tensor, generator: int | torch.Generator, *, siamese: bool = False) -> Tensor:
        """Augment a batch.

        Args:
            images: float [N, C, H, W] with this `normalization`, larger than `pad` and `cutout`.
            generator: source of all random draws. The draws depend on N (unless Siamese), H and W, never on pixel
                values.
            siamese: whether to draw one crop, flip and cutout for the whole batch, as in `DSA`.

        Returns:
            Augmented images, float [N, C, H, W], same dtype and device.
        """
        if not isinstance(images, Tensor) or images.ndim != 4 or not images.is_floating_point():
            check.batch_of_images(images)
        h, w = images.shape[2:]
        if self.pad >= min(h, w) or self.cutout > min(h, w):
            raise ValueError(
                f"pad={self.pad} and cutout={self.cutout} are too large for images of {h}x{w} pixels: pad must be "
                "less than both sides, cutout at most the shorter side"
            )
        draw = Draws(images, as_generator(generator), 1 if siamese else len(images))
        rows, columns = (draw.integers(0, 2 * self.pad + 1) - self.pad for _ in range(2))
        mirrored = draw.uniform(0, 1) < self.flip
        whitened = self.normalization.zca is not None
        seen = self.normalization.decode(images) if whitened else images
        black = seen.new_zeros(1, images.shape[1], 1, 1)
        seen = _shifted(seen, rows, columns, black if whitened else self.normalization.encode(black))
        seen = torch.where(mirrored, seen.flip(3), seen)
        seen = self.normalization.encode(seen) if whitened else seen
        if self.cutout:
            inside = [
                _near(draw.integers(0, side), self.cutout // 2, side).to(images.device).view(-1, 1, *shape)
                for side, shape in ((h, (h, 1)), (w, (1, w)))
            ]
            seen = seen.masked_fill(inside[0] & inside[1], 0.0)
        return seen


def adapt_normalization(augment: Augment, normalization: Normalization) -> Augment:
    """Return the augmentation for another normalization. Only a `CropFlip` changes, because it pads with black.

    Use this function to apply one augmentation to images with different normalizations.

    Args:
        augment: any augmentation.
        normalization: normalization of the images to augment.

    Raises:
        TypeError: not an augmentation, or not a normalization.
    """
    Normalization.require(normalization)
    if not callable(augment) or isinstance(augment, type):
        came = f"the class {augment.__name__}" if isinstance(augment, type) else type(augment).__name__
        raise TypeError(f"augment must be an augmentation, such as CropFlip(normalization), got {came}")
    return replace(augment, normalization=normalization) if isinstance(augment, CropFlip) else augment


def _shifted(x: Tensor, down: Tensor, right: Tensor, fill: Tensor) -> Tensor:
    """Shift each image: output pixel (i, j) is input pixel (i + down, j + right), or `fill` outside the image."""
    h, w = x.shape[2:]
    rows = (down.view(-1, 1, 1, 1) + torch.arange(h).view(h, 1)).to(x.device)
    columns = (right.view(-1, 1, 1, 1) + torch.arange(w)).to(x.device)
    there = (rows >= 0) & (rows < h) & (columns >= 0) & (columns < w)
    moved = x.gather(2, rows.clamp(0, h - 1).expand(len(x), x.shape[1], h, w))
    moved = moved.gather(3, columns.clamp(0, w - 1).expand(len(x), x.shape[1], h, w))
    return torch.where(there, moved, fill)


def _near(center: Tensor, reach: int, side: int) -> Tensor:
    """Return whether each position in [0, side) is in [center - reach, center + reach), as bool [N, side]."""
    at = torch.arange(side)
    return (at >= center.view(-1, 1) - reach) & (at < center.view(-1, 1) + reach)
