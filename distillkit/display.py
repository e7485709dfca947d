"""How a set shows itself in a notebook: its facts, and a picture of some images of each class."""

from __future__ import annotations

import base64
import html
import io
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from distillkit.sets import LabeledImages

__all__ = ["as_html", "as_png"]

_CLASSES, _EACH, _PADDING = 10, 10, 1


def as_png(data: LabeledImages) -> bytes:
    """A PNG of up to 10 images of each of up to 10 classes, a class a row, in pixel units; grey unless C is 1 or 3.

    Raises:
        ValueError: an empty set.
    """
    from PIL import Image

    if not len(data):
        raise ValueError("an empty set has no picture")
    marks = data.labels if data.labels.ndim == 1 else data.labels.argmax(1)
    rows = [(marks == c).nonzero().flatten()[:_EACH] for c in marks.unique()[:_CLASSES]]
    across = max(len(row) for row in rows)
    c, h, w = data.shape
    channels = c if c in (1, 3) else 1
    sheet = torch.ones(channels, len(rows) * (h + _PADDING) + _PADDING, across * (w + _PADDING) + _PADDING)
    for i, row in enumerate(rows):
        pixels = data[row].pixels().detach().cpu().float()
        for j, one in enumerate(pixels if channels == c else pixels.mean(1, keepdim=True)):
            top, left = _PADDING + i * (h + _PADDING), _PADDING + j * (w + _PADDING)
            sheet[:, top : top + h, left : left + w] = one
    array = (sheet * 255).round().to(torch.uint8).permute(1, 2, 0).numpy()
    file = io.BytesIO()
    Image.fromarray(array[..., 0] if channels == 1 else array).save(file, "PNG", optimize=True)
    return file.getvalue()


def as_html(data: LabeledImages) -> str:
    """The set's repr and its picture, enlarged to about 40 pixels an image, as one piece of HTML."""
    text = f"<code>{html.escape(repr(data))}</code>"
    if not len(data):
        return f"<div>{text}</div>"
    held = int((data.labels if data.labels.ndim == 1 else data.labels.argmax(1)).unique().numel())
    rows = "one class a row" if held <= _CLASSES else f"the first {_CLASSES} of {held} classes, one a row"
    zoom = max(1, round(40 / max(data.shape[1:])))
    encoded = base64.b64encode(as_png(data)).decode()
    style = f"image-rendering: pixelated; zoom: {zoom}"
    picture = f'<img alt="{rows}" title="{rows}" style="{style}" src="data:image/png;base64,{encoded}">'
    return f"<div>{text}<br>{picture}</div>"
