"""Membership inference from published images: members are often much closer to one image than to all other images."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from distillkit._utils import check
from distillkit.sets import StoredImages
from distillkit.sets._stored import read_batches

_CHUNK, _VALUES = 1024, 1 << 24
"""Largest number of candidates, and of their pixel values, that are compared at a time."""


def nearest(
    images: Tensor, candidates: Tensor | StoredImages, labels: Tensor | None = None, own: Tensor | None = None
) -> Tensor:
    """Score each candidate by how much closer its nearest published image is than the second nearest: 1 - d1 / d2.

    Here d1 and d2 are the l2 distances, over all pixels, from the candidate to these two images. The attack needs no
    model and no shadow models. A set whose images were initialized from real records often remains close to these
    records: one image is then far closer to such a record than all other images. An image that occurs several times
    (because it was sent to every client, for example) is used once; otherwise the nearest and the second nearest image
    would be equal.

    Args:
        images: the published or intercepted images, [M, C, H, W], at least two different ones.
        candidates: records that may be members, [n, C, H, W], normalized as `images`; or a `StoredImages`, which is
            read in parts.
        labels: class indices of the images, int [M]; pass `labels` and `own` together or not at all. With them, a
            candidate is compared only with images of its class. If the class of any candidate has fewer than two
            different images, classes are ignored for all candidates, because scores with and without classes cannot be
            compared.
        own: class indices of the candidates, int [n].

    Returns:
        Scores, float64 [n], in [0, 1]: 1 for a record that is among the images, 0 for a record that is equally close to
        two images.

    Raises:
        TypeError, ValueError: the shapes do not fit, a value is not finite, or all images are equal.
    """
    wanted = check.batch_of_images(images, "images").shape[1:]
    images = images.detach().double().flatten(1)
    if not isinstance(candidates, StoredImages):
        candidates = check.batch_of_images(candidates, "candidates").detach()
    shape = candidates.shape[-3:]
    if shape != wanted:
        raise ValueError(f"candidates must have the images' shape, {list(wanted)}, got {list(shape)}")
    if (labels is None) != (own is None):
        raise ValueError("labels and own must be given together, or neither")
    if labels is not None and own is not None:
        labels = check.class_labels(labels, len(images), None, "labels").to(images.device)
        own = check.class_labels(own, len(candidates), None, "own").to(images.device)
        different, classes = _each_once(images, labels)
        counts = torch.bincount(classes, minlength=int(own.max()) + 1 if len(own) else 0)
        if bool((counts[own] < 2).any()):
            labels = own = None
        else:
            images, labels = different, classes
    if labels is None:
        images = images.unique(dim=0)
    if len(images) < 2:
        raise ValueError(
            f"images must be at least 2 different ones, got {len(images)}: the score needs a second nearest image"
        )
    found = []
    parts = torch.arange(len(candidates)).split(min(_CHUNK, max(1, _VALUES // math.prod(shape))))
    for rows, part in zip(parts, read_batches(candidates, parts), strict=True):
        masked = None if labels is None or own is None else own[rows.to(own.device), None] != labels
        found.append(_two_nearest(part.double().flatten(1).to(images.device), images, masked))
    first, second = torch.cat(found).unbind(1)
    return 1 - first / second


def _two_nearest(candidates: Tensor, images: Tensor, masked: Tensor | None) -> Tensor:
    """Return each candidate's distances to its two nearest images, float64 [n, 2].

    Inner products are a fast way to find the nearest images, but they are imprecise for small distances and may
    exchange similar images. Therefore three images are found, their distances are computed exactly as norms of
    differences, and the two smallest distances are returned.
    """
    squares = images.square().sum(1) - 2 * candidates @ images.T
    if masked is not None:
        squares = squares.masked_fill(masked, torch.inf)
    index = squares.topk(min(3, len(images)), largest=False).indices
    columns = [torch.linalg.vector_norm(candidates - images[some], dim=1) for some in index.unbind(1)]
    distances = torch.stack(columns, 1)
    if masked is not None:
        distances = distances.masked_fill(masked.gather(1, index), torch.inf)
    return distances.sort(dim=1).values[:, :2]


def _each_once(images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return images [M, D] and their labels [M] without repetitions: each pair of image and label occurs once."""
    pairs = torch.cat([images, labels[:, None].double()], 1).unique(dim=0)
    return pairs[:, :-1], pairs[:, -1].long()
