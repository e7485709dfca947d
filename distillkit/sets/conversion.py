"""Whatever a component was called with, as a set."""

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
"""What every component takes as images: see `as_set`."""


def as_set(
    images: Images,
    labels: Labels | None = None,
    *,
    num_classes: int | None = None,
    normalization: Normalization | None = None,
    name: str = "images",
    progress: bool = True,
) -> LabeledImages:
    """Return the set that a component was called with; everything that takes images goes through here.

    Args:
        images: a `LabeledImages`; or images float [N, C, H, W] in the normalised space, a tensor or a NumPy array,
            with `labels`; or anything that holds both: a pair `(images, labels)`, a `torch.utils.data.Dataset` of such
            pairs (a lazy one is read once, into memory, with a bar), a `DataLoader` of one (its dataset is read).
            Images of uint8 and PIL pictures are pixels in 0..255 and are normalised here; floats never are. A
            `torch.utils.data.Subset` of a `LabeledImages` keeps its space.
        labels: class indices [N] or rows float [N, K], a tensor, an array or a list; with a bare tensor or array only.
        num_classes: K. Default: the number of class names that a dataset states (`classes`), else as `LabeledImages`.
        normalization: how float images came from pixels. Default: they are pixels in [0, 1].
        name: the argument's name, for messages.
        progress: whether long reading shows a bar.

    A `num_classes` given here takes the place of one that the set derived from its labels.

    Raises:
        TypeError, ValueError: a `StoredImages`, of which a part must be read first; labels missing, or given beside
            what has its own; a class count or normalisation that contradicts the set's; items that are no
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
            f"labels must be given with {name} that have none ({type(images).__name__}); a LabeledImages, a pair "
            "(images, labels), a Dataset and a DataLoader have their own" + _hint(images, name)
        )
    return set_from_arrays(images, labels, name, num_classes, normalization)


def _hint(images: Any, name: str) -> str:
    """What to give in place of what is often given by mistake."""
    if isinstance(images, str | Path):
        return f"; a folder of pictures is read first: load_folder({str(images)!r}).train"
    if isinstance(getattr(images, "train", None), LabeledImages):
        return f"; of a {type(images).__name__} give one part, {name}.train"
    return ""
