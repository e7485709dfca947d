"""How a set shows itself in a notebook: its facts, and a picture of some images of each class."""

from __future__ import annotations

import base64
import html
import io

import torch
from torch import Tensor

__all__ = ["as_html", "as_png", "shown"]

_CLASSES, _EACH, _PADDING = 10, 10, 1


def shown(classes: Tensor) -> list[Tensor]:
    """The images that stand for a set, by class: the indices of up to 10 of each of up to 10 classes.

    Args:
        classes: class indices int [N].
    """
    return [(classes == c).nonzero().flatten()[:_EACH] for c in classes.unique()[:_CLASSES]]


def as_png(rows: list[Tensor]) -> bytes:
    """A PNG with a row for each batch of pixels float [n, C, H, W] in [0, 1]; grey unless C is 1 or 3.

    Raises:
        ValueError: an empty set.
    """
    from PIL import Image

    if not rows:
        raise ValueError("an empty set has no picture")
    across = max(len(row) for row in rows)
    c, h, w = rows[0].shape[1:]
    channels = c if c in (1, 3) else 1
    sheet = torch.ones(channels, len(rows) * (h + _PADDING) + _PADDING, across * (w + _PADDING) + _PADDING)
    for i, row in enumerate(rows):
        pixels = row.detach().cpu().float()
        for j, one in enumerate(pixels if channels == c else pixels.mean(1, keepdim=True)):
            top, left = _PADDING + i * (h + _PADDING), _PADDING + j * (w + _PADDING)
            sheet[:, top : top + h, left : left + w] = one
    array = (sheet * 255).round().to(torch.uint8).permute(1, 2, 0).numpy()
    file = io.BytesIO()
    Image.fromarray(array[..., 0] if channels == 1 else array).save(file, "PNG", optimize=True)
    return file.getvalue()


def as_html(text: str, rows: list[Tensor], classes: int) -> str:
    """A text and the picture of `rows`, enlarged to about 40 pixels an image, as one piece of HTML.

    Args:
        text: the set's repr.
        rows: pixels of each class that is shown, as for `as_png`; empty for no picture.
        classes: how many classes the set holds.
    """
    said = f"<code>{html.escape(text)}</code>"
    if not rows:
        return f"<div>{said}</div>"
    caption = "one class a row" if classes <= _CLASSES else f"the first {_CLASSES} of {classes} classes, one a row"
    style = f"image-rendering: pixelated; zoom: {max(1, round(40 / max(rows[0].shape[2:])))}"
    encoded = base64.b64encode(as_png(rows)).decode()
    picture = f'<img alt="{caption}" title="{caption}" style="{style}" src="data:image/png;base64,{encoded}">'
    return f"<div>{said}<br>{picture}</div>"
