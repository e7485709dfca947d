"""Conversion of images to a requested size and number of channels, as float or byte pixels."""

from __future__ import annotations

import os
from numbers import Integral
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from distillkit._utils import check

Size = int | tuple[int, int]
AnyPath = str | os.PathLike[str]

_SIDE = 1 << 15
"""Largest height and width in pixels, which excludes numbers that were meant otherwise."""
_LUMA = (0.299, 0.587, 0.114)


def to_pixels(images: Tensor, size: Size | None, channels: int | None) -> Tensor:
    """Convert images to a size and a number of channels, and return float32 pixels in [0, 1].

    Resizing is bilinear with antialiasing, and ignores the aspect ratio. RGB is converted to gray by the ITU-R 601
    luma. Gray is converted to RGB by repeating the channel.

    Args:
        images: [N, C, H, W], either uint8 in 0..255, uint16 in 0..65535 or float in [0, 1].
        size: height and width, or one number for both; None keeps the size.
        channels: number of channels, 1 or 3; None keeps the channels.
    """
    check.default_device()
    height, width = height_and_width(size) or images.shape[-2:]
    channels = images.shape[1] if channels is None else check.one_of(channels, "channels", (1, 3))
    pixels = torch.empty(len(images), channels, height, width)
    for chunk, out in zip(images.split(1024), pixels.split(1024)):
        part = chunk.float() / {torch.uint8: 255, torch.uint16: 65535}.get(chunk.dtype, 1)
        if channels == 1 and part.shape[1] == 3:
            part = (part * part.new_tensor(_LUMA).view(1, 3, 1, 1)).sum(1, keepdim=True)
        if part.shape[-2:] != (height, width):
            part = F.interpolate(part, (height, width), mode="bilinear", antialias=True)
        out.copy_(part)
    return pixels.clamp_(0, 1)


def to_bytes(pixels: Tensor) -> Tensor:
    """Round float pixels to bytes, with an error of at most 1/510.

    Pixels that were computed from bytes without resizing are restored exactly.

    Args:
        pixels: float [..., H, W] in [0, 1].
    """
    return (pixels * 255).round().to(torch.uint8)


def height_and_width(size: Size | None) -> tuple[int, int] | None:
    """Return the height and width that an argument `size` specifies, or None if `size` is None.

    Raises:
        TypeError, ValueError: `size` is neither an integer in [1, 32768] nor a pair of such integers.
    """
    if size is None:
        return None
    given: Any = (size, size) if isinstance(size, Integral) else size
    height, width = check.sequence(given, "size", "numbers of pixels (height, width), if not one number", 2)
    return check.positive_int(height, "size", most=_SIDE), check.positive_int(width, "size", most=_SIDE)
