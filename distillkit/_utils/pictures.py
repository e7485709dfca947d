"""Conversion of PIL pictures to arrays of bytes, with a background for transparent pixels."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["picture_array"]


def picture_array(picture: Any, background: float | None, remedy: str) -> NDArray[np.uint8]:
    """Convert a PIL picture to an array uint8, [H, W] if it is gray, and [H, W, 3] otherwise.

    Args:
        picture: the picture, in any mode with 8 bits per channel.
        background: gray value in [0, 1] behind transparent pixels. None refuses pictures with transparent pixels,
            because the colors stored for these pixels are arbitrary and often constant.
        remedy: advice on transparent pixels for the error message.

    Raises:
        ValueError: `background` is None and some pixels are transparent.
    """
    gray = picture.mode in ("1", "L", "LA", "La")
    if picture.has_transparency_data:
        from PIL import Image

        layered = picture.convert("RGBA")
        if layered.getextrema()[3][0] < 255:
            if background is None:
                raise ValueError(f"some of its pixels are transparent; {remedy}")
            level = round(255 * background)
            picture = Image.alpha_composite(Image.new("RGBA", layered.size, (level, level, level, 255)), layered)
    array: NDArray[np.uint8] = np.array(picture.convert("L" if gray else "RGB"))
    return array
