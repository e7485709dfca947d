"""Whatever else holds labelled images (NumPy arrays, datasets, loaders, pairs), as tensors in memory."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sized
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    TensorDataset,
    default_collate,
)

from distillkit._utils.progress import bar

__all__ = [
    "FileBacked", "as_tensor", "count_class_names", "format_bytes", "is_dataset", "is_labeled_source", "read",
    "require_in_memory",
]  # fmt: skip

_WANTED = "an image [C, H, W] (a tensor, an array or a PIL picture) and its label"


class FileBacked(ABC):
    """What holds images in a file, of which a part is read with `read(indices)`: base of `sets.StoredImages`."""

    @property
    @abstractmethod
    def bytes(self) -> int:
        """How much memory all of it takes once it is read."""

    @abstractmethod
    def __len__(self) -> int:
        """How many images there are."""

    def read_hint(self, what: str) -> str:
        """How to read a part, for an error's message that begins with "the images of".

        Args:
            what: whose images they are, in words.
        """
        return (
            f"{what} lie in a file: read those that are meant with `data.read(indices)`; all {len(self)} take "
            f"{format_bytes(self.bytes)} as floats, `data.read()`"
        )


def require_in_memory(source: Any, name: str) -> None:
    """Refuse images in a file, or what selects from them, where images in memory are wanted.

    Args:
        source: what was given; anything else passes.
        name: what the argument is called in messages.

    Raises:
        TypeError: says how to read a part.
    """
    while not isinstance(source, FileBacked) and (inner := getattr(source, "dataset", None)) is not None:
        source = inner
    if isinstance(source, FileBacked):
        told = source.read_hint(f"a {type(source).__name__}")
        raise TypeError(f"{name} must lie in memory, but the images of {told}")


def format_bytes(size: int) -> str:
    """A number of bytes for a reader: "3.01 GB".

    Args:
        size: the number.
    """
    scale, unit = next(((s, u) for s, u in ((10**9, "GB"), (10**6, "MB"), (10**3, "kB")) if size >= s), (1, "bytes"))
    return f"{size / scale:.3g} {unit}"


def as_tensor(values: Any, name: str, *, lists: bool = False) -> Any:
    """What a user gave as numbers, as a tensor; what is no array is given back as it is.

    Floating arrays become float32 (NumPy's default of float64 is nobody's choice of a network's precision).

    Args:
        values: a NumPy array or number, a tensor, or anything else.
        name: what the argument is called in messages.
        lists: whether a list or tuple is numbers too.

    Raises:
        TypeError: an array or list without a numeric dtype.
    """
    if lists and isinstance(values, list | tuple | range) and not any(isinstance(v, Tensor) for v in values):
        try:
            values = np.asarray(values)
        except ValueError as error:
            raise TypeError(f"{name} must be a tensor or a regular list of numbers: {error}") from error
    if not isinstance(values, np.ndarray | np.generic):
        return values
    if values.dtype.kind not in "biuf":
        raise TypeError(f"{name} must hold numbers, got a NumPy array of {values.dtype}")
    if values.dtype.kind == "f":
        values = values.astype(np.float32)
    elif values.dtype.kind == "u" and values.dtype.itemsize > 1:
        values = values.astype(np.int64)
    return torch.from_numpy(np.array(values, copy=True, order="C", dtype=values.dtype.newbyteorder("=")))


def is_dataset(value: object) -> bool:
    """Whether `value` is one of PyTorch's holders of images with labels: a `Dataset` or a `DataLoader`."""
    return isinstance(value, Dataset | DataLoader)


def is_labeled_source(value: object) -> bool:
    """Whether `read` takes `value`: a `Dataset`, a `DataLoader`, or a pair (images, labels)."""
    return is_dataset(value) or (isinstance(value, tuple | list) and len(value) == 2)


def count_class_names(source: object) -> int | None:
    """How many classes a dataset names (torchvision's `classes`), a public count; None if it names none.

    Args:
        source: what `read` takes.
    """
    while (inner := getattr(source, "dataset", None)) is not None:
        source = inner
    names = getattr(source, "classes", None)
    if isinstance(names, list | tuple) and names and all(isinstance(n, str) for n in names):
        return len(names)
    return None


def read(source: Any, name: str, *, progress: bool = True) -> tuple[Any, Any]:
    """Read whatever holds images and labels into memory, in its own order; a lazy dataset is read once, with a bar.

    Args:
        source: see `is_labeled_source`. A dataset gives items (image [C, H, W], label); PIL pictures become uint8. Of a
            `DataLoader` the dataset is read, so that neither its shuffling nor its workers matter.
        name: the argument's, for messages.
        progress: whether long reading shows a bar.

    Returns:
        images [N, C, H, W], floats as they came or uint8, and labels as they came, both stacked.

    Raises:
        TypeError: images in a file (see `require_in_memory`), items that are no pairs, or a loader that is more than
            its dataset (an own sampler or `collate_fn`).
        ValueError: an empty dataset, or items of different shapes or kinds.
    """
    if isinstance(source, tuple | list):
        return source[0], source[1]
    require_in_memory(source, name)
    if isinstance(source, DataLoader):
        source = _dataset_of(source, name)
    if isinstance(source, TensorDataset) and len(source.tensors) == 2:
        return source.tensors
    total = len(cast(Sized, source)) if hasattr(source, "__len__") else 0
    images: list[Tensor] = []
    labels: list[Tensor] = []
    with bar(total, f"reading {name}", unit="image", progress=progress) as shown:
        for i, item in enumerate(_items(source)):
            if not isinstance(item, tuple | list) or len(item) != 2:
                raise TypeError(f"{name} must give pairs, {_WANTED}; item {i} is {_short(item)}")
            images.append(_image(item[0], f"{name}[{i}]"))
            label = as_tensor(item[1], f"the label of {name}[{i}]", lists=True)
            labels.append(label if isinstance(label, Tensor) else torch.as_tensor(_number(label, f"{name}[{i}]")))
            for got, first, what in ((images[-1], images[0], "image"), (labels[-1], labels[0], "label")):
                if got.shape != first.shape or got.dtype != first.dtype:
                    raise ValueError(
                        f"{name} must hold items of one shape and kind, but the {what} of item {i} is {got.dtype} "
                        f"{list(got.shape)} and that of item 0 {first.dtype} {list(first.shape)}; "
                        "make them alike in the dataset's transform"
                    )
            shown.update()
    if not images:
        raise ValueError(f"{name} must hold at least one item, got an empty {type(source).__name__}")
    return torch.stack(images), torch.stack(labels)


def _dataset_of(loader: DataLoader[Any], name: str) -> Any:
    """A loader's dataset, where the loader gives all of it and nothing else: reading it so draws no random number."""
    if isinstance(loader.dataset, IterableDataset):
        return loader.dataset
    batches, sampler = loader.batch_sampler, loader.sampler
    whole = isinstance(sampler, SequentialSampler) or (
        isinstance(sampler, RandomSampler)
        and not sampler.replacement
        and sampler.num_samples == len(sampler.data_source)
    )
    if not whole or type(batches) not in (BatchSampler, type(None)):
        own = type(batches if whole else sampler).__name__
        raise TypeError(
            f"{name} is a DataLoader with a {own}; give the images that you mean as a dataset, for example "
            "torch.utils.data.Subset(dataset, indices)"
        )
    if batches is not None and loader.collate_fn is not default_collate:
        raise TypeError(f"{name} is a DataLoader with a collate_fn of its own; give a dataset of (image, label) pairs")
    return loader.dataset


def _items(source: Any) -> Iterator[Any]:
    if isinstance(source, IterableDataset) or not hasattr(source, "__len__"):
        yield from source
    else:
        for i in range(len(source)):
            yield source[i]


def _image(value: Any, name: str) -> Tensor:
    if hasattr(value, "getbands"):  # a PIL picture; PIL itself need not be imported to know one
        array = np.array(value.convert("L" if value.mode in ("1", "L", "LA") else "RGB"))
        return torch.from_numpy(array).reshape(*array.shape[:2], -1).permute(2, 0, 1)
    image = as_tensor(value, name)
    if not isinstance(image, Tensor) or image.ndim != 3:
        raise TypeError(f"{name} must be {_WANTED}, got {_short(value)}")
    return image


def _number(label: Any, name: str) -> int | float:
    if isinstance(label, bool) or not isinstance(label, int | float):
        raise TypeError(f"the label of {name} must be a class index or a row of numbers, got {_short(label)}")
    return label


def _short(value: Any) -> str:
    if isinstance(value, Tensor | np.ndarray):
        return f"{type(value).__name__} {list(value.shape)}"
    if isinstance(value, tuple | list):
        return f"a {type(value).__name__} of {len(value)}"
    return type(value).__name__
