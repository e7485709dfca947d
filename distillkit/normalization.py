"""Normalization of images: the map from pixels in [0, 1] to the values that a set stores, and its inverse."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from distillkit._utils import check

__all__ = ["IDENTITY", "ZCA", "Normalization"]


@dataclass(frozen=True, eq=False)
class ZCA:
    """ZCA whitening that was fitted on images. `encode` decorrelates pixel values, and `decode` reverses `encode`.

    Some distillation papers whiten images after standardizing them. A set stores its whitening, so that its images can
    be converted back to pixels. On flattened images, `encode` is `(x - center) @ matrix`.

    Attributes:
        center: float [D], mean of the flattened images used for fitting; D = C * H * W.
        matrix: float [D, D], used by `encode`.
        inverse: float [D, D], used by `decode`.
    """

    center: Tensor
    matrix: Tensor
    inverse: Tensor

    def __post_init__(self) -> None:
        size = len(check.float_tensor(self.center, "center", "[D]"))
        for name, matrix in (("matrix", self.matrix), ("inverse", self.inverse)):
            if check.float_tensor(matrix, name, "[D, D]").shape != (size, size):
                raise ValueError(f"{name} must have shape [{size}, {size}] as center has, got {list(matrix.shape)}")

    @staticmethod
    def fit(images: Tensor, *, eps: float = 0.1) -> ZCA:
        """Fit the whitening on images, with kornia's implementation.

        Args:
            images: float [N, C, H, W], at least two images. If you pass the whitening to a `Normalization`, standardize
                the images with its mean and standard deviation first.
            eps: positive constant added to the eigenvalues of the covariance. Larger values whiten less.

        Source: Krizhevsky, "Learning multiple layers of features from tiny images" (2009), appendix A. The
        trajectory-matching papers use `eps` 0.1 on CIFAR.

        Raises:
            TypeError, ValueError: `images` is not a float tensor with four dimensions, contains NaN or infinity, or
                contains fewer than two images.
        """
        check.batch_of_images(images)
        check.real_number(eps, "eps", above=0.0)
        if len(images) < 2:
            raise ValueError("images must hold at least 2 images to fit a covariance, got 1")
        check.finite(images.detach().square().sum(0), "the covariance of the images", "standardize the images first")
        from kornia.enhance import ZCAWhitening

        fitted = ZCAWhitening(eps=eps, compute_inv=True).fit(images.detach())
        inverse = fitted.transform_inv
        assert isinstance(inverse, Tensor)
        return ZCA(fitted.mean_vector.flatten(), fitted.transform_matrix, inverse)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ZCA) and all(
            a.shape == b.shape and torch.equal(a.cpu(), b.cpu())
            for a, b in ((self.center, other.center), (self.matrix, other.matrix), (self.inverse, other.inverse))
        )

    def __hash__(self) -> int:
        return hash(tuple(self.center.shape))

    def _flat(self, images: Tensor) -> Tensor:
        if images.shape[1:].numel() != len(self.center):
            raise ValueError(
                f"images have {images.shape[1:].numel()} values each, but this ZCA was fitted on {len(self.center)}"
            )
        return images.flatten(1)

    def encode(self, images: Tensor) -> Tensor:
        """Whiten images.

        Args:
            images: float [N, C, H, W], already standardized by channel. C * H * W must be the number of values per
                image in `fit`.

        Raises:
            ValueError: the images differ in size from the images used for fitting.
        """
        flat = self._flat(images)
        return ((flat - self.center.to(flat)) @ self.matrix.to(flat)).view_as(images)

    def decode(self, images: Tensor) -> Tensor:
        """Reverse the whitening of `encode`.

        Args:
            images: whitened, float [N, C, H, W].

        Raises:
            ValueError: the images differ in size from the images used for fitting.
        """
        flat = self._flat(images)
        return (flat @ self.inverse.to(flat) + self.center.to(flat)).view_as(images)


@dataclass(frozen=True)
class Normalization:
    """Channel-wise normalization of pixels: subtract a mean, divide by a standard deviation, optionally whiten.

    `encode(pixels)` returns `(pixels - mean) / std`, whitened if `zca` is set; `decode` reverses it. Every
    `LabeledImages` stores its normalization, and sets with different normalizations are not mixed.

    Args:
        mean: mean of each channel, in pixel units (pixels are in [0, 1]); a single number applies to every channel.
        std: standard deviation of each channel, at least 1e-12; a single number applies to every channel.
        zca: whitening applied after the standardization; or None.
        measured: whether mean and standard deviation were measured on images that are not known to be public. Functions
            that promise privacy refuse such a normalization, because it reveals statistics of these images. Default:
            True if there is a whitening, because a whitening is always fitted to images; otherwise False. Two
            normalizations that differ only in `measured` are equal.

    Raises:
        TypeError: `zca` is not a ZCA, or `measured` is neither True nor False.
        ValueError: the numbers of means and standard deviations differ, or a standard deviation is too small.
    """

    mean: tuple[float, ...]
    std: tuple[float, ...]
    zca: ZCA | None = field(default=None)
    measured: bool = field(default=False, compare=False, repr=False)

    def __init__(
        self, mean: Sequence[float], std: Sequence[float], zca: ZCA | None = None, *, measured: bool | None = None
    ) -> None:
        object.__setattr__(self, "mean", tuple(check.real_number(m, "mean") for m in _channels(mean, "mean")))
        object.__setattr__(self, "std", tuple(check.real_number(s, "std", least=1e-12) for s in _channels(std, "std")))
        if zca is not None and not isinstance(zca, ZCA):
            raise TypeError(f"zca must be a ZCA, such as ZCA.fit(images), or None, got {type(zca).__name__}")
        object.__setattr__(self, "zca", zca)
        known = zca is not None if measured is None else check.boolean(measured, "measured")
        object.__setattr__(self, "measured", known)
        if not self.mean or len(self.mean) != len(self.std):
            raise ValueError(f"mean and std must have one value a channel, got {len(self.mean)} and {len(self.std)}")

    @staticmethod
    def of(pixels: Tensor, *, public: bool = False) -> Normalization:
        """Measure mean and standard deviation of pixels, and return the normalization with these values.

        Use it for example on the pixels of your training images.

        Args:
            pixels: float [N, C, H, W] in [0, 1]. A constant channel gets std 1.
            public: whether these images are public. If they are not, components that promise privacy refuse the
                normalization, because it reveals statistics of private data. Use public constants for these components.

        Raises:
            TypeError, ValueError: `pixels` is not a float tensor with four dimensions, is empty, or contains NaN or
                infinity.
        """
        check.batch_of_images(pixels, "pixels")
        check.boolean(public, "public")
        count = pixels.numel() // pixels.shape[1]
        mean = [total / count for total in _sums(pixels)]
        spread = _sums(pixels, center=pixels.new_tensor(mean, dtype=torch.float64).view(1, -1, 1, 1))
        # Rounding makes the measured deviation of a constant channel positive, so compare the extremes.
        alike = (pixels.amax((0, 2, 3)) == pixels.amin((0, 2, 3))).tolist()
        std = [1.0 if constant else math.sqrt(total / count) for total, constant in zip(spread, alike)]
        # Sums differ between processors in their last digits, which are dropped.
        return Normalization([float(f"{v:.13g}") for v in mean], [float(f"{v:.13g}") for v in std], measured=not public)

    @staticmethod
    def require(given: object) -> None:
        """Refuse a `normalization` argument that is not a `Normalization`.

        Args:
            given: the value to check.

        Raises:
            TypeError: the value has another type, such as numbers or a torchvision transform. The message shows how to
                create a `Normalization`.
        """
        if not isinstance(given, Normalization):
            raise TypeError(f"normalization must be a Normalization(mean, std), got {type(given).__name__}")

    def _columns(self, like: Tensor) -> tuple[Tensor, Tensor]:
        if not like.is_floating_point():
            raise TypeError(f"images must be floating point, got {like.dtype}; divide uint8 pixels by 255")
        mean, std = (torch.tensor(v, dtype=like.dtype, device="cpu") for v in (self.mean, self.std))
        if len(mean) not in (1, like.shape[1]):
            raise ValueError(f"images have {like.shape[1]} channels, but the normalization has {len(mean)}")
        mean, std = (t.view(1, -1, 1, 1).to(like.device, non_blocking=True) for t in (mean, std))
        return mean, std

    def encode(self, pixels: Tensor) -> Tensor:
        """Convert pixels to the normalized space.

        Args:
            pixels: float [N, C, H, W] in [0, 1].

        Raises:
            TypeError, ValueError: the tensor has an integer dtype, or its number of channels is not that of the
                normalization.
        """
        mean, std = self._columns(pixels)
        images = (pixels - mean) / std
        return images if self.zca is None else self.zca.encode(images)

    def decode(self, images: Tensor) -> Tensor:
        """Convert normalized images back to pixels. The pixels of learned images may be outside [0, 1].

        Args:
            images: float [N, C, H, W] in the normalized space.

        Raises:
            TypeError, ValueError: the tensor has an integer dtype, or its number of channels is not that of the
                normalization.
        """
        images = images if self.zca is None else self.zca.decode(images)
        mean, std = self._columns(images)
        return images * std + mean

    def __str__(self) -> str:
        if self == IDENTITY:
            return "pixels in [0, 1]"
        numbers = [f"({', '.join(f'{v:.4g}' for v in values)})" for values in (self.mean, self.std)]
        return f"mean {numbers[0]} std {numbers[1]}" + (" then ZCA" if self.zca else "")


def _sums(pixels: Tensor, center: Tensor | None = None) -> list[float]:
    """Return the sum of each channel's values, or of their squared distances from `center`.

    The images are processed in chunks. The result does not depend on the number of threads: PyTorch sums each channel
    of each image, and `fsum` then adds the sums of the images exactly.
    """
    found = []
    for chunk in pixels.detach().split(256):
        values = chunk.double() if center is None else (chunk.double() - center).square_()
        found.append(values.sum(3).sum(2))
    return [math.fsum(channel) for channel in torch.cat(found).T.tolist()]


def _channels(values: Sequence[float], name: str) -> tuple[float, ...]:
    given = values.tolist() if isinstance(values, Tensor | np.ndarray) and values.ndim == 1 else values
    return check.sequence(given, name, "numbers, one a channel")


IDENTITY = Normalization((0.0,), (1.0,))
"""Images are pixels in [0, 1], with any number of channels."""
