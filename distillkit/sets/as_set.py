"""Conversion of images in any supported form to a set."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeAlias

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
"""Images in any form that components accept: see `as_set`."""


def as_set(
    images: Images,
    labels: Labels | None = None,
    *,
    num_classes: int | None = None,
    normalization: Normalization | None = None,
    name: str = "images",
    progress: bool = True,
) -> LabeledImages:
    """Convert images in any supported form to a `LabeledImages`, as all components that take images do.

    Args:
        images: a `LabeledImages`; or float images [N, C, H, W] in the normalized space, a tensor or a NumPy array,
            together with `labels`; or a source of both: a pair `(images, labels)`, a `torch.utils.data.Dataset` of such
            pairs (a lazy dataset is read into memory once) or a `DataLoader` (its dataset is read). Images of dtype
            uint8 and PIL images are pixels in 0..255 and are normalized here; float images are not. A
            `torch.utils.data.Subset` of a `LabeledImages` keeps its normalization.
        labels: class indices [N] or rows float [N, K], a tensor, an array or a list; only with a tensor or array of
            images.
        num_classes: number of classes, K. Default: the number of class names in the dataset (`classes`), which the set
            keeps, else as for `LabeledImages`. It replaces a number that the set derived from its labels.
        normalization: normalization of float images. Default: none, they are pixels in [0, 1].
        name: name of the argument in error messages.
        progress: whether long reading shows a progress bar.

    Raises:
        TypeError, ValueError: a `StoredImages` (read a part of it first); labels that are missing, or passed with a
            source that has labels; a class count or normalization that contradicts that of the set; items that are not
            pairs of an image and a label.
    """
    conversion.require_in_memory(images, name)
    images = resolve_subset(images)
    if labels is not None and (isinstance(images, LabeledImages) or conversion.is_labeled_source(images)):
        raise TypeError(f"labels must be left out when {name} is a {type(images).__name__} (it has its own)")
    if isinstance(images, LabeledImages):
        return require_consistent(images, name, num_classes, normalization)
    if conversion.is_labeled_source(images):
        return set_from_source(images, name, num_classes, normalization, progress=progress)
    if labels is None:
        raise TypeError(
            f"labels must be given, because {name} ({type(images).__name__}) have none; a LabeledImages, a pair "
            "(images, labels), a Dataset and a DataLoader contain labels" + _hint(images, name)
        )
    return set_from_arrays(images, labels, name, num_classes, normalization)


def _hint(images: Any, name: str) -> str:
    """Return a hint on what to pass instead, if the argument is a common mistake; otherwise an empty string."""
    if isinstance(images, str | Path):
        return f"; read a folder of pictures first: load_folder({str(images)!r}).train"
    if isinstance(getattr(images, "train", None), LabeledImages):
        return f"; pass one part of the {type(images).__name__}, {name}.train"
    return ""
