"""Augmentation: differentiable Siamese (six families, one draw for real and synthetic images), and crop-flip-cutout."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from distillkit import check
from distillkit.normalization import Normalization
from distillkit.rng import as_generator

__all__ = ["DIGITS", "DSA", "NATURAL", "CropFlip", "augmented", "in_space", "require_augmentation", "require_space"]

Augment = Callable[[Tensor, torch.Generator], Tensor]

NATURAL = "color_crop_cutout_flip_scale_rotate"
"""The published strategy for natural images."""

DIGITS = "color_crop_cutout_scale_rotate"
"""The published strategy for digits (MNIST, SVHN): no flip, because a mirrored digit is another shape."""

_FAMILIES = tuple(NATURAL.split("_"))


@dataclass(frozen=True)
class DSA:
    """Differentiable Siamese augmentation, `DSA()(images, generator)`.

    Paper: Zhao and Bilen, "Dataset condensation with differentiable Siamese augmentation" (ICML 2021), section 3.2.

    Args:
        strategy: the families, joined by `_`, in the order in which mode `"M"` applies them. `NATURAL` or `DIGITS`.
        mode: `"S"` draws one family for each call, `"M"` applies all.
        brightness: width of the added offset, uniform in +-brightness/2, in units of the images.
        saturation: the distance to the mean over channels is multiplied by a uniform number in [0, saturation].
        contrast: the distance to the mean of the image is multiplied by a number in [contrast, contrast + 1].
        crop: largest shift, as a share of the side; what comes in is zero.
        cutout: side of the square that is set to zero, as a share of the side.
        flip: probability of a horizontal flip.
        scale: both axes are scaled, independently, by a uniform number in [1/scale, scale].
        rotate: largest rotation in degrees.

    The colour family is brightness, saturation and contrast, one after the other. All its means run over whatever
    channels there are: with one channel saturation changes nothing, with five it moves all towards their common mean.
    Zeros are zeros of the space that the images live in: the mean colour for a normalised set, black for pixels.

    Scaling and rotating sample bilinearly with `align_corners=False` and zeros outside, always: the released code
    took whatever PyTorch's default was, which is not the same transform in all versions. Deviations: every draw comes
    from `generator` (the released code reseeds the global generator from the clock); the rotation keeps its shape on
    images that are not square.

    Raises:
        TypeError, ValueError: an unknown or repeated family, an unknown mode, a range that makes no sense.
    """

    strategy: str = NATURAL
    mode: str = "S"
    brightness: float = 1.0
    saturation: float = 2.0
    contrast: float = 0.5
    crop: float = 0.125
    cutout: float = 0.5
    flip: float = 0.5
    scale: float = 1.2
    rotate: float = 15.0

    def __post_init__(self) -> None:
        if not isinstance(self.strategy, str):
            raise TypeError(f"strategy must be a string of families joined by '_', got {type(self.strategy).__name__}")
        for family in self.families:
            check.one_of(family, "strategy's families", _FAMILIES)
        if len(set(self.families)) != len(self.families):
            raise ValueError(f"strategy must name each family once, got {self.strategy!r}")
        check.one_of(self.mode, "mode", ("S", "M"))
        for name in ("brightness", "saturation", "contrast", "rotate"):
            check.real_number(getattr(self, name), name, least=0)
        for name in ("crop", "cutout", "flip"):
            check.real_number(getattr(self, name), name, least=0, most=1)
        check.real_number(self.scale, "scale", least=1)

    @property
    def families(self) -> tuple[str, ...]:
        """The families of the strategy, in order."""
        return tuple(self.strategy.split("_"))

    def __call__(self, images: Tensor, generator: int | torch.Generator, *, siamese: bool = False) -> Tensor:
        """Augment `images`.

        Args:
            images: float [N, C, H, W]; any channels, any size. The result is differentiable in them, twice.
            generator: what all is drawn from. The draws depend on N (unless Siamese), H and W, never on values.
            siamese: draw one parameter for the whole batch. The draws then do not depend on N either: calls with
                equal generator states apply the same transform to batches of any length. That is how real and
                synthetic images share a draw: `DSA()(real, generator.clone_state(), siamese=True)` and then
                `DSA()(synthetic, generator, siamese=True)`.

        Returns:
            float [N, C, H, W], same dtype and device.
        """
        if not isinstance(images, Tensor) or images.ndim != 4 or not images.is_floating_point():
            check.batch_of_images(images)
        generator, families = as_generator(generator), self.families
        if self.mode == "S":
            families = (families[int(torch.randint(len(families), (), generator=generator))],)
        for family in families:
            images = getattr(self, f"_{family}")(images, _Draws(images, generator, 1 if siamese else len(images)))
        return images

    def _color(self, x: Tensor, draw: _Draws) -> Tensor:
        x = x + draw.uniform(-0.5, 0.5) * self.brightness
        mean = x.mean(1, keepdim=True)
        x = (x - mean) * draw.uniform(0, self.saturation) + mean
        mean = x.mean((1, 2, 3), keepdim=True)
        return (x - mean) * draw.uniform(self.contrast, self.contrast + 1) + mean

    def _crop(self, x: Tensor, draw: _Draws) -> Tensor:
        h, w = x.shape[2:]
        down, right = int(h * self.crop + 0.5), int(w * self.crop + 0.5)
        top, left = draw.integers(0, 2 * down + 1), draw.integers(0, 2 * right + 1)
        padded = F.pad(x, (right, right, down, down))
        if len(top) == 1:
            i, j = int(top), int(left)
            return padded[:, :, i : i + h, j : j + w]
        rows = (top.view(-1, 1, 1, 1) + torch.arange(h).view(h, 1)).to(x.device)
        columns = (left.view(-1, 1, 1, 1) + torch.arange(w)).to(x.device)
        padded = padded.gather(2, rows.expand(-1, x.shape[1], -1, padded.shape[3]))
        return padded.gather(3, columns.expand(-1, x.shape[1], h, -1))

    def _cutout(self, x: Tensor, draw: _Draws) -> Tensor:
        h, w = x.shape[2:]
        inside = []
        for side, shape in ((h, (-1, 1, h, 1)), (w, (-1, 1, 1, w))):
            length = int(side * self.cutout + 0.5)
            start = draw.integers(0, side + (1 - length % 2)).view(-1, 1) - length // 2
            at = torch.arange(side)
            inside.append(((at >= start) & (at < start + length)).view(shape).to(x.device))
        return x.masked_fill(inside[0] & inside[1], 0.0)

    def _flip(self, x: Tensor, draw: _Draws) -> Tensor:
        return torch.where(draw.uniform(0, 1) < self.flip, x.flip(3), x)

    def _scale(self, x: Tensor, draw: _Draws) -> Tensor:
        sx = draw.uniform(1 / self.scale, self.scale)
        sy = draw.uniform(1 / self.scale, self.scale)
        zero = torch.zeros_like(sx)
        return _warp(x, [sx, zero, zero, sy])

    def _rotate(self, x: Tensor, draw: _Draws) -> Tensor:
        angle = draw.uniform(-self.rotate, self.rotate) * (math.pi / 180)
        aspect = x.shape[2] / x.shape[3]
        return _warp(x, [angle.cos(), -angle.sin() * aspect, angle.sin() / aspect, angle.cos()])


@dataclass(frozen=True)
class CropFlip:
    """The standard augmentation of small images, `CropFlip(train.normalization)(images, generator)`.

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
        """Augment `images`; the arguments and what the draws depend on are those of `DSA`.

        Returns:
            float [N, C, H, W], same dtype and device.
        """
        if not isinstance(images, Tensor) or images.ndim != 4 or not images.is_floating_point():
            check.batch_of_images(images)
        h, w = images.shape[2:]
        if self.pad >= min(h, w) or self.cutout > min(h, w):
            raise ValueError(f"pad={self.pad} and cutout={self.cutout} are too large for images of {h}x{w} pixels")
        draw = _Draws(images, as_generator(generator), 1 if siamese else len(images))
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


def require_augmentation(augment: Any, normalization: Normalization | None = None, *, siamese: bool = True) -> None:
    """Check what `augment=` was given, before any work is done.

    Args:
        augment: None, or what can be called as `augment(images, generator, siamese=...)`.
        normalization: of the images that it will see.
        siamese: whether it is called with `siamese=`, as condensers and `Protocol` do; the federated layer does not.

    Raises:
        TypeError: True, a name, a class, a torchvision transform, or another function of other arguments.
        ValueError: an augmentation that was told another normalisation.
    """
    if augment is None:
        return
    call = "augment(images, generator, siamese=...)" if siamese else "augment(images, generator)"
    wanted = f"augment must be None or an augmentation such as DSA() of distillkit.augment, called as {call}"
    if isinstance(augment, type):
        raise TypeError(f"{wanted}; got the class {augment.__name__}, give {augment.__name__}(...)")
    if not callable(augment):
        raise TypeError(f"{wanted}; got {augment!r}")
    try:
        signature = inspect.signature(augment.forward if isinstance(augment, nn.Module) else augment)
        signature.bind(*(None, None), **({"siamese": True} if siamese else {}))
    except ValueError:
        pass  # a function without a signature
    except TypeError as error:
        name = getattr(augment, "__name__", type(augment).__name__)
        raise TypeError(
            f"{wanted}; {name}{signature} is called otherwise. Wrap it in a function that draws from the generator, "
            "with one draw for all images where siamese is true"
        ) from error
    if normalization is not None:
        require_space(augment, normalization)


def augmented(augment: Any, images: Tensor, generator: torch.Generator, *, siamese: bool) -> Tensor:
    """`augment(images, generator, siamese=siamese)`, which must have the images' shape and dtype."""
    seen = augment(images, generator, siamese=siamese)
    if not isinstance(seen, Tensor) or (seen.shape, seen.dtype) != (images.shape, images.dtype):
        came = f"{seen.dtype} {list(seen.shape)}" if isinstance(seen, Tensor) else type(seen).__name__
        raise ValueError(f"augment must give images as it got them, {images.dtype} {list(images.shape)}, got {came}")
    return seen


def require_space(augment: object, normalization: Normalization) -> None:
    """Raise ValueError if an augmentation that was told a normalisation (`CropFlip`) will see images of another one."""
    told = getattr(augment, "normalization", None)
    if isinstance(told, Normalization) and told != normalization:
        name = type(augment).__name__
        raise ValueError(
            f"augment pads with the black of images with {told}, but these have {normalization}: give {name}(their own "
            "normalization)"
        )


def in_space(augment: Augment, normalization: Normalization) -> Augment:
    """The same augmentation for images with another normalisation: `CropFlip` with their black, others as they are."""
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


class _Draws:
    """Parameters for a batch, `count` at a time (one if Siamese); integers stay on the CPU, for slicing."""

    def __init__(self, images: Tensor, generator: torch.Generator, count: int) -> None:
        self.images, self.generator, self.count = images, generator, count

    def uniform(self, low: float, high: float) -> Tensor:
        drawn = torch.rand(self.count, generator=self.generator, dtype=torch.float64) * (high - low) + low
        return drawn.to(self.images).view(-1, 1, 1, 1)

    def integers(self, low: int, high: int) -> Tensor:
        return torch.randint(low, high, (self.count,), generator=self.generator)


def _warp(x: Tensor, matrix: list[Tensor]) -> Tensor:
    """Sample `x` at `matrix @ (column, row)`, both in [-1, 1] from edge to edge of the image."""
    xx, xy, yx, yy = (entry.view(-1, 1) for entry in matrix)
    zero = torch.zeros_like(xx)
    theta = torch.stack([torch.cat([xx, xy, zero], 1), torch.cat([yx, yy, zero], 1)], 1)
    grid = F.affine_grid(theta, [len(theta), *x.shape[1:]], align_corners=False)
    grid = grid.expand(len(x), -1, -1, -1)
    return F.grid_sample(x, grid, mode="bilinear", padding_mode="zeros", align_corners=False)
