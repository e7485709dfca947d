"""Checks of the sets and the protocol of an evaluation, for valid arguments that give meaningless accuracies."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from distillkit._utils import check
from distillkit._utils.user_warnings import warn
from distillkit.augment import ResizedCrop, ShufflePatches
from distillkit.labels.relabel import Relabel
from distillkit.labels.stored_labels import StoredLabels
from distillkit.sets import StoredImages
from distillkit.sets._class_index import with_class_labels
from distillkit.sets._stored import RealImages

_CHUNK, _VALUES = 1024, 1 << 23
"""Largest number of images, and of their pixel values, that are compared at a time."""
_SAME_PIXEL = 1.5 / 255
"""Largest difference of two pixels in [0, 1] that is taken for rounding to 8 bits."""
_CANDIDATES = 8
"""Number of images with equal summaries that are compared pixel by pixel with another image."""


def check_factor(info: Mapping[str, Any], augment: object, *, relabel: bool) -> None:
    """Warn of training that does not fit the number of crops in each image of a set, see `condense.stitch`.

    Args:
        info: how the set was made. If it names a method without a `factor`, images hold a single crop.
        augment: augmentation of the training.
        relabel: whether a teacher labels every view, as in RDED.
    """
    factor = info.get("factor", 1 if "method" in info else None)
    shuffled = augment.factor if isinstance(augment, ShufflePatches) else 1
    if not isinstance(factor, int) or factor == shuffled or (shuffled == 1 and not relabel):
        return
    crop = ResizedCrop(min_scale=1 / factor)
    advice = f"augment=ShufflePatches({factor}, augment={crop})" if factor > 1 else f"augment={crop}"
    named = {1: "PROTOCOLS['rded'], or ", 2: "PROTOCOLS['rded-factor-2'], or "}.get(factor, "")
    warn(
        f"protocol shuffles {shuffled} x {shuffled} patches, but the images of data hold {factor} x {factor} crops "
        f"(info['factor']); use {named}{advice}"
    )


def check_test_images(test: RealImages, training: Mapping[str, RealImages | None]) -> None:
    """Warn if test images are among training images, or if the test set seems to be the small set.

    Images are compared as pixels in [0, 1], so a new normalization, order or dtype does not hide them.

    Args:
        test: the test set.
        training: sets whose images are used for training, by name of the argument. Sets that are None are left out.
    """
    for name, data in training.items():
        if data is None or not len(data) or not len(test):
            continue
        found = int(images_among(test, data).sum())
        warn_of_overlap(found, len(test), "test", f"in {name}")
        made = test.info.get("method")
        few = len(test) <= min(10 * test.num_classes, len(data) / 5)
        if name == "data" and found < len(test) < len(data) and (few or made):
            by = f", made by {made!r}," if made else ""
            warn(
                f"test has {len(test)} images{by} and data has {len(data)}: test must be the real test images, "
                "and data the small set; are the arguments swapped?"
            )


def warn_of_overlap(found: int, total: int, name: str, where: str) -> None:
    """Warn if some images of a test or validation set are used for training.

    Args:
        found, total: number of these images, and of all images of the set.
        name: name of the set.
        where: place of the training images, such as "in train".
    """
    if found:
        warn(
            f"{found} of {total} images of {name} are also {where}, so the accuracy is partly or wholly one on "
            "training images; pass images that were not used for training"
        )


def check_baseline(data: RealImages, real: RealImages, *, relabel: Relabel | StoredLabels | None) -> None:
    """Refuse a set of real images from which no random images can be drawn that are comparable with a small set.

    Args:
        data: the small set.
        real: the real images.
        relabel: the option of the protocol. If it is not None, the labels of both sets are ignored.

    Raises:
        ValueError: the sets have different kinds of labels, `real` is smaller than `data`, lacks one of its classes, or
            consists of images of `data`; or `relabel` holds the labels of `data` alone.
    """
    if isinstance(relabel, StoredLabels):
        raise ValueError(
            "protocol must have a teacher to label random real images, got stored labels, which are those of data; use "
            "Relabel(teacher)"
        )
    if relabel is None and data.labels.ndim != real.labels.ndim:
        soft, hard = ("data", "real") if data.labels.ndim == 2 else ("real", "data")
        raise ValueError(
            f"{soft} has soft labels and {hard} has class indices, and their accuracies must not be compared: random "
            "images need labels from the same teacher. Pass real=soft_labels(real, teacher) with the teacher of data, "
            "or data with class indices"
        )
    if len(real) < len(data):
        raise ValueError(
            f"real must be the real training images, at least as many as data has ({len(data)}), because random images "
            f"are drawn from it; got {len(real)}"
        )
    if all(bool(found.all()) for found in _found_among(real, data)):
        raise ValueError("real must be the real training images, but all of its images are in data: pass the whole set")
    own, other = (with_class_labels(one).counts().tolist() for one in (data, real))
    absent = [c for c, (n, wanted) in enumerate(zip(other, own)) if n == 0 < wanted]
    if absent:
        raise ValueError(f"real must have images of each class of data, but has none of {absent}")
    short = [f"{c} ({n})" for c, (n, wanted) in enumerate(zip(other, own)) if n < wanted]
    if short:
        listed = ", ".join(short[:5]) + (", ..." if len(short) > 5 else "")
        warn(f"real has fewer images than data in {len(short)} classes: {listed}; random images of these repeat")


def images_among(some: RealImages, among: RealImages) -> Tensor:
    """Return for each image of the first set whether it is in the second one, as bools [N].

    The recorded hashes of two stored sets are compared; images in memory are equal up to rounding to 8 bits.
    """
    check.default_device()
    if isinstance(some, StoredImages) and isinstance(among, StoredImages) and some.shape == among.shape:
        known = {digest.tobytes() for digest in among.digests.numpy()}
        return torch.tensor([digest.tobytes() in known for digest in some.digests.numpy()], dtype=torch.bool)
    return torch.cat([torch.zeros(0, dtype=torch.bool), *_found_among(some, among)])


def _found_among(some: RealImages, among: RealImages) -> Iterator[Tensor]:
    """Yield for consecutive parts of the first set whether its images are in the second one."""
    if some.shape != among.shape:
        yield torch.zeros(len(some), dtype=torch.bool)
        return
    rows: dict[bytes, list[int]] = defaultdict(list)
    for start, pixels in _pixels(among):
        for row, key in enumerate(_summaries(pixels), start):
            if len(rows[key]) < _CANDIDATES:
                rows[key].append(row)
    for _, pixels in _pixels(some):
        found = torch.zeros(len(pixels), dtype=torch.bool)
        pairs = [(i, row) for i, key in enumerate(_summaries(pixels)) for row in rows.get(key, ())]
        for part in torch.tensor(pairs, dtype=torch.int64).view(-1, 2).split(_CHUNK):
            own, other = part.unbind(1)
            images = among._take(other).float()
            difference = pixels[own] - among.normalization.decode(images).cpu()
            found[own[difference.abs().flatten(1).amax(1) <= _SAME_PIXEL]] = True
        yield found


def _pixels(data: RealImages) -> Iterator[tuple[int, Tensor]]:
    """Yield the index of the first image and the pixels, float32 on the CPU, of consecutive parts of a set."""
    size = max(1, min(_CHUNK, _VALUES // math.prod(data.shape)))
    for rows in torch.arange(len(data)).split(size) if len(data) else ():
        yield int(rows[0]), data.normalization.decode(data._take(rows).detach().float()).cpu()


def _summaries(pixels: Tensor) -> list[bytes]:
    """Return a short summary of each image, which rounding to 8 bits seldom changes: 16 block means in 64 levels."""
    means = F.adaptive_avg_pool2d(pixels.mean(1, keepdim=True), 4).flatten(1)
    levels = (64 * means).round().clamp(-128, 127).to(torch.int8)
    return [row.tobytes() for row in levels.numpy()]
