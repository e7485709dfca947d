"""Noise images that are independent of the private data."""

from __future__ import annotations

import torch
from torch import Tensor

from distillkit.sets import LabeledImages


def public_noise(count: int, like: LabeledImages, generator: torch.Generator, *, coarse: int = 2) -> Tensor:
    """Draw smooth noise images, float [count, C, H, W], that are independent of the private data.

    The noise is Gaussian, with the pixel mean and standard deviation of the normalization of `like`, which are public
    constants. It is drawn at 1 / `coarse` of the resolution, enlarged bilinearly, clamped to [0, 1] and then
    normalized.

    Args:
        count: number of images.
        like: set with the shape, normalization, dtype and device of the result; its images are not used.
        generator: generator with which the images are drawn.
        coarse: resolution of the images divided by the resolution of the noise; 1 gives white noise.
    """
    c, h, w = like.shape
    small_h, small_w = (min(side, max(2, side // coarse)) for side in (h, w))
    small = torch.randn(count, c, small_h, small_w, generator=generator, dtype=like.images.dtype)
    smooth = torch.nn.functional.interpolate(small, size=(h, w), mode="bilinear", align_corners=False)
    mean, std = (smooth.new_tensor(values).view(-1, 1, 1) for values in (like.mean, like.std))
    return like.normalization.encode((mean + std * smooth).clamp(0, 1).to(like.images.device))


def public_test_images(count: int, like: LabeledImages, generator: torch.Generator) -> Tensor:
    """Draw images that are independent of the data, to test that a network treats each image separately.

    The result is float [count, C, H, W].

    The images are `public_noise` plus a little white noise, so that no image is constant. In a norm layer, the rounding
    error on a constant image could be mistaken for an influence of other images.

    Args:
        count: number of images.
        like: set with the shape, normalization, dtype and device of the result; its images are not used.
        generator: generator with which the images are drawn.
    """
    white = torch.randn(count, *like.shape, generator=generator, dtype=like.images.dtype)
    return public_noise(count, like, generator) + 0.3 * white.to(like.images.device)
