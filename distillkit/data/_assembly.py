"""Construction of a `Split` from pixels in memory, or of a `StoredSplit` from a cache."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from distillkit._sanity_checks import without_warnings
from distillkit.data._cache import Cache, cached_normalization
from distillkit.data._pixels import Size, to_pixels
from distillkit.data.split import Split, StoredSplit
from distillkit.normalization import Normalization
from distillkit.sets import LabeledImages, StoredImages

__all__ = ["assemble", "assemble_raw", "assemble_stored"]

Columns = Mapping[str, Mapping[str, Tensor]]


def assemble(
    pixels: Mapping[str, Tensor],
    labels: Mapping[str, Tensor],
    classes: Sequence[str],
    normalization: Normalization | None,
    info: Mapping[str, Any],
    *,
    classes_given: bool = True,
    columns: Columns | None = None,
    users: Sequence[str] = (),
    domains: Sequence[str] = (),
) -> Split:
    """Build a `Split` from the pixels and labels of `train`, `test` and perhaps `validation`.

    Args:
        pixels: by part, float [N, C, H, W] in [0, 1]; overwritten.
        labels: by part.
        classes: the class names, in label order.
        normalization: of all parts; None measures mean and standard deviation on `train`.
        info: the origin of the data, kept in every set.
        classes_given: whether the classes are known independently of the labels, for example by their names.
        columns: by part, further columns of the sets.
        users, domains: the names that the columns `user` and `domain` index.
    """
    normalization = normalization or Normalization.of(pixels["train"])
    sets = {}
    for part, images in pixels.items():
        for chunk in images.split(1024):
            chunk.copy_(normalization.encode(chunk))
        with without_warnings():  # dark pictures may look like pixels that were never normalized
            sets[part] = LabeledImages(
                images,
                labels[part],
                num_classes=len(classes),
                normalization=normalization,
                info={**info, "split": part},
                columns=(columns or {}).get(part),
                classes_given=classes_given,
            )
    return Split(
        sets["train"], sets["test"], tuple(classes), sets.get("validation"), users=tuple(users), domains=tuple(domains)
    )


def assemble_raw(
    raw: Mapping[str, tuple[Tensor, Tensor]],
    classes: Sequence[str],
    dataset: str,
    size: Size | None = None,
    channels: int | None = None,
    normalization: Normalization | None = None,
) -> Split:
    """Build a `Split` from raw images and labels.

    Args:
        raw: by part, images uint8 or float in [0, 1], [N, C, H, W], and labels.
        classes: the class names, in label order.
        dataset: its name.
        size, channels, normalization: see `load`.
    """
    pixels = {part: to_pixels(images, size, channels) for part, (images, _) in raw.items()}
    return assemble(pixels, {part: own for part, (_, own) in raw.items()}, classes, normalization, {"dataset": dataset})


def assemble_stored(
    cache: Cache,
    rows: Mapping[str, Tensor],
    labels: Mapping[str, Tensor],
    classes: Sequence[str],
    normalization: Normalization | None,
    info: Mapping[str, Any],
    *,
    classes_given: bool = True,
    columns: Columns | None = None,
    users: Sequence[str] = (),
) -> StoredSplit:
    """Build a `StoredSplit` from a cache, as `assemble` builds a `Split`.

    Args:
        cache: the pictures of all parts.
        rows: by part, the indices of its pictures in the cache.
        labels, classes, normalization, info, classes_given, columns, users: see `assemble`.
    """
    normalization = normalization or cached_normalization(cache.sums[rows["train"]], cache.file.shape)
    sets = {
        part: StoredImages(
            cache.file,
            own,
            labels[part],
            num_classes=len(classes),
            normalization=normalization,
            columns=(columns or {}).get(part),
            info={**info, "split": part},
            classes_given=classes_given,
        )
        for part, own in rows.items()
    }
    return StoredSplit(sets["train"], sets["test"], tuple(classes), sets.get("validation"), users=tuple(users))
