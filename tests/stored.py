"""Stored sets for tests, and their comparison with loaded ones, pixel for pixel."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from distillkit.data import Split, StoredSplit
from distillkit.sets import StoredImages
from distillkit.sets._stored import PixelFile

__all__ = ["require_same", "write_pixels"]


def write_pixels(path: Path, pixels: Tensor, labels: Tensor, **options: Any) -> StoredImages:
    """Write pixels, uint8 [N, C, H, W], to a file in another order, and return them as a stored set in this order."""
    order = torch.randperm(len(pixels), generator=torch.Generator().manual_seed(0))
    kept = pixels[order].contiguous()
    np.save(path, kept.numpy())
    found = [list(hashlib.blake2b(one.numpy().data, digest_size=16).digest()) for one in kept]
    digests = torch.tensor(found, dtype=torch.uint8).view(-1, 16)
    start = path.stat().st_size - pixels.numel()
    _, c, h, w = pixels.shape
    return StoredImages(PixelFile(path, start, (c, h, w), digests), order.argsort(), labels, **options)


def require_same(opened: StoredSplit, loaded: Split) -> None:
    """Assert that a stored and a loaded split are equal, for pictures that were not resized."""
    assert (opened.classes, opened.users) == (loaded.classes, loaded.users)
    assert (opened.validation is None) == (loaded.validation is None)
    pairs = list(zip(opened, loaded))
    if opened.validation is not None and loaded.validation is not None:
        pairs.append((opened.validation, loaded.validation))
    for stored, data in pairs:
        found = stored.read()
        assert torch.equal(found.images, data.images)
        assert torch.equal(found.labels, data.labels)
        assert found.columns.keys() == data.columns.keys()
        assert all(torch.equal(found.columns[name], data.columns[name]) for name in data.columns)
        same = [(s.info, s.num_classes, s.classes_given, s.normalization) for s in (found, data)]
        assert same[0] == same[1]
