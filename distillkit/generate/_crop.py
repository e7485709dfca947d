"""Rendering of a random crop from its parameters, such as position and rotation. `Patches` draws these parameters."""

from __future__ import annotations

import io
import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class CropParameters(NamedTuple):
    """Parameters of one random crop: the results of all random draws that determine it.

    Attributes:
        top, left, height, width: rectangle that is cut out of the image and resized, in pixels of the image.
        rotation, shear: angle of the rotation, and angle of the shear along x, in degrees.
        flip: whether the crop is mirrored.
        jitter: color operations as pairs (name, amount), in the order of application. It is empty for a crop without
            color jitter.
    """

    top: int
    left: int
    height: int
    width: int
    rotation: float
    shear: float
    flip: bool
    jitter: tuple[tuple[str, float], ...]


def render(image: Tensor, parameters: CropParameters, size: int, jpeg_quality: int | None = None) -> Tensor:
    """Render one crop of an image, and return it as uint8 [C, size, size].

    Crops are rendered one by one, because in a batch, rounding errors would depend on the other crops.

    Args:
        image: float [C, H, W] in [0, 1].
        parameters: parameters of the crop, from `Patches.crop_parameters`.
        size: side of the crop in pixels.
        jpeg_quality: quality, 1 to 100, of a JPEG compression that is applied to the crop; None for no compression.
    """
    from kornia.geometry.transform import warp_affine

    rows = slice(parameters.top, parameters.top + parameters.height)
    columns = slice(parameters.left, parameters.left + parameters.width)
    large = int(math.sqrt(2) * size)
    # kornia's resize blurs before sampling; this is the antialiasing filter of image libraries.
    crop = F.interpolate(image[None, :, rows, columns], (large, large), mode="bicubic", antialias=True)
    crop = warp_affine(crop.clamp(0, 1), _affine_matrix(parameters, large, size).to(image), (size, size))
    if parameters.flip:
        crop = crop.flip(-1)
    for operation, amount in parameters.jitter:
        crop = _adjust(crop, operation, amount)
    pixels = (crop[0] * 255).round().clamp(0, 255).to(torch.uint8)
    return pixels if jpeg_quality is None else _through_jpeg(pixels, jpeg_quality)


def _affine_matrix(parameters: CropParameters, large: int, size: int) -> Tensor:
    """Return the matrix [1, 2, 3] that shears and rotates a crop of side `large`, and center-crops it to `size`."""
    angle, slant = math.radians(parameters.rotation), math.tan(math.radians(parameters.shear))
    cos, sin, middle = math.cos(angle), math.sin(angle), (large - 1) / 2
    margin = round((large - size) / 2)
    x = [cos, -cos * slant - sin]
    y = [sin, -sin * slant + cos]
    return torch.tensor([[[a, b, middle * (1 - a - b) - margin] for a, b in (x, y)]])


def _adjust(crop: Tensor, operation: str, amount: float) -> Tensor:
    from kornia import enhance

    if operation == "brightness":
        return enhance.adjust_brightness_accumulative(crop, 1 + amount)
    if operation == "contrast":
        return enhance.adjust_contrast_with_mean_subtraction(crop, 1 + amount)
    if crop.shape[1] != 3:
        return crop
    if operation == "saturation":
        return enhance.adjust_saturation_with_gray_subtraction(crop, 1 + amount)
    return enhance.adjust_hue(crop, 2 * math.pi * amount)


def _through_jpeg(pixels: Tensor, quality: int) -> Tensor:
    """Compress pixels, uint8 [C, H, W], as JPEG in memory, and return the decompressed pixels."""
    import numpy as np
    from PIL import Image

    rows = pixels.cpu().permute(1, 2, 0).numpy()
    file = io.BytesIO()
    Image.fromarray(rows[..., 0] if len(pixels) == 1 else rows).save(file, "JPEG", quality=quality)
    decoded = torch.from_numpy(np.array(Image.open(file)))
    return decoded.view(rows.shape).permute(2, 0, 1).to(pixels.device)
