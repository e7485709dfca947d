"""Reproducible choice of test images, for datasets without a test split: by position, or record by record."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from distillkit._utils import check
from distillkit._utils.user_warnings import warn
from distillkit.rng import derive
from distillkit.sets import LabeledImages, StoredImages

HoldOut = Literal["random", "content"]
HOLD_OUTS = ("random", "content")
"""Ways to choose held-out records. "random": an even share of each class; one record more or less changes the choice
for others. "content": a keyed hash of the record alone decides, so equal records go together and no record affects
another."""

_SEED = 20_211  # part of the definition of the datasets without a test split, not an option


def hold_out(labels: Tensor, fraction: float) -> tuple[Tensor, Tensor]:
    """Hold out the same random part of each class in every call.

    Args:
        labels: class indices int [N].
        fraction: share of each class that is held out, in [0, 1). The number of images is rounded.

    Returns:
        Indices of the training images, and indices of the held-out images. Both are int64, ascending.
    """
    check.default_device()
    rng = derive(_SEED, "hold out")
    held_out = torch.zeros(len(labels), dtype=torch.bool)
    for k in labels.unique():
        members = (labels == k).nonzero().flatten()
        shuffled = members[torch.randperm(len(members), generator=rng)]
        held_out[shuffled[: round(fraction * len(members))]] = True
    return (~held_out).nonzero().flatten(), held_out.nonzero().flatten()


def hold_out_classes(labels: Tensor, classes: Sequence[str], fraction: float) -> tuple[Tensor, Tensor]:
    """Hold out a part of each class with `hold_out`, and warn about classes that are too small to have a test image."""
    kept, held_out = hold_out(labels, fraction)
    if not fraction:
        return kept, held_out
    tested = labels[held_out].unique().tolist()
    if not tested:
        raise ValueError(
            f"test_fraction={fraction:g} holds out no picture: the largest class has {int(labels.bincount().max())}; "
            "give a larger one, a test folder, or test_fraction=0 for no test set"
        )
    trained = {*labels[kept].tolist()}
    if lost := [classes[label] for label in tested if label not in trained]:
        raise ValueError(
            f"test_fraction={fraction:g} leaves no training picture of {len(lost)} of {len(classes)} classes, such as "
            f"{lost[0]}; give a smaller one"
        )
    if untested := [name for label, name in enumerate(classes) if label not in tested]:
        warn(
            f"test_fraction={fraction:g} holds out no picture of {len(untested)} of {len(classes)} classes, which "
            f"will not be tested: {', '.join(untested[:5])}"
        )
    return kept, held_out


def hold_out_values(labels: Tensor, values: Tensor, fraction: float) -> tuple[Tensor, Tensor]:
    """Draw random values of a column, and hold out all images with these values, for example all images of some
    patients.

    Args:
        labels: class indices int [N]. The class of a value is the class of the first image that has this value.
            If the labels are multi-label rows [N, K], all values are treated as one class.
        values: values of the column, int64 [N]. Images with equal values are either all held out, or all used for
            training.
        fraction: share of the values of each class that is held out, in [0, 1).

    Returns:
        Indices of the training images, and indices of the held-out images. Both are int64, ascending.
    """
    found, place = values.unique(return_inverse=True)
    first = torch.full((len(found),), len(values)).scatter_reduce(0, place, torch.arange(len(values)), "amin")
    of_values = labels[first] if labels.ndim == 1 else torch.zeros(len(found), dtype=torch.long)
    tested = torch.zeros(len(found), dtype=torch.bool)
    tested[hold_out(of_values, fraction)[1]] = True
    return (~tested[place]).nonzero().flatten(), tested[place].nonzero().flatten()


def hold_out_content(digests: Iterable[bytes], fraction: float, purpose: str) -> tuple[Tensor, Tensor]:
    """Hold out each record with a fixed decision that depends on the record alone.

    Args:
        digests: content of each record, or a hash of it. Equal records get the same decision.
        fraction: expected share of the records that is held out, in [0, 1).
        purpose: key of the hash. The decisions for two purposes are independent.

    Returns:
        Indices of the training images, and indices of the held-out images. Both are int64, ascending, possibly empty.
    """
    key = hashlib.blake2b(f"{_SEED} {purpose}".encode(), digest_size=16).digest()
    hashes = (hashlib.blake2b(one, key=key, digest_size=8).digest() for one in digests)
    held_out = torch.tensor([int.from_bytes(h, "big") < fraction * 2**64 for h in hashes], dtype=torch.bool)
    return (~held_out).nonzero().flatten(), held_out.nonzero().flatten()


def record_digests(images: Tensor | LabeledImages | StoredImages) -> list[bytes]:
    """Return a hash of each image [N, ...]: of its bytes in memory, or the stored hash of a `StoredImages`."""
    if isinstance(images, StoredImages):
        return [row.tobytes() for row in images.digests.numpy()]
    rows = (images.images if isinstance(images, LabeledImages) else images).detach().cpu().contiguous().numpy()
    return [hashlib.blake2b(row.tobytes(), digest_size=16).digest() for row in rows]


def stricter(*made: Any) -> dict[str, str]:
    """Return the entry `hold_out` for the `info` of a set that results from several hold-outs.

    Args:
        made: "random", "content" or None (no hold-out) for each hold-out. One random hold-out makes the whole random.
    """
    return {"hold_out": "random" if "random" in made else "content"} if any(made) else {}
