"""Conversion of images in any supported form to a set."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
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
    resolve_subset,
    set_from_source,
)
from distillkit.sets._stored import RealImages, StoredImages

Images: TypeAlias = LabeledImages | Tensor | NDArray[Any] | Dataset[Any] | DataLoader[Any] | Iterable[Any]
"""Images in any form that `as_set` accepts."""


def as_set(
    images: Images,
    labels: Labels | None = None,
    *,
    num_classes: int | None = None,
    normalization: Normalization | None = None,
    class_names: Sequence[str] = (),
    name: str = "images",
    progress: bool = True,
) -> LabeledImages:
    """Convert images in any supported form to a `LabeledImages`.

    Args:
        images: one of three forms. (1) A `LabeledImages`, or a `Subset`, `ConcatDataset` or `DataLoader` of sets. (2)
            Images, together with `labels`: a tensor or array [N, C, H, W], [N, H, W, C] or [N, H, W], or a list of PIL
            pictures or arrays. (3) A source of images and labels, which is read into memory once: a pair `(images,
            labels)`, a `torch.utils.data.Dataset` or a list of pairs or rows, a dataset of Hugging Face, also
            streamed, a table of pandas or pyarrow, a mapping of columns, or a `DataLoader`, whose dataset is read.
            Float images must already be in the normalized space. uint8 and PIL images are pixels, which this function
            normalizes.
        labels: class indices [N], label rows float [N, K] or names of classes, as a tensor, an array, a list or a
            pandas Series. Pass them only with form (2).
        num_classes: number of classes, K. Default: the number of class names that the source has (a `ClassLabel`, the
            attribute `classes`, or labels that are names). The new set keeps these names, but they do not count as
            given. Without names: the largest label + 1, or the width of the label rows. If `images` is a
            `LabeledImages` whose K was derived from its labels, `num_classes` replaces this K.
        normalization: normalization that was applied to float images, or is applied to uint8 and PIL images. Default:
            none, so that the images are pixels in [0, 1].
        class_names: names of the K classes in label order. Labels that are names are looked up in them. Default: the
            names in the source, or the labels in alphabetical order.
        name: name of the argument in error messages.
        progress: whether to show a progress bar if reading takes long.

    In rows, the image is the column of type `Image` or the one that holds images. The label is the column of type
    `ClassLabel`, the only other one, or the one called "label", "labels", "class", "cls", "target" or "category". If
    several are possible, use `LabeledImages.from_dataset(rows, image=..., label=...)`, which also resizes pictures.

    Raises:
        TypeError, ValueError: `images` is a `StoredImages`, of which you must first read a part. `labels` is missing,
            or is passed with a source that has labels. `num_classes` or `normalization` differs from that of the set.
            Items are no pairs or rows of an image and a label, or axes or columns can be read in several ways.
    """
    conversion.require_in_memory(images, name)
    options: dict[str, Any] = {"num_classes": num_classes, "normalization": normalization, "class_names": class_names}
    if labels is not None and conversion.is_pictures(images):
        images, labels = (images, labels), None
    if labels is not None and (isinstance(images, LabeledImages) or conversion.is_labeled_source(images)):
        raise TypeError(f"labels must be left out when {name} is a {type(images).__name__} (it has its own)")
    if isinstance(images, LabeledImages) or conversion.is_labeled_source(images):
        return set_from_source(images, name, **options, progress=progress)
    if isinstance(getattr(images, "train", None), LabeledImages):
        raise TypeError(f"{name} must be one part of the {type(images).__name__}; pass {name}.train")
    if labels is None and (isinstance(images, Tensor | np.ndarray) or conversion.is_pictures(images)):
        raise TypeError(f"labels must be given, because {name} is a {type(images).__name__}, which has none")
    if not isinstance(images, Tensor | np.ndarray):
        raise TypeError(conversion.unsupported(images, name))
    return set_from_source((images, labels), name, **options, progress=progress)


def open_set(
    images: Images | StoredImages,
    labels: Labels | None = None,
    *,
    num_classes: int | None = None,
    normalization: Normalization | None = None,
    name: str = "images",
    progress: bool = True,
) -> RealImages:
    """Convert images to a `LabeledImages` as `as_set` does, except for a `StoredImages`, which stays in its file.

    Args:
        images: a `StoredImages`, a `Subset` or `DataLoader` of one, or anything that `as_set` accepts.
        labels, num_classes, normalization, name, progress: as in `as_set`. A `StoredImages` has its own labels, classes
            and normalization.

    Raises:
        TypeError, ValueError: as in `as_set`, or an argument is passed that a `StoredImages` has.
    """
    found: Any = resolve_subset(images, name)
    if not isinstance(found, StoredImages):
        return as_set(found, labels, num_classes=num_classes, normalization=normalization, name=name, progress=progress)
    given = {"labels": labels, "num_classes": num_classes, "normalization": normalization}
    if passed := [key for key, value in given.items() if value is not None]:
        raise TypeError(f"{passed[0]} must be left out when {name} is a StoredImages (it has its own)")
    return found
