"""The 8x8 digits inside scikit-learn."""

from __future__ import annotations

from pathlib import Path

import torch

from distillkit.data._assembly import assemble
from distillkit.data._hold_out import hold_out
from distillkit.data._pixels import Size, to_pixels
from distillkit.data.split import Split
from distillkit.normalization import Normalization

__all__ = ["load_digits"]


def load_digits(
    root: Path | None = None,
    *,
    size: Size | None = None,
    channels: int | None = None,
    normalization: Normalization | None = None,
) -> Split:
    """Load the 1,797 real 8x8 digits inside scikit-learn, of which a fixed fifth of each class is the test set.

    Args:
        root: ignored; the digits need no files.
        size, channels, normalization: see `load`.
    """
    from sklearn import datasets

    bunch = datasets.load_digits()
    images, labels = torch.from_numpy(bunch.images).float()[:, None] / 16, torch.from_numpy(bunch.target).long()
    rows = dict(zip(("train", "test"), hold_out(labels, 0.2)))
    pixels = {part: to_pixels(images[own], size, channels) for part, own in rows.items()}
    own_labels = {part: labels[own] for part, own in rows.items()}
    return assemble(pixels, own_labels, tuple("0123456789"), normalization, {"dataset": "digits"})
