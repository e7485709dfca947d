"""Noise images that owe nothing to private data."""

from __future__ import annotations

import torch
from torch import Tensor

from distillkit.sets import LabeledImages

__all__ = ["public_noise", "public_test_images"]


def public_noise(count: int, like: LabeledImages, generator: torch.Generator, *, coarse: int = 2) -> Tensor:
    """Smooth noise images that owe nothing to the data, [count, C, H, W] in the set's normalised space.

    Gaussian noise with the mean and standard deviation that the normalisation, a public constant, says pixels have; it
    is drawn at a `coarse`-th of the resolution, enlarged bilinearly and clamped to [0, 1].

    Args:
        count: how many images.
        like: gives shape, normalisation, dtype and device, and nothing else.
        generator: draws them.
        coarse: how much coarser than the images the noise is; 1 is white noise.
    """
    c, h, w = like.shape
    small_h, small_w = (min(side, max(2, side // coarse)) for side in (h, w))
    small = torch.randn(count, c, small_h, small_w, generator=generator, dtype=like.images.dtype)
    smooth = torch.nn.functional.interpolate(small, size=(h, w), mode="bilinear", align_corners=False)
    mean, std = (smooth.new_tensor(values).view(-1, 1, 1) for values in (like.mean, like.std))
    return like.normalization.encode((mean + std * smooth).clamp(0, 1).to(like.images.device))


def public_test_images(count: int, like: LabeledImages, generator: torch.Generator) -> Tensor:
    """Images to try a network on, float [count, C, H, W], that owe nothing to the data.

    `public_noise` and a little white noise. The white noise keeps every image from being constant, where rounding in a
    norm layer would look like a difference.

    Args:
        count: how many images.
        like: gives shape, normalisation, dtype and device, and nothing else.
        generator: draws them.
    """
    white = torch.randn(count, *like.shape, generator=generator, dtype=like.images.dtype)
    return public_noise(count, like, generator) + 0.3 * white.to(like.images.device)
