"""Membership inference on a published set, from records that are much closer to one image than to all other images."""

from __future__ import annotations

import torch
from torch import Tensor

from distillkit._utils import check

__all__ = ["nearest"]

_CHUNK = 1024


def nearest(images: Tensor, candidates: Tensor, labels: Tensor | None = None, own: Tensor | None = None) -> Tensor:
    """Score each candidate by how much closer its nearest published image is than the second nearest: 1 - d1 / d2.

    d1 and d2 are l2 distances over all pixels. The attack needs no model and no shadow models. A set that was learned
    from real images often remains close to the records that it started from; one image is then far closer to such a
    record than any other image. Try the attack on every set, and on every image that a server observed. An image that
    occurs several times (sent to every client, for example) counts once; otherwise the nearest and the second nearest
    image would be equal.

    Args:
        images: the published or intercepted images [M, C, H, W], at least two different ones (per class, with labels).
        candidates: records that may have been used [n, C, H, W], in the same space.
        labels: class indices int [M] of the images. With `own`, only images of a candidate's class are compared.
        own: class indices int [n] of the candidates; pass `labels` and `own` together or not at all.

    Returns:
        Scores, float64 [n], in [0, 1]: 1 for a record that is among the images, 0 for a record that is equally close to
        two images.

    Raises:
        TypeError, ValueError: the shapes do not fit, a value is not finite, or the class of a candidate has fewer than
            two images.
    """
    images = check.batch_of_images(images, "images").detach().double().flatten(1)
    shape = candidates.shape[1:] if isinstance(candidates, Tensor) else None
    candidates = check.batch_of_images(candidates, "candidates").detach().double().flatten(1).to(images.device)
    if candidates.shape[1] != images.shape[1]:
        raise ValueError(
            f"candidates must have the images' shape, got {list(shape or ())} for images of {images.shape[1]} values"
        )
    if (labels is None) != (own is None):
        raise ValueError("labels and own must be given together, or neither")
    if labels is not None and own is not None:
        labels = check.class_labels(labels, len(images), None, "labels").to(images.device)
        own = check.class_labels(own, len(candidates), None, "own").to(images.device)
        images, labels = _each_once(images, labels)
    else:
        images = images.unique(dim=0)
    if len(images) < 2:
        raise ValueError(
            f"images must be at least 2 different ones, got {len(images)}: the score needs a second nearest image"
        )
    found = []
    for start in range(0, len(candidates), _CHUNK):
        part = slice(start, start + _CHUNK)
        # Not by inner products, which lose precision at small distances.
        distances = torch.cdist(candidates[part], images, compute_mode="donot_use_mm_for_euclid_dist")
        if labels is not None and own is not None:
            distances = distances.masked_fill(own[part, None] != labels, torch.inf)
        found.append(distances.topk(2, largest=False).values)
    first, second = torch.cat(found).unbind(1)
    if bool(second.isinf().any()):
        raise ValueError(
            f"images must have at least 2 of every candidate's class, but {int(second.isinf().sum())} candidates have "
            "fewer; omit labels and own to compare with all"
        )
    return torch.where(second > 0, 1 - first / second, 0.0)


def _each_once(images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return images [M, D] and labels [M] without repeated pairs."""
    pairs = torch.cat([images, labels[:, None].double()], 1).unique(dim=0)
    return pairs[:, :-1], pairs[:, -1].long()
