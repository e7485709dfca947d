"""Differentiable Siamese augmentation: six families of transforms, shared by real and synthetic images."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from distillkit._utils import check
from distillkit._utils.options import Fraction, NonNegative, check_options
from distillkit.augment._draws import Draws, choose
from distillkit.rng import as_generator

NATURAL = "color_crop_cutout_flip_scale_rotate"
"""Published strategy for natural images."""

DIGITS = "color_crop_cutout_scale_rotate"
"""Published strategy for digits (MNIST, SVHN), without flips, because a mirrored digit has another shape."""

_FAMILIES = tuple(NATURAL.split("_"))


@dataclass(frozen=True)
class DSA:
    """Differentiable Siamese augmentation, which applies the same transform to real and synthetic images.

    Pass it as `augment=` to a condenser and to the training on the condensed set, or call it: `DSA()(images,
    generator)`.

    Paper: Zhao and Bilen, "Dataset condensation with differentiable Siamese augmentation" (ICML 2021), section 3.2.

    Args:
        strategy: names of the families of transforms, joined by `_`, such as the constants `NATURAL` and `DIGITS`. Mode
            `"M"` applies them in this order.
        mode: `"S"` to apply one random family per call, or `"M"` to apply all families.
        brightness: strength of the brightness change. An offset that is uniform in [-brightness/2, brightness/2] is
            added to the values of the images, which are usually normalized.
        saturation: strength of the saturation change. The difference of each pixel from its mean over channels is
            multiplied by a factor that is uniform in [0, saturation].
        contrast: strength of the contrast change. The difference of each pixel from the mean of the image is multiplied
            by a factor that is uniform in [contrast, contrast + 1].
        crop: largest shift, as a fraction of the image's height (for vertical shifts) or width (for horizontal shifts).
            Uncovered pixels are set to zero.
        cutout: height and width of the rectangle that is set to zero, as a fraction of the image's height and width.
        flip: probability of a horizontal flip.
        scale: largest scale. Each axis is scaled independently, by a factor that is uniform in [1/scale, scale].
        rotate: largest rotation in degrees.

    The family `color` consists of brightness, saturation and contrast, in this order. Saturation has no effect on
    images with one channel. The value zero of uncovered and cut-out pixels is the mean color for normalized images, and
    black for pixels in [0, 1].

    Scaling and rotation sample bilinearly, with `align_corners=False` and zeros outside the image. The authors' code
    uses PyTorch's default for `align_corners`, which differs between versions. Deviations: all random numbers come from
    `generator`, while the authors' code reseeds the global generator from the clock. If images are not square, rotation
    does not distort their content, unlike in the authors' code.

    Raises:
        TypeError, ValueError: a family is unknown or repeated, the mode is unknown, or an option is out of range.
    """

    strategy: str = NATURAL
    mode: Literal["S", "M"] = "S"
    brightness: NonNegative = 1.0
    saturation: NonNegative = 2.0
    contrast: NonNegative = 0.5
    crop: Fraction = 0.125
    cutout: Fraction = 0.5
    flip: Fraction = 0.5
    scale: float = 1.2
    rotate: NonNegative = 15.0

    def __post_init__(self) -> None:
        if not isinstance(self.strategy, str):
            raise TypeError(f"strategy must be a string of families joined by '_', got {type(self.strategy).__name__}")
        for family in self.families:
            check.one_of(family, "strategy's families", _FAMILIES)
        if len(set(self.families)) != len(self.families):
            raise ValueError(f"strategy must name each family once, got {self.strategy!r}")
        check_options(self)
        check.real_number(self.scale, "scale", least=1)

    @property
    def families(self) -> tuple[str, ...]:
        """Names of the families of transforms in the option `strategy`, such as "color", in the order of `strategy`."""
        return tuple(self.strategy.split("_"))

    def __call__(self, images: Tensor, generator: int | torch.Generator, *, siamese: bool = False) -> Tensor:
        """Augment a batch of images.

        Args:
            images: float [N, C, H, W], with any number of channels and any size. The result is twice differentiable
                with respect to them.
            generator: int seed, or generator for all random draws. The draws depend on H, W and (if `siamese` is False)
                N, but not on pixel values.
            siamese: whether to draw the parameters of a transform once for the whole batch, not for each image. Calls
                with equal generator states then apply the same transform to batches of any length. For example,
                `DSA()(real, generator.clone_state(), siamese=True)` and `DSA()(synthetic, generator, siamese=True)`
                transform real and synthetic images equally.

        Returns:
            The augmented images, float [N, C, H, W], with the same dtype and device.
        """
        check.batch_of_images(images, values=False)
        if not len(images):
            return images
        generator, families = as_generator(generator), self.families
        if self.mode == "S":
            families = (families[int(torch.randint(len(families), (), generator=generator))],)
        for family in families:
            images = getattr(self, f"_{family}")(images, Draws(images, generator, 1 if siamese else len(images)))
        return images

    def _color(self, x: Tensor, draw: Draws) -> Tensor:
        x = x + draw.uniform(-0.5, 0.5) * self.brightness
        mean = x.mean(1, keepdim=True)
        x = (x - mean) * draw.uniform(0, self.saturation) + mean
        mean = x.mean((1, 2, 3), keepdim=True)
        return (x - mean) * draw.uniform(self.contrast, self.contrast + 1) + mean

    def _crop(self, x: Tensor, draw: Draws) -> Tensor:
        h, w = x.shape[2:]
        down, right = int(h * self.crop + 0.5), int(w * self.crop + 0.5)
        top, left = draw.integers(0, 2 * down + 1), draw.integers(0, 2 * right + 1)
        padded = F.pad(x, (right, right, down, down))
        if len(top) == 1:
            i, j = int(top), int(left)
            return padded[:, :, i : i + h, j : j + w]
        rows = (top.view(-1, 1, 1, 1) + torch.arange(h).view(h, 1)).to(x.device, non_blocking=True)
        columns = (left.view(-1, 1, 1, 1) + torch.arange(w)).to(x.device, non_blocking=True)
        padded = padded.gather(2, rows.expand(-1, x.shape[1], -1, padded.shape[3]))
        return padded.gather(3, columns.expand(-1, x.shape[1], h, -1))

    def _cutout(self, x: Tensor, draw: Draws) -> Tensor:
        h, w = x.shape[2:]
        inside = []
        for side, shape in ((h, (-1, 1, h, 1)), (w, (-1, 1, 1, w))):
            length = int(side * self.cutout + 0.5)
            start = draw.integers(0, side + (1 - length % 2)) - length // 2
            start = start.view(()) if len(start) == 1 else start.view(-1, 1).to(x.device, non_blocking=True)
            at = torch.arange(side, device=x.device)
            inside.append(((at >= start) & (at < start + length)).view(shape))
        return x.masked_fill(inside[0] & inside[1], 0.0)

    def _flip(self, x: Tensor, draw: Draws) -> Tensor:
        return choose(draw.uniform(0, 1) < self.flip, x.flip(3), x)

    def _scale(self, x: Tensor, draw: Draws) -> Tensor:
        sx = draw.uniform(1 / self.scale, self.scale)
        sy = draw.uniform(1 / self.scale, self.scale)
        zero = torch.zeros_like(sx)
        return _warp(x, [sx, zero, zero, sy])

    def _rotate(self, x: Tensor, draw: Draws) -> Tensor:
        angle = draw.uniform(-self.rotate, self.rotate) * (math.pi / 180)
        aspect = x.shape[2] / x.shape[3]
        return _warp(x, [angle.cos(), -angle.sin() * aspect, angle.sin() / aspect, angle.cos()])


def _warp(x: Tensor, matrix: list[Tensor]) -> Tensor:
    """Transform each image by a linear map: the output pixel at coordinate p is the input pixel at coordinate M p.

    A coordinate is a pair (column, row), with values from -1 to 1 between the edges of the image. `matrix` lists the
    entries xx, xy, yx and yy of the 2x2 matrix M. Each entry is a tensor with one value per image, or with one value
    for the batch.
    """
    if not matrix[0].ndim:
        still = torch.eye(2, 3, dtype=x.dtype, device=x.device)[None]
        column, row = F.affine_grid(still, [1, *x.shape[1:]], align_corners=False).unbind(-1)
        moved = [column * matrix[k] + row * matrix[k + 1] for k in (0, 2)]
        return _sampled(x, torch.stack(moved, -1))
    xx, xy, yx, yy = (entry.view(-1, 1) for entry in matrix)
    zero = torch.zeros_like(xx)
    theta = torch.stack([torch.cat([xx, xy, zero], 1), torch.cat([yx, yy, zero], 1)], 1)
    return _sampled(x, F.affine_grid(theta, [len(theta), *x.shape[1:]], align_corners=False))


def _sampled(x: Tensor, grid: Tensor) -> Tensor:
    grid = grid.expand(len(x), -1, -1, -1)
    return F.grid_sample(x, grid, mode="bilinear", padding_mode="zeros", align_corners=False)
