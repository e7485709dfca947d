"""Conversion of images in any supported form to a set."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from distillkit._utils import conversion
from distillkit.normalization import Normalization
from distillkit.sets._labeled import (
    LabeledImages,
    Labels,
    require_consistent,
    resolve_subset,
    set_from_arrays,
    set_from_source,
)

__all__ = ["Images", "as_set"]

Images: TypeAlias = LabeledImages | Tensor | NDArray[Any] | Dataset[Any] | DataLoader[Any] | tuple[Any, Any] | list[Any]
"""Images in any form that `as_set` accepts."""


def as_set(
    images: Images,
    labels: Labels | None = None,
    *,
    num_classes: int | None = None,
    normalization: Normalization | None = None,
    name: str = "images",
    progress: bool = True,
) -> LabeledImages:
    """Convert images in any supported form to a `LabeledImages`.

    Args:
        images: one of three forms. (1) A `LabeledImages`, or a `Subset`, `ConcatDataset` or `DataLoader` of sets. (2) A
            tensor or NumPy array of images [N, C, H, W], together with `labels`. (3) A source of images and labels: a
            pair `(images, labels)`, a `torch.utils.data.Dataset` of pairs `(image, label)`, which is read into memory
            once, or a `DataLoader`, whose dataset is read. Float images must already be in the normalized space. uint8
            and PIL images are pixels, which this function normalizes.
        labels: class indices [N] or label rows float [N, K], as a tensor, an array or a list. Pass them only if
            `images` is a tensor or array.
        num_classes: number of classes, K. Default: the number of class names in the dataset's attribute `classes`.
            The new set keeps these names, but they do not count as given. Without this attribute: the largest label
            + 1, or the width of the label rows. If `images` is a `LabeledImages` whose K was derived from its labels,
            `num_classes` replaces this K.
        normalization: normalization that was applied to float images, or is applied to uint8 and PIL images. Default:
            none, so that the images are pixels in [0, 1].
        name: name of the argument in error messages.
        progress: whether to show a progress bar if reading takes long.

    Raises:
        TypeError, ValueError: `images` is a `StoredImages`, of which you must first read a part. `labels` is missing,
            or is passed with a source that has labels. `num_classes` or `normalization` differs from that of the set.
            An item of the dataset is not a pair of an image and a label.
    """
    conversion.require_in_memory(images, name)
    images = resolve_subset(images, name)
    if labels is not None and (isinstance(images, LabeledImages) or conversion.is_labeled_source(images)):
        raise TypeError(f"labels must be left out when {name} is a {type(images).__name__} (it has its own)")
    if isinstance(images, LabeledImages):
        return require_consistent(images, name, num_classes, normalization)
    if conversion.is_labeled_source(images):
        return set_from_source(images, name, num_classes, normalization, progress=progress)
    if isinstance(getattr(images, "train", None), LabeledImages):
        raise TypeError(f"{name} must be one part of the {type(images).__name__}; pass {name}.train")
    if not isinstance(images, Tensor | np.ndarray):
        raise TypeError(conversion.unsupported(images, name))
    if labels is None:
        raise TypeError(f"labels must be given, because {name} is a {type(images).__name__}, which has none")
    return set_from_arrays(images, labels, name, num_classes, normalization)
