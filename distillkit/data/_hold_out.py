"""Fixed random choice of test images for datasets without a test split."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from distillkit._utils.user_warnings import warn
from distillkit.rng import derive

__all__ = ["hold_out", "hold_out_classes", "hold_out_values"]

_SEED = 20_211  # part of the definition of the datasets without a test split, not an option


def hold_out(labels: Tensor, fraction: float) -> tuple[Tensor, Tensor]:
    """Split a set into training and test images. Every call chooses the same random part of each class.

    Args:
        labels: class indices int [N].
        fraction: share of each class that is held out, in [0, 1); the count is rounded.

    Returns:
        Indices (training, held out), int64, ascending.
    """
    rng = derive(_SEED, "hold out")
    held_out = torch.zeros(len(labels), dtype=torch.bool)
    for k in labels.unique():
        members = (labels == k).nonzero().flatten()
        shuffled = members[torch.randperm(len(members), generator=rng)]
        held_out[shuffled[: round(fraction * len(members))]] = True
    return (~held_out).nonzero().flatten(), held_out.nonzero().flatten()


def hold_out_classes(labels: Tensor, classes: Sequence[str], fraction: float) -> tuple[Tensor, Tensor]:
    """Hold out a part of every class, and warn about classes that are too small to have a test image.

    Args:
        labels: class indices int [N].
        classes: class names.
        fraction: see `hold_out`.

    Raises:
        ValueError: `fraction` is too small to hold out an image of any class.
    """
    kept, held_out = hold_out(labels, fraction)
    if not fraction:
        return kept, held_out
    tested = labels[held_out].unique().tolist()
    if not tested:
        raise ValueError(
            f"test_fraction={fraction:g} holds out no picture: the largest class has {int(labels.bincount().max())}; "
            "give a larger one, a test folder, or test_fraction=0 for no test set"
        )
    if untested := [name for label, name in enumerate(classes) if label not in tested]:
        warn(
            f"test_fraction={fraction:g} holds out no picture of {len(untested)} of {len(classes)} classes, which "
            f"will not be tested: {', '.join(untested[:5])}"
        )
    return kept, held_out


def hold_out_values(labels: Tensor, values: Tensor, fraction: float) -> tuple[Tensor, Tensor]:
    """Hold out images by a column, so that training and test images share no value of the column.

    Args:
        labels: class indices int [N]. Each value of the column counts toward the class of its first image. Multi-label
            rows [N, K] are ignored.
        values: values of the column, int64 [N]; images with equal values stay together.
        fraction: share of the values of each class that is held out, in [0, 1).

    Returns:
        Indices (training, held out), int64, ascending.
    """
    found, place = values.unique(return_inverse=True)
    first = torch.full((len(found),), len(values)).scatter_reduce(0, place, torch.arange(len(values)), "amin")
    of_values = labels[first] if labels.ndim == 1 else torch.zeros(len(found), dtype=torch.long)
    tested = torch.zeros(len(found), dtype=torch.bool)
    tested[hold_out(of_values, fraction)[1]] = True
    return (~tested[place]).nonzero().flatten(), tested[place].nonzero().flatten()
