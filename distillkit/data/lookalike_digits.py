"""Digits made here that resemble sets which cannot be shipped; their names end in `-like`, in tables too."""

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
from distillkit.data.split import Split, assemble, to_pixels
from distillkit.normalization import Normalization
from distillkit.rng import as_generator

__all__ = ["FONTS", "NAMES", "mnist_m_like", "synth_digits_like"]

NAMES = {"mnistmlike": "mnistm-like", "synthdigitslike": "synthdigits-like"}
"""What tables call them, by the name that `load` knows."""

FONTS = (
    *(f"DejaVuSans{kind}" for kind in ("", "-Bold", "-Oblique", "-BoldOblique")),
    *(f"DejaVuSansMono{kind}" for kind in ("", "-Bold", "-Oblique", "-BoldOblique")),
    *(f"DejaVuSerif{kind}" for kind in ("", "-Bold", "-Italic", "-BoldItalic")),
    *(f"STIXGeneral{kind}" for kind in ("", "Bol", "Italic", "BolIta")),
    *("cmr10", "cmb10", "cmss10", "cmtt10", "cmti10"),
)
"""The faces inside matplotlib that have the ten digits."""

_CHUNK = 1024
_LEAST_CONTRAST = 0.25


def mnist_m_like(
    digits: Split,
    *,
    photos: Sequence[Tensor | NDArray[Any]] | None = None,
    normalization: Normalization | None = None,
    generator: int | torch.Generator = 0,
) -> Split:
    """Blend grey digits with crops of photos, as MNIST-M was made of MNIST: |crop - digit|, a crop for every digit.

    For the fifth of the DIGITS domains where MNIST-M itself is not to be had. Ganin and Lempitsky ("Unsupervised domain
    adaptation by backpropagation", ICML 2015) took their crops from the 500 photos of BSDS500; with two photos the
    backgrounds differ less.

    Args:
        digits: white on black, one channel, of any size, as `load("mnist")` gives them.
        photos: uint8 [H, W, 3], not smaller than the digits. Default: the two inside scikit-learn (both CC BY 2.0).
        normalization: default the mean and standard deviation measured on the training split.
        generator: seed or generator.

    Returns:
        A `Split` of the same digits in the same order, in three channels, `dataset` is `<dataset>-m-like`, for MNIST
        `mnistm-like`.

    Raises:
        TypeError, ValueError: no `Split` of grey pictures, or photos of another kind or smaller than the digits.
    """
    if not isinstance(digits, Split):
        raise TypeError(f"digits must be a Split, as load('mnist') gives it, got {type(digits).__name__}")
    channels, height, width = digits.train.shape
    if channels != 1:
        raise ValueError(f"digits must be grey (one channel), got {channels} channels; load them with channels=1")
    found = _photos(photos, height, width)
    rng = as_generator(generator)
    parts = {"train": digits.train, "test": digits.test}
    pixels = {}
    for part, data in parts.items():
        pixels[part] = torch.empty(len(data), 3, height, width)
        for begin in range(0, len(data), _CHUNK):
            grey = data[begin : begin + _CHUNK].pixels()
            pixels[part][begin : begin + len(grey)] = (_crops(found, len(grey), height, width, rng) - grey).abs()
    name = str(digits.train.info.get("dataset", "digits"))
    info = {"dataset": "mnistm-like" if name == "mnist" else f"{name}-m-like", "photos": len(found)}
    labels = {part: data.labels for part, data in parts.items()}
    return assemble(pixels, labels, digits.classes, normalization, info, classes_given=digits.train.classes_given)


def synth_digits_like(
    *,
    train: int = 10_000,
    test: int = 2_000,
    size: int = 32,
    normalization: Normalization | None = None,
    generator: int | torch.Generator = 0,
) -> Split:
    """Draw digits from fonts, as SynthDigits was made: the middle digit of one to three counts, as in house numbers.

    For the fourth of the DIGITS domains where SynthDigits itself is not to be had. Ganin and Lempitsky (ICML 2015) drew
    half a million from the fonts of Windows, varying the text, its place and turn, the colours of stroke and
    background, and the blur; so is here, with the 21 faces inside matplotlib.

    Args:
        train, test: how many pictures, as many of each digit as of the others, give or take one.
        size: height and width in pixels.
        normalization: default the mean and standard deviation measured on the training split.
        generator: seed or generator. The same pictures come out with the same versions of Pillow and matplotlib.

    Returns:
        A `Split` of three channels, `dataset` is `synthdigits-like`.

    Raises:
        TypeError, ValueError: numbers that are none, or too small.
    """
    counts = {
        "train": check.positive_int(train, "train", least=10),
        "test": check.positive_int(test, "test", least=10),
    }
    check.positive_int(size, "size", least=8)
    rng = as_generator(generator)
    pixels, labels = {}, {}
    for part, count in counts.items():
        labels[part] = (torch.arange(count) % 10)[torch.randperm(count, generator=rng)]
        pixels[part] = _drawn(labels[part], size, rng)
    return assemble(pixels, labels, tuple("0123456789"), normalization, {"dataset": "synthdigits-like"})


def _photos(photos: Sequence[Tensor | NDArray[Any]] | None, height: int, width: int) -> list[Tensor]:
    """The photos as uint8 [3, H, W]."""
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
            came = f"{pixels.dtype} {list(pixels.shape)}" if isinstance(pixels, Tensor) else type(photo).__name__
            raise ValueError(f"photos must be uint8 [H, W, 3], got {came}")
        if pixels.shape[0] < height or pixels.shape[1] < width:
            raise ValueError(
                f"photos must not be smaller than the digits, {height}x{width}, got {list(pixels.shape[:2])}"
            )
        found.append(pixels.permute(2, 0, 1))
    return found


def _crops(photos: list[Tensor], count: int, height: int, width: int, rng: torch.Generator) -> Tensor:
    """Random crops as pixels [count, 3, height, width]."""
    which = torch.randint(len(photos), (count,), generator=rng)
    place = torch.rand(count, 2, generator=rng)
    crops = torch.empty(count, 3, height, width)
    for number, photo in enumerate(photos):
        mine = (which == number).nonzero().flatten()
        room = torch.tensor([photo.shape[1] - height + 1, photo.shape[2] - width + 1])
        top, left = (place[mine] * room).long().T
        rows = top[:, None, None] + torch.arange(height)[:, None]
        columns = left[:, None, None] + torch.arange(width)
        crops[mine] = photo[:, rows, columns].transpose(0, 1).float() / 255
    return crops


def _drawn(labels: Tensor, size: int, rng: torch.Generator) -> Tensor:
    """Pixels [N, 3, size, size] of the digits."""
    count = len(labels)
    text = torch.randint(10, (count, 2), generator=rng)  # its neighbours
    shown = torch.rand(count, 2, generator=rng) < 0.5
    face = torch.randint(len(FONTS), (count,), generator=rng)
    height, turn, shift_x, shift_y, blur = torch.rand(count, 5, generator=rng).T.tolist()
    stroke, ground = _colours(count, rng)
    masks = torch.empty(count, 1, size, size)
    for i, digit in enumerate(labels.tolist()):
        beside = [str(n) if s else "" for n, s in zip(text[i].tolist(), shown[i].tolist())]
        masks[i, 0] = _mask(
            digit,
            beside,
            FONTS[int(face[i])],
            size,
            height=0.5 + 0.4 * height[i],
            turn=40 * turn[i] - 20,
            shift=(0.2 * shift_x[i] - 0.1, 0.2 * shift_y[i] - 0.1),
            blur=1.2 * blur[i],
        )
    return ground + masks * (stroke - ground)


def _colours(count: int, rng: torch.Generator) -> tuple[Tensor, Tensor]:
    """Colours of stroke and ground, [N, 3, 1, 1] each, that can be told apart: drawn again until they can."""
    colours = torch.rand(count, 2, 3, generator=rng)
    while len(alike := ((colours[:, 0] - colours[:, 1]).abs().mean(1) < _LEAST_CONTRAST).nonzero().flatten()):
        colours[alike] = torch.rand(len(alike), 2, 3, generator=rng)
    return colours[:, 0, :, None, None], colours[:, 1, :, None, None]


def _mask(
    digit: int,
    beside: list[str],
    face: str,
    size: int,
    *,
    height: float,
    turn: float,
    shift: tuple[float, float],
    blur: float,
) -> Tensor:
    """How much stroke lies on each pixel, [size, size] in [0, 1]; drawn at twice the size."""
    from PIL import Image, ImageDraw, ImageFilter

    side = 2 * size
    canvas = Image.new("L", (side, side))
    font = _font(face, round(height * side / 0.73))  # a digit is about 0.73 of its font's size
    draw = ImageDraw.Draw(canvas)
    half = font.getlength(str(digit)) / 2
    for text, x, anchor in ((str(digit), 0.0, "mm"), (beside[0], -half, "rm"), (beside[1], half, "lm")):
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
