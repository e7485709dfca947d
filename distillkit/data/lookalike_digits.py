"""Generated substitutes for the datasets MNIST-M and SynthDigits. Their names end in `-like`."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from distillkit._utils import check, conversion
from distillkit._utils.pixels import to_pixels
from distillkit.data._assembly import SplitBuilder
from distillkit.data.split import Split
from distillkit.normalization import Normalization
from distillkit.rng import as_generator
from distillkit.sets._info import inherited_info

_FONTS = (  # the font faces in matplotlib that contain all ten digits
    *(f"DejaVuSans{kind}" for kind in ("", "-Bold", "-Oblique", "-BoldOblique")),
    *(f"DejaVuSansMono{kind}" for kind in ("", "-Bold", "-Oblique", "-BoldOblique")),
    *(f"DejaVuSerif{kind}" for kind in ("", "-Bold", "-Italic", "-BoldItalic")),
    *(f"STIXGeneral{kind}" for kind in ("", "Bol", "Italic", "BolIta")),
    *("cmr10", "cmb10", "cmss10", "cmtt10", "cmti10"),
)

_CHUNK = 1024
_LEAST_CONTRAST = 0.25


def mnist_m_like(
    digits: Split,
    *,
    photos: Sequence[Tensor | NDArray[Any]] | None = None,
    normalization: Normalization | None = None,
    generator: int | torch.Generator = 0,
) -> Split:
    """Blend each gray digit with a random crop of a photo, in the way MNIST-M was made from MNIST.

    The result is |crop - digit| in each pixel. Use it if you do not have MNIST-M, the fifth domain of the benchmark
    DIGITS. Ganin and Lempitsky ("Unsupervised domain adaptation by backpropagation", ICML 2015) used 500 photos
    (BSDS500); with the two default photos, the backgrounds vary less. The photo and crop of a digit depend on its place
    in the split, so epsilon does not hold for the result: make private records one by one.

    Args:
        digits: split of white digits on black, with one channel and any size, such as `load("mnist")`.
        photos: photos, uint8 [H, W, 3], not smaller than the digits. Default: the two photos that scikit-learn contains
            (both CC BY 2.0).
        normalization: normalization of the sets. Default: mean and standard deviation measured on the training split.
        generator: seed or random generator.

    Returns:
        A `Split` of the same digits in the same order, with three channels. `info["dataset"]` is `mnistm-like` for the
        digits of MNIST, and `<dataset>-m-like` for those of another dataset.

    Raises:
        TypeError, ValueError: `digits` is not a `Split` of gray pictures, or a photo has another type or is smaller
            than the digits.
    """
    check.instance(digits, Split, "digits", "a Split, as load('mnist') gives it")
    channels, height, width = digits.train.shape
    if channels != 1:
        raise ValueError(f"digits must be grey (one channel), got {channels} channels; load them with channels=1")
    images = _photos(photos, height, width)
    rng = as_generator(generator)
    parts = {"train": digits.train, "test": digits.test}
    pixels = {}
    for part, data in parts.items():
        pixels[part] = torch.empty(len(data), 3, height, width)
        for begin in range(0, len(data), _CHUNK):
            grey = data[begin : begin + _CHUNK].pixels()
            pixels[part][begin : begin + len(grey)] = (_crops(images, len(grey), height, width, rng) - grey).abs()
    name = str(digits.train.info.get("dataset", "digits"))
    info = {"dataset": "mnistm-like" if name == "mnist" else f"{name}-m-like", "photos": len(images)}
    info |= inherited_info([data.info for data in parts.values()], "photos of unknown origin")
    labels = {part: data.labels for part, data in parts.items()}
    return SplitBuilder(labels, digits.classes, normalization, info, digits.train.classes_given).build(pixels)


def synth_digits_like(
    *,
    train: int = 10_000,
    test: int = 2_000,
    size: int = 32,
    normalization: Normalization | None = None,
    generator: int | torch.Generator = 0,
) -> Split:
    """Draw color images of one to three digits in various fonts, like SynthDigits. The label is the middle digit.

    Use it if you do not have SynthDigits, the fourth domain of the benchmark DIGITS. Ganin and Lempitsky (ICML 2015)
    drew half a million digits with the fonts of Windows, and varied the text, its position and rotation, the colors of
    stroke and background, and the blur. This function varies the same properties, with the 21 font faces that
    matplotlib contains.

    Args:
        train, test: number of pictures in each set, at least 10. The counts of the ten digits differ by at most one.
        size: height and width in pixels, at least 8.
        normalization: normalization of the sets. Default: mean and standard deviation measured on the training split.
        generator: seed or random generator. Pictures are only reproducible with the same versions of Pillow and
            matplotlib.

    Returns:
        A `Split` with three channels. `info["dataset"]` is `synthdigits-like`.

    Raises:
        TypeError, ValueError: a number is not an integer, or is too small.
    """
    counts = {"train": check.positive_int(train, "train", least=10), "test": check.positive_int(test, "test", least=10)}
    check.positive_int(size, "size", least=8)
    rng = as_generator(generator)
    pixels, labels = {}, {}
    for part, count in counts.items():
        labels[part] = (torch.arange(count) % 10)[torch.randperm(count, generator=rng)]
        pixels[part] = _draw(labels[part], size, rng)
    return SplitBuilder(labels, tuple("0123456789"), normalization, {"dataset": "synthdigits-like"}).build(pixels)


def _photos(photos: Sequence[Tensor | NDArray[Any]] | None, height: int, width: int) -> list[Tensor]:
    """Check the photos, which must be at least `height` x `width`, and return them as uint8 [3, H, W]."""
    if photos is None:
        from sklearn.datasets import load_sample_images

        photos = load_sample_images().images
    given = check.sequence(photos, "photos", "pictures uint8 [H, W, 3]")
    if not given:
        raise ValueError("photos must be at least one picture, got none")
    found = []
    for photo in given:
        pixels = conversion.as_tensor(photo, "photos")
        if not isinstance(pixels, Tensor) or pixels.dtype != torch.uint8 or pixels.ndim != 3 or pixels.shape[2] != 3:
            got = f"{pixels.dtype} {list(pixels.shape)}" if isinstance(pixels, Tensor) else type(photo).__name__
            raise ValueError(f"photos must be uint8 [H, W, 3], got {got}")
        if pixels.shape[0] < height or pixels.shape[1] < width:
            raise ValueError(
                f"photos must not be smaller than the digits, {height}x{width}, got {list(pixels.shape[:2])}"
            )
        found.append(pixels.permute(2, 0, 1))
    return found


def _crops(photos: list[Tensor], count: int, height: int, width: int, rng: torch.Generator) -> Tensor:
    """Return random crops of random photos as float pixels [count, 3, height, width] in [0, 1]."""
    which = torch.randint(len(photos), (count,), generator=rng)
    position = torch.rand(count, 2, generator=rng)
    crops = torch.empty(count, 3, height, width)
    for number, photo in enumerate(photos):
        own = (which == number).nonzero().flatten()
        extent = torch.tensor([photo.shape[1] - height + 1, photo.shape[2] - width + 1])
        top, left = (position[own] * extent).long().T
        rows = top[:, None, None] + torch.arange(height)[:, None]
        columns = left[:, None, None] + torch.arange(width)
        crops[own] = photo[:, rows, columns].transpose(0, 1).float() / 255
    return crops


def _draw(labels: Tensor, size: int, rng: torch.Generator) -> Tensor:
    """Draw one picture for each label, and return float pixels [N, 3, size, size] in [0, 1]."""
    count = len(labels)
    text = torch.randint(10, (count, 2), generator=rng)  # the neighbouring digits
    shown = torch.rand(count, 2, generator=rng) < 0.5
    face = torch.randint(len(_FONTS), (count,), generator=rng)
    height, turn, shift_x, shift_y, blur = torch.rand(count, 5, generator=rng).T.tolist()
    stroke, ground = _colours(count, rng)
    masks = torch.empty(count, 1, size, size)
    for i, digit in enumerate(labels.tolist()):
        left, right = (str(n) if s else "" for n, s in zip(text[i].tolist(), shown[i].tolist()))
        masks[i, 0] = _mask(
            [left, str(digit), right],
            _FONTS[int(face[i])],
            size,
            height=0.5 + 0.4 * height[i],
            turn=40 * turn[i] - 20,
            shift=(0.2 * shift_x[i] - 0.1, 0.2 * shift_y[i] - 0.1),
            blur=1.2 * blur[i],
        )
    return ground + masks * (stroke - ground)


def _colours(count: int, rng: torch.Generator) -> tuple[Tensor, Tensor]:
    """Draw random digit colors and background colors, [count, 3, 1, 1] each, with sufficient contrast."""
    colours = torch.rand(count, 2, 3, generator=rng)
    while len(similar := ((colours[:, 0] - colours[:, 1]).abs().mean(1) < _LEAST_CONTRAST).nonzero().flatten()):
        colours[similar] = torch.rand(len(similar), 2, 3, generator=rng)
    return colours[:, 0, :, None, None], colours[:, 1, :, None, None]


def _mask(
    digits: list[str], face: str, size: int, *, height: float, turn: float, shift: tuple[float, float], blur: float
) -> Tensor:
    """Draw up to three digits, and return the fraction of each pixel that they cover, float [size, size]."""
    from PIL import Image, ImageDraw, ImageFilter

    side = 2 * size
    canvas = Image.new("L", (side, side))
    font = _font(face, round(height * side / 0.73))  # a digit is about 0.73 of its font's size
    draw = ImageDraw.Draw(canvas)
    left, digit, right = digits
    half = font.getlength(digit) / 2
    for text, x, anchor in ((digit, 0.0, "mm"), (left, -half, "rm"), (right, half, "lm")):
        if text:
            draw.text((side / 2 + x, side / 2), text, fill=255, font=font, anchor=anchor)
    moved = (shift[0] * side, shift[1] * side)
    canvas = canvas.rotate(turn, Image.Resampling.BICUBIC, translate=(round(moved[0]), round(moved[1])))
    canvas = canvas.filter(ImageFilter.GaussianBlur(blur * side / 32))
    return to_pixels(torch.from_numpy(np.array(canvas))[None, None], size, None)[0, 0]


@lru_cache(maxsize=1024)
def _font(face: str, points: int) -> Any:
    from matplotlib import get_data_path
    from PIL import ImageFont

    return ImageFont.truetype(Path(get_data_path(), "fonts", "ttf", f"{face}.ttf"), points)
