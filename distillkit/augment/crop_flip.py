"""The standard augmentation of small images: random crop with black padding, horizontal flip, cutout."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from distillkit._utils import check
from distillkit.augment._draws import Draws
from distillkit.augment._validation import Augment
from distillkit.normalization import Normalization
from distillkit.rng import as_generator

__all__ = ["CropFlip", "adapt_normalization"]


@dataclass(frozen=True)
class CropFlip:
    """The standard augmentation of small images for training: crop, flip and perhaps cutout, each image by itself.

    `CropFlip(train.normalization)(images, generator)`; wherever `augment=` is taken.

    A random crop of the image's own size after `pad` black pixels were put around it, a horizontal flip, and perhaps a
    cutout: what the clients of VHL, FedCOG and the single image train with (torchvision's `RandomCrop(32, padding=4)`
    and `RandomHorizontalFlip()`, before their images are normalised). Each image has draws of its own.

    What comes in from outside is black, pixels of 0, as it is where pictures are padded before they are normalised. In
    the space of a normalised set that is another number for each channel, which is why the normalisation must be told.
    The cutout (DeVries and Taylor, 2017; `Cutout(16)` on CIFAR-100 in VHL's release, data_preprocessing/utils/utils.py)
    is the last step and sets a square to 0 in the images' own space, the mean colour: its centre is any pixel, so that
    part of it may lie outside.

    Args:
        normalization: of the images that will be augmented; `IDENTITY` for pixels in [0, 1].
        pad: pixels on each side, less than the images' height and width.
        flip: probability of the flip; 0 for digits, and as the single image's release has it for MedMNIST.
        cutout: side of the square in pixels, even (the released code cuts an odd one to the even number below it); at
            most the images' sides. 0: none.

    Differentiable in the images, as often as wanted. A set that is whitened (ZCA) is padded as pixels and whitened
    again.

    Raises:
        TypeError, ValueError: an option out of range; in a call, images of other channels, or too small.
    """

    normalization: Normalization
    pad: int = 4
    flip: float = 0.5
    cutout: int = 0

    def __post_init__(self) -> None:
        if not isinstance(self.normalization, Normalization):
            got = type(self.normalization).__name__
            raise TypeError(f"normalization must be the images' Normalization (train.normalization), got {got}")
        check.positive_int(self.pad, "pad", least=0)
        check.real_number(self.flip, "flip", least=0, most=1)
        if check.positive_int(self.cutout, "cutout", least=0) % 2:
            raise ValueError(f"cutout must be even, got {self.cutout}")

    def __call__(self, images: Tensor, generator: int | torch.Generator, *, siamese: bool = False) -> Tensor:
        """Augment a batch.

        Args:
            images: float [N, C, H, W] in the space of `normalization`, larger than `pad` and `cutout`.
            generator: what all is drawn from; the draws depend on N (unless Siamese), H and W, never on values.
            siamese: draw one crop, flip and cutout for the whole batch, as `DSA` does.

        Returns:
            float [N, C, H, W], same dtype and device.
        """
        if not isinstance(images, Tensor) or images.ndim != 4 or not images.is_floating_point():
            check.batch_of_images(images)
        h, w = images.shape[2:]
        if self.pad >= min(h, w) or self.cutout > min(h, w):
            raise ValueError(
                f"pad={self.pad} and cutout={self.cutout} are too large for images of {h}x{w} pixels: pad must be "
                "below their sides, cutout at most these"
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
    """The same augmentation for images with another normalisation: a `CropFlip` with their black, any other as it is.

    Call it where images of one space are trained on together with those of another, which has an augmentation already.

    Args:
        augment: any augmentation.
        normalization: of the images that the result is for.

    Raises:
        TypeError: what is no augmentation, or no normalisation.
    """
    Normalization.require(normalization)
    if not callable(augment) or isinstance(augment, type):
        came = f"the class {augment.__name__}" if isinstance(augment, type) else type(augment).__name__
        raise TypeError(f"augment must be an augmentation, such as CropFlip(normalization), got {came}")
    return replace(augment, normalization=normalization) if isinstance(augment, CropFlip) else augment


def _shifted(x: Tensor, down: Tensor, right: Tensor, fill: Tensor) -> Tensor:
    """Pixel (i, j) of each image is its pixel (i + down, j + right), or `fill` where there is none."""
    h, w = x.shape[2:]
    rows = (down.view(-1, 1, 1, 1) + torch.arange(h).view(h, 1)).to(x.device)
    columns = (right.view(-1, 1, 1, 1) + torch.arange(w)).to(x.device)
    there = (rows >= 0) & (rows < h) & (columns >= 0) & (columns < w)
    moved = x.gather(2, rows.clamp(0, h - 1).expand(len(x), x.shape[1], h, w))
    moved = moved.gather(3, columns.clamp(0, w - 1).expand(len(x), x.shape[1], h, w))
    return torch.where(there, moved, fill)


def _near(center: Tensor, reach: int, side: int) -> Tensor:
    """Which of `side` places lie in [center - reach, center + reach), bool [N, side]."""
    at = torch.arange(side)
    return (at >= center.view(-1, 1) - reach) & (at < center.view(-1, 1) + reach)
