"""The map between pixels in [0, 1] and the space in which a set's images live."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from distillkit import check

__all__ = ["IDENTITY", "ZCA", "Normalization"]


@dataclass(frozen=True, eq=False)
class ZCA:
    """A fitted ZCA whitening of flattened images: `(x - center) @ matrix`, undone with `inverse`.

    Attributes:
        center: float [D], the mean of the flattened images that it was fitted on; D = C * H * W.
        matrix: float [D, D].
        inverse: float [D, D].
    """

    center: Tensor
    matrix: Tensor
    inverse: Tensor

    @staticmethod
    def fit(images: Tensor, *, eps: float = 0.1) -> ZCA:
        """Fit on `images` float [N, C, H, W] with kornia's whitening; `eps` is added to the eigenvalues.

        Source: Krizhevsky, "Learning multiple layers of features from tiny images" (2009), appendix A; 0.1 is
        the value that the trajectory-matching papers use on CIFAR. The inverse is of the regularised map.

        Raises:
            TypeError, ValueError: see `check.batch_of_images`; also fewer than two images.
        """
        check.batch_of_images(images)
        check.real_number(eps, "eps", above=0.0)
        if len(images) < 2:
            raise ValueError("images must hold at least 2 images to fit a covariance, got 1")
        from kornia.enhance import ZCAWhitening

        fitted = ZCAWhitening(eps=eps, compute_inv=True).fit(images.detach())
        inverse = fitted.transform_inv
        assert isinstance(inverse, Tensor)
        return ZCA(fitted.mean_vector.flatten(), fitted.transform_matrix, inverse)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ZCA) and all(
            a.shape == b.shape and torch.equal(a.cpu(), b.cpu())
            for a, b in (
                (self.center, other.center),
                (self.matrix, other.matrix),
                (self.inverse, other.inverse),
            )
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
        """Whiten `images` [N, C, H, W] (already standardised by channel)."""
        flat = self._flat(images)
        return ((flat - self.center.to(flat)) @ self.matrix.to(flat)).view_as(images)

    def decode(self, images: Tensor) -> Tensor:
        """Undo `encode`."""
        flat = self._flat(images)
        return (flat @ self.inverse.to(flat) + self.center.to(flat)).view_as(images)


@dataclass(frozen=True)
class Normalization:
    """Per-channel mean and standard deviation in pixel units ([0, 1]), and optionally a ZCA after them.

    `encode(pixels)` gives `(pixels - mean) / std`, whitened if `zca` is set; `decode` undoes it.

    Attributes:
        measured: whether these numbers are statistics of images of which nobody said that they are public. They travel
            with every set, so a component that promises privacy refuses them. Default: whether there is a whitening,
            which is always fitted. No part of equality: the map is the same.

    Raises:
        ValueError: different numbers of means and stds, or a std that is not positive.
    """

    mean: tuple[float, ...]
    std: tuple[float, ...]
    zca: ZCA | None = field(default=None)
    measured: bool = field(default=False, compare=False, repr=False)

    def __init__(
        self, mean: Sequence[float], std: Sequence[float], zca: ZCA | None = None, *, measured: bool | None = None
    ) -> None:
        object.__setattr__(self, "mean", tuple(check.real_number(m, "mean") for m in _channels(mean, "mean")))
        object.__setattr__(self, "std", tuple(check.real_number(s, "std", above=0.0) for s in _channels(std, "std")))
        object.__setattr__(self, "zca", zca)
        object.__setattr__(self, "measured", zca is not None if measured is None else bool(measured))
        if not self.mean or len(self.mean) != len(self.std):
            raise ValueError(f"mean and std must have one value a channel, got {len(self.mean)} and {len(self.std)}")

    @staticmethod
    def of(pixels: Tensor, *, public: bool = False) -> Normalization:
        """Measure mean and std per channel on `pixels` float [N, C, H, W] in [0, 1].

        A channel that is constant gets std 1. These numbers are statistics of the data: with a privacy claim, give
        public ones instead, or say `public=True` if these images are public.
        """
        check.batch_of_images(pixels, "pixels")
        channels = pixels.transpose(0, 1).flatten(1).double()
        # The measured deviation of a constant channel is rounding noise above zero, so compare the extremes.
        constant = channels.amax(1) == channels.amin(1)
        std = channels.std(1, correction=0).masked_fill(constant, 1.0)
        return Normalization(channels.mean(1).tolist(), std.tolist(), measured=not public)

    def _columns(self, like: Tensor) -> tuple[Tensor, Tensor]:
        if not like.is_floating_point():
            raise TypeError(f"images must be floating point, got {like.dtype}; divide uint8 pixels by 255")
        mean, std = like.new_tensor(self.mean), like.new_tensor(self.std)
        if len(mean) not in (1, like.shape[1]):
            raise ValueError(f"images have {like.shape[1]} channels, but the normalization has {len(mean)}")
        return mean.view(1, -1, 1, 1), std.view(1, -1, 1, 1)

    def encode(self, pixels: Tensor) -> Tensor:
        """Map `pixels` [N, C, H, W] in [0, 1] to the normalised space."""
        mean, std = self._columns(pixels)
        images = (pixels - mean) / std
        return images if self.zca is None else self.zca.encode(images)

    def decode(self, images: Tensor) -> Tensor:
        """Map `images` [N, C, H, W] of the normalised space back to pixel units (not clamped)."""
        images = images if self.zca is None else self.zca.decode(images)
        mean, std = self._columns(images)
        return images * std + mean

    def __str__(self) -> str:
        if self == IDENTITY:
            return "pixels in [0, 1]"
        numbers = [f"({', '.join(f'{v:.4g}' for v in values)})" for values in (self.mean, self.std)]
        return f"mean {numbers[0]} std {numbers[1]}" + (" then ZCA" if self.zca else "")


def _channels(values: Sequence[float], name: str) -> tuple[float, ...]:
    given = values.tolist() if isinstance(values, Tensor | np.ndarray) and values.ndim == 1 else values
    return check.several(given, name, "numbers, one a channel")


IDENTITY = Normalization((0.0,), (1.0,))
"""Images are pixels in [0, 1], any number of channels."""
