"""Shared drawing helpers for the pictures of the component pages."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from PIL import Image
from torch import Tensor
from torch.nn.functional import cross_entropy

from distillkit import LabeledImages
from distillkit.networks import ConvNet, build
from distillkit.plot.figure import LINE_COLOURS, subplots
from distillkit.rng import derive

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = [
    "GREY",
    "LINE_COLOURS",
    "OUT",
    "bare",
    "below",
    "images",
    "pictured",
    "plain",
    "subplots",
    "trained",
    "write",
]

OUT = Path(__file__).parents[1] / "pictures"
GREY = "#777777"


def write(figure: Any, name: str) -> None:
    """Write a picture at twice the usual resolution with at most 256 colours."""
    path = OUT / f"{name}.png"
    figure.savefig(path, dpi=200)
    Image.open(path).convert("RGB").quantize(256, dither=Image.Dither.NONE).save(path, optimize=True)


def plain(ax: Axes) -> None:
    """Remove the upper and right spines and add a faint grid behind the data."""
    ax.spines[["top", "right"]].set_visible(False)
    ax.grid(alpha=0.25)
    ax.set_axisbelow(True)


def bare(ax: Axes) -> None:
    """Remove ticks and frame, for images and diagrams."""
    ax.set(xticks=[], yticks=[])
    ax.spines[:].set_visible(False)


def below(ax: Axes, columns: int = 2) -> None:
    """Place the legend below the axes."""
    ax.legend(loc="upper center", bbox_to_anchor=(0.5, -0.2), ncol=columns, frameon=False, fontsize=8)


def pictured(pixels: Tensor) -> Any:
    """Return an image float [C, H, W] as matplotlib expects it: [H, W, 3] in [0, 1]."""
    return pixels.detach().clamp(0, 1).expand(3, -1, -1).permute(1, 2, 0).numpy()


def images(ax: Axes, rows: Sequence[Tensor], names: Sequence[str], columns: Sequence[str] = (), gap: int = 1) -> None:
    """Draw rows of images float [n, C, H, W] in [0, 1], with row labels at the left and column labels above."""
    count, (_, channels, height, width) = max(map(len, rows)), rows[0].shape
    sheet = torch.ones(channels, len(rows) * (height + gap), count * (width + gap))
    for i, row in enumerate(rows):
        for j, image in enumerate(row):
            top, left = i * (height + gap), j * (width + gap)
            sheet[:, top : top + height, left : left + width] = image.detach()
    ax.imshow(pictured(sheet), interpolation="nearest")
    bare(ax)
    ax.set_yticks([i * (height + gap) + height / 2 for i in range(len(rows))], names, fontsize=8)
    if columns:
        ax.set_xticks([j * (width + gap) + width / 2 for j in range(len(columns))], columns, fontsize=8)
    ax.tick_params(length=0, labeltop=True, labelbottom=False)


def trained(data: LabeledImages, steps: int = 100) -> ConvNet:
    """Train a small ConvNet on the set with some steps of Adam."""
    network = build(lambda: ConvNet(data.shape, data.num_classes, width=16, depth=2), 0)
    adam, draws = torch.optim.Adam(network.parameters(), lr=2e-3), derive(0, "batches")
    for _ in range(steps):
        some = data[torch.randint(len(data), (64,), generator=draws)]
        adam.zero_grad()
        cross_entropy(network(some.images), some.labels).backward()
        adam.step()
    return network.eval()
