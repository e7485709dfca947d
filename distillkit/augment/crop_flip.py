"""Standard augmentation of small images: random crop with black padding, horizontal flip and cutout."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from distillkit._utils import check
from distillkit._utils.options import Fraction, NonNegativeInt, check_options
from distillkit.augment._draws import Draws, choose
from distillkit.augment._validation import Augment
from distillkit.normalization import Normalization
from distillkit.rng import as_generator


@dataclass(frozen=True)
class CropFlip:
    """Standard training augmentation of small images: random crop, horizontal flip and optional cutout.

    Pass it as `augment=`, or call it: `CropFlip(train.normalization)(images, generator)`.

    Each image is padded with `pad` black pixels, cropped at random to its original size, and flipped at random. This
    corresponds to torchvision's `RandomCrop(32, padding=4)` and `RandomHorizontalFlip()`, applied before normalization.
    VHL, FedCOG and "Federated learning with a single shared image" train clients with this augmentation.

    Padding is black, as if the images were padded before normalization. The normalized value of black differs between
    channels, so the normalization must be given. The cutout (DeVries and Taylor, 2017) comes last. It sets a square to
    0 in the normalized space, which is the mean color. The center of the square can be any pixel, so part of the square
    may be outside the image. VHL's code uses `Cutout(16)` on CIFAR-100 (data_preprocessing/utils/utils.py).

    Args:
        normalization: normalization of the images. Pass `IDENTITY` for pixels in [0, 1].
        pad: number of pixels that are added on each side. It must be less than the images' height and width.
        flip: probability of the flip. Use 0 for digits. The code of "Federated learning with a single shared image"
            uses 0 for MedMNIST.
        cutout: side of the square in pixels; 0 for no cutout. It must be even, and at most the images' height and
            width. The code of Cutout's authors rounds odd sides down to even ones.

    The result is differentiable with respect to the images to any order. ZCA-whitened images are converted to pixels,
    padded, and whitened again.

    Raises:
        TypeError, ValueError: an option is out of range. A call raises them for images that are too small or have
            another number of channels than the normalization.
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
        """Augment a batch of images.

        Args:
            images: float [N, C, H, W], normalized by the attribute `normalization`. H and W must be larger than `pad`
                and at least `cutout`.
            generator: int seed, or generator for all random draws. The draws depend on H, W and (if `siamese` is False)
                N, but not on pixel values.
            siamese: whether to draw the crop, flip and cutout once for the whole batch, as in `DSA`.

        Returns:
            The augmented images, float [N, C, H, W], with the same dtype and device.
        """
        check.batch_of_images(images, values=False)
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
        seen = choose(mirrored, seen.flip(3), seen)
        seen = self.normalization.encode(seen) if whitened else seen
        if self.cutout:
            inside = [
                _near(draw.integers(0, side), self.cutout // 2, side)
                .to(images.device, non_blocking=True)
                .view(-1, 1, *shape)
                for side, shape in ((h, (h, 1)), (w, (1, w)))
            ]
            seen = seen.masked_fill(inside[0] & inside[1], 0.0)
        return seen


def adapt_normalization(augment: Augment, normalization: Normalization) -> Augment:
    """Return a version of an augmentation for another normalization.

    A `CropFlip` is copied with the new normalization, because it pads with black. Any other augmentation is returned
    unchanged. Use this function to apply the same augmentation to sets with different normalizations.

    Args:
        augment: any augmentation.
        normalization: normalization of the images to augment.

    Raises:
        TypeError: `augment` is not an augmentation, or `normalization` is not a `Normalization`.
    """
    Normalization.require(normalization)
    if not callable(augment) or isinstance(augment, type):
        came = f"the class {augment.__name__}" if isinstance(augment, type) else type(augment).__name__
        raise TypeError(f"augment must be an augmentation, such as CropFlip(normalization), got {came}")
    return replace(augment, normalization=normalization) if isinstance(augment, CropFlip) else augment


def _shifted(x: Tensor, down: Tensor, right: Tensor, fill: Tensor) -> Tensor:
    """Move the crop window of each image by `down` rows and `right` columns, so its content moves up and left.

    Output pixel (i, j) is input pixel (i + down, j + right), or `fill` outside of the image.
    """
    h, w = x.shape[2:]
    rows = (down.view(-1, 1, 1, 1) + torch.arange(h).view(h, 1)).to(x.device, non_blocking=True)
    columns = (right.view(-1, 1, 1, 1) + torch.arange(w)).to(x.device, non_blocking=True)
    there = (rows >= 0) & (rows < h) & (columns >= 0) & (columns < w)
    moved = x.gather(2, rows.clamp(0, h - 1).expand(len(x), x.shape[1], h, w))
    moved = moved.gather(3, columns.clamp(0, w - 1).expand(len(x), x.shape[1], h, w))
    return torch.where(there, moved, fill)


def _near(center: Tensor, reach: int, side: int) -> Tensor:
    """Return whether each position in [0, side) is in [center - reach, center + reach), as bool [N, side].

    Each of the N images has its own `center`.
    """
    at = torch.arange(side)
    return (at >= center.view(-1, 1) - reach) & (at < center.view(-1, 1) + reach)
