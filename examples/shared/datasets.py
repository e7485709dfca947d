"""Named datasets, or fixed random subsets of their images."""

from __future__ import annotations

from pathlib import Path

import torch

from distillkit import LabeledImages, Normalization
from distillkit.data import Split, load
from distillkit.rng import derive


def _shuffled(data: LabeledImages, purpose: str) -> LabeledImages:
    return data[torch.randperm(len(data), generator=derive(0, purpose))]


def load_subset(
    name: str, root: Path | None, records: int | None, size: int | None = None, space: Normalization | None = None
) -> Split:
    """Return a named dataset, or a fixed random subset of its training images and half as many test images.

    Args:
        name, root, size: arguments of `load`.
        records: number of training images; None for all images.
        space: normalization.
    """
    split = load(name, root=root, size=size, normalization=space)
    if records is None:
        return split
    train, test = (_shuffled(one, "records") for one in (split.train, split.test))
    return Split(train[:records], test[: records // 2], split.classes)


def load_part(
    name: str, root: Path | None, size: int | None, channels: int | None, train: int | None, test: int | None
) -> Split:
    """Return a named dataset in random order, with at most `train` training images and `test` test images.

    Args:
        name, root, size, channels: arguments of `load`.
        train, test: numbers of images; None for all images.
    """
    split = load(name, root=root, size=size, channels=channels)
    return Split(_shuffled(split.train, "part")[:train], _shuffled(split.test, "part")[:test], split.classes)


def load_private(
    name: str, root: Path | None, records: int | None, size: int, normalization: Normalization, draw: str
) -> Split:
    """Return a named dataset; or a random subset of its training images, and 2,000 others for the search of settings.

    Args:
        name, root, size: arguments of `load`.
        records: number of training images; None for all images.
        normalization: normalization that was not computed from the images.
        draw: purpose of the random draw.
    """
    split = load(name, root=root, size=size, normalization=normalization)
    if records is None:
        return split
    train = _shuffled(split.train, draw)
    return Split(train[:records], split.test, split.classes, train[records : records + 2000])
