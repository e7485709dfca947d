"""Stored sets for tests, and comparison of sets in every bit and every fact."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from distillkit.data import Split, StoredSplit
from distillkit.sets import LabeledImages, StoredImages
from distillkit.sets._stored import PixelFile

__all__ = ["require_same", "require_same_set", "write_pixels"]


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


def require_same_set(one: LabeledImages, other: LabeledImages, *, images: bool = True) -> None:
    """Assert that two sets are equal in every bit and every fact; without `images`, all but the pixels."""
    assert type(one) is type(other)
    for fact in ("shape", "num_classes", "class_names", "classes_given", "normalization", "info"):
        assert getattr(one, fact) == getattr(other, fact), fact
    assert one.normalization.measured == other.normalization.measured
    assert one.columns.keys() == other.columns.keys()
    names = ["labels", *(["images", "stored"] if images else [])]
    pairs = [(vars(one)[name], vars(other)[name]) for name in names if name in vars(one)]
    for a, b in pairs + [(own, other.columns[name]) for name, own in one.columns.items()]:
        assert (a.dtype, a.device, a.shape) == (b.dtype, b.device, b.shape)
        assert torch.equal(a, b)


def require_same(opened: StoredSplit, loaded: Split, *, images: bool = True) -> None:
    """Assert that a stored and a loaded split are equal, with `images` for pictures that were not resized."""
    assert (opened.classes, opened.users) == (loaded.classes, loaded.users)
    for part in ("train", "test", "validation"):
        stored, data = getattr(opened, part), getattr(loaded, part)
        assert (stored is None) == (data is None)
        if data is not None:
            require_same_set(stored.read(), data, images=images)
