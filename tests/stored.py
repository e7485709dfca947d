"""Comparison of stored sets with loaded ones, pixel for pixel."""

from __future__ import annotations

import torch

from distillkit.data import Split, StoredSplit

__all__ = ["require_same"]


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
