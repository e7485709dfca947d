"""Display of sets and figures in notebooks and reports, and short `repr`s of results."""

from __future__ import annotations

import base64
import html
import io
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

_CLASSES, _EACH, _PADDING = 10, 10, 1


def stable_repr(value: object) -> str:
    """Return a description of a value that is the same in every process.

    The description is the value's repr. If the repr contains a memory address, the description is instead the qualified
    name of the value (for example of a function) or of its class.
    """
    text = repr(value)
    if " at 0x" not in text:
        return text
    thing = value if hasattr(value, "__qualname__") else type(value)
    return f"{thing.__module__}.{getattr(thing, '__qualname__', '')}"


def short_repr(result: Any) -> str:
    """Return a one-line `repr` of a dataclass, in which a tensor is shown by its dtype and shape.

    Tensors with up to 10 numbers are shown in full.
    """
    told = [f"{f.name}={_said(getattr(result, f.name))}" for f in fields(result) if f.repr]
    return f"{type(result).__qualname__}({', '.join(told)})"


def _said(value: Any) -> str:
    if isinstance(value, Tensor):
        few = value.ndim < 2 and value.numel() <= 10
        return str(value.tolist()) if few else f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key!r}: {_said(one)}" for key, one in value.items()) + "}"
    if isinstance(value, tuple | list) and any(isinstance(one, Tensor) for one in value):
        if len(value) > 10:
            return f"{len(value)} tensors"
        return "(" + ", ".join(_said(one) for one in value) + ")"
    return getattr(value, "__name__", None) or repr(value)


def sample_rows(classes: Tensor) -> list[Tensor]:
    """Choose images to display: return the indices of up to 10 images for each of the first 10 classes."""
    return [(classes == c).nonzero().flatten()[:_EACH] for c in classes.unique()[:_CLASSES]]


def tile(rows: Sequence[Tensor], columns: int, padding: int) -> Tensor:
    """Arrange images in a grid on white, with one batch per row, and return the grid as pixels [C, H', W']."""
    c, h, w = rows[0].shape[1:]
    picture = rows[0].new_ones(c, len(rows) * (h + padding) + padding, columns * (w + padding) + padding)
    for i, row in enumerate(rows):
        for j, image in enumerate(row):
            top, left = padding + i * (h + padding), padding + j * (w + padding)
            picture[:, top : top + h, left : left + w] = image
    return picture


def as_png(rows: list[Tensor]) -> bytes:
    """Return the bytes of a PNG file that shows one batch of images per row."""
    from PIL import Image

    if not rows:
        raise ValueError("an empty set has no picture")
    pixels = [row.detach().cpu().float() for row in rows]
    c = pixels[0].shape[1]
    pixels = pixels if c in (1, 3) else [row.mean(1, keepdim=True) for row in pixels]
    picture = tile(pixels, max(len(row) for row in rows), _PADDING)
    array = (picture * 255).round().to(torch.uint8).permute(1, 2, 0).numpy()
    file = io.BytesIO()
    Image.fromarray(array[..., 0] if len(picture) == 1 else array).save(file, "PNG", optimize=True)
    return file.getvalue()


def embedded_picture(png: bytes, alt: str, **attributes: str) -> str:
    """Return an HTML tag that contains a whole PNG file."""
    given = {"alt": alt, **attributes, "src": f"data:image/png;base64,{base64.b64encode(png).decode()}"}
    written = [f'{name}="{html.escape(value)}"' for name, value in given.items()]
    return f"<img {' '.join(written)}>"


def as_html(text: str, rows: list[Tensor], classes: int) -> str:
    """Return the HTML that a notebook shows for a set: its `repr`, and sample images with sides of about 40 pixels."""
    said = f"<code>{html.escape(text)}</code>"
    if not rows:
        return f"<div>{said}</div>"
    caption = "one class a row" if classes <= _CLASSES else f"the first {_CLASSES} of {classes} classes, one a row"
    style = f"image-rendering: pixelated; zoom: {max(1, round(40 / max(rows[0].shape[2:])))}"
    return f"<div>{said}<br>{embedded_picture(as_png(rows), caption, title=caption, style=style)}</div>"


def two_digits(share: float) -> str:
    """Return a share in [0, 1] in per cent, such as "12" for 0.123."""
    return f"{100 * share:.2g}" if share < 0.995 else "100"
