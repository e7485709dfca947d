"""Conversion of PIL pictures to arrays of 8 or 16 bits, as their files state: orientation, range and transparency."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

_GRAY = ("1", "L", "LA", "La")
_COLOR = ("P", "PA", "RGB", "RGBA", "RGBa", "RGBX", "CMYK", "YCbCr", "HSV")
_ORIENTATION = 0x0112
"""EXIF tag of the orientation, 1 to 8; 1 is upright."""


def picture_array(picture: Any, background: float | None, remedy: str) -> NDArray[np.uint8] | NDArray[np.uint16]:
    """Convert a PIL picture to an array, [H, W] if it is gray, and [H, W, 3] otherwise.

    The array has the type uint16 if the picture has 16-bit gray values, otherwise uint8. The picture is turned as its
    EXIF orientation states.
    """
    _require_one_frame_of_known_range(picture)
    if getattr(picture, "format", None) == "TIFF":
        picture.filename = ""  # otherwise, Pillow maps the file into memory, and turns it with height and width swapped
    picture.load()  # turns a TIFF, and removes its tag
    if picture.getexif().get(_ORIENTATION, 1) in range(2, 9):
        from PIL import ImageOps

        picture = ImageOps.exif_transpose(picture)
    if picture.mode.startswith("I"):
        return _deep_gray(picture, background, remedy)
    gray = picture.mode in _GRAY
    if picture.has_transparency_data:
        from PIL import Image

        layered = (picture.convert("LA") if picture.mode == "La" else picture).convert("RGBA")
        if layered.getextrema()[3][0] < 255:
            if background is None:
                raise ValueError(f"some of its pixels are transparent; {remedy}")
            level = round(255 * background)
            picture = Image.alpha_composite(Image.new("RGBA", layered.size, (level, level, level, 255)), layered)
        else:
            picture = layered
    array: NDArray[np.uint8] = np.array(picture.convert("L" if gray else "RGB"))
    return array


def picture_shape(picture: Any) -> tuple[int, int, int]:
    """Return the shape (C, H, W) of a picture from its header, and refuse what `picture_array` refuses there."""
    _require_one_frame_of_known_range(picture)
    width, height = picture.size
    if getattr(picture, "format", None) == "TIFF":  # some versions of Pillow have turned its size already
        width, height = picture.tag_v2[256], picture.tag_v2[257]
    late = getattr(picture, "format", None) == "PNG" and not any("exif" in str(key) for key in picture.info)
    if not late and picture.getexif().get(_ORIENTATION, 1) in (5, 6, 7, 8):  # Pillow would decode a PNG to look
        width, height = height, width
    return 1 if picture.mode in _GRAY or picture.mode.startswith("I") else 3, height, width


def _deep_gray(picture: Any, background: float | None, remedy: str) -> NDArray[np.uint16]:
    array: NDArray[np.uint16] = np.array(picture).astype(np.uint16)
    hidden = picture.info.get("transparency")
    if isinstance(hidden, int) and bool((through := array == hidden).any()):
        if background is None:
            raise ValueError(f"some of its pixels are transparent; {remedy}")
        array[through] = round(65535 * background)
    return array


def _require_one_frame_of_known_range(picture: Any) -> None:
    mode, form = picture.mode, getattr(picture, "format", None)
    frames = getattr(picture, "n_frames", 1)
    if frames > 1 and form != "MPO":  # the pictures after the first in a camera's MPO file are previews
        raise ValueError(f"it has {frames} frames or pages; save the frame that you need as a picture of its own")
    deep = mode.startswith("I;16") or (mode == "I" and form in ("PNG", "PPM"))
    if not deep and mode not in (*_GRAY, *_COLOR):
        raise ValueError(
            f"pixels of mode {mode} have no defined range; save the picture with 8 bits, or as 16-bit gray"
        )
    for _, _, _, layout in getattr(picture, "tile", ()):  # how the pixels of a file that is not read yet are stored
        raw, *more = layout if isinstance(layout, tuple) else (layout,)
        many = form == "PPM" and bool(more) and isinstance(more[0], int) and more[0] > 255
        if not deep and (";16" in str(raw) or many):
            raise ValueError(f"it has 16 bits per value in mode {mode}, of which 8 would be lost; save it with 8 bits")
        if deep and "I;12" in str(raw):
            raise ValueError("it has 12 bits per value, which would be read as dark 16-bit values; use 16 bits")
