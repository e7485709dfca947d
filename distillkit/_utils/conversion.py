"""Conversion of arrays, datasets, loaders and pairs of images and labels to tensors in memory."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence, Sized
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    TensorDataset,
    default_collate,
)

from distillkit._utils.pictures import picture_array
from distillkit._utils.progress import bar

__all__ = [
    "FileBacked", "as_tensor", "class_names", "format_bytes", "is_dataset", "is_labeled_source", "read",
    "repeats_items", "require_in_memory", "unsupported", "whole_dataset",
]  # fmt: skip

_WANTED = "an image [C, H, W] (a tensor, an array or a PIL picture) and its label"


class FileBacked(ABC):
    """Base class of image sets that are stored in a file and read in parts, such as `sets.StoredImages`."""

    @property
    @abstractmethod
    def bytes(self) -> int:
        """Number of bytes that all images would take in memory as floats."""

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of images."""

    def read_hint(self, set_name: str) -> str:
        """Return a text that states that the images are in a file, and how to read them.

        The text completes an error message after the words "the images of".
        """
        return (
            f"{set_name} are in a file: read a part with `data.read(indices)`, or all {len(self)} with `data.read()` "
            f"({format_bytes(self.bytes)} as floats)"
        )


def require_in_memory(source: Any, name: str) -> None:
    """Refuse images that are stored in a file, for a function that needs them in memory."""
    while not isinstance(source, FileBacked) and (inner := getattr(source, "dataset", None)) is not None:
        source = inner
    if isinstance(source, FileBacked):
        hint = source.read_hint(f"a {type(source).__name__}")
        raise TypeError(f"{name} must be in memory, but the images of {hint}")


def format_bytes(size: int) -> str:
    """Format a number of bytes with a unit, for example "3.01 GB"."""
    scale, unit = next(((s, u) for s, u in ((10**9, "GB"), (10**6, "MB"), (10**3, "kB")) if size >= s), (1, "bytes"))
    return f"{size / scale:.3g} {unit}"


def as_tensor(values: Any, name: str, *, lists: bool = False) -> Any:
    """Convert a NumPy array to a tensor. Other values are returned unchanged.

    Floating-point arrays are converted to float32, because NumPy's default of float64 is rarely intended.
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
    """Return whether `value` is a PyTorch `Dataset` or `DataLoader`."""
    return isinstance(value, Dataset | DataLoader)


def is_labeled_source(value: object) -> bool:
    """Return whether `read` accepts `value`: a `Dataset`, a `DataLoader`, or a pair (images, labels)."""
    return is_dataset(value) or (isinstance(value, tuple | list) and len(value) == 2)


def unsupported(images: Any, name: str, *, labels: bool = True) -> str:
    """Return an error message that says which forms of images are accepted, and how to convert this value."""
    kind = f"{type(images).__module__}.{type(images).__name__}".removeprefix("builtins.")
    if _is_picture(images):
        kind = "one PIL picture"
    elif isinstance(images, list | tuple):
        kind = f"a {kind} of {len(images)} {type(images[0]).__name__} items" if images else f"an empty {kind}"
    wanted = "a LabeledImages, a tensor or array [N, C, H, W] together with labels, a pair of such images and labels, "
    wanted = f"{wanted}a torch.utils.data.Dataset" if labels else "a torch.utils.data.Dataset, a list of pairs"
    return f"{name} must be {wanted} or a DataLoader, got {kind}{_remedy(images, name)}"


def _remedy(images: Any, name: str) -> str:
    """Return what to do with images in an unsupported form, for common forms, or an empty text."""
    if isinstance(images, os.PathLike | str):
        return f"; read a folder of pictures first: load_folder({os.fspath(images)!r}).train"
    if isinstance(images, Mapping):
        return f"; pass one of its values ({', '.join(map(str, list(images)[:5]))}), or its images and labels"
    columns = getattr(images, "column_names", None)  # of a dataset of Hugging Face
    if isinstance(images, list) and images and isinstance(images[0], Mapping):
        columns = list(images[0])
    if isinstance(columns, list) and len(columns) > 1:
        return f"; read its rows: {_rows(columns, name)}"
    if isinstance(images, list | tuple) and images:
        first, *others = images
        if isinstance(first, list | tuple) and len(first) == 2:
            return f"; read its pairs: LabeledImages.from_dataset(list({name}))"
        if len(others) == 1 and isinstance(others[0], int):
            return f"; if {name} is a list of pairs, read it: LabeledImages.from_dataset({name})"
        if isinstance(first, Tensor | np.ndarray) or _is_picture(first):
            return f"; join it with its labels: LabeledImages.from_dataset(list(zip({name}, labels)))"
    if _is_picture(images):
        return "; join pictures with their labels: LabeledImages.from_dataset(list(zip(pictures, labels)))"
    return ""


def _rows(columns: Sequence[str], name: str) -> str:
    image = next((n for n in columns if str(n).lower() in ("image", "img", "pixel_values")), columns[0])
    label = next((n for n in columns if str(n).lower() in ("label", "labels", "fine_label")), columns[-1])
    return f"LabeledImages.from_dataset([(row[{image!r}], row[{label!r}]) for row in {name}])"


def _is_picture(value: object) -> bool:
    """Return whether a value is a PIL picture, without importing PIL."""
    return hasattr(value, "getbands")


def class_names(source: object) -> tuple[tuple[str, ...], bool]:
    """Return the class names in a dataset's attribute `classes`, or (), and whether the dataset lists folders."""
    while (inner := getattr(source, "dataset", None)) is not None:
        source = inner
    names = getattr(source, "classes", None)
    found = tuple(names) if isinstance(names, list | tuple) and all(isinstance(n, str) for n in names) else ()
    return found, callable(getattr(source, "find_classes", None))  # as torchvision's ImageFolder


def repeats_items(source: object) -> bool:
    """Return whether a dataset repeats items: by the indices of a `Subset`, or because it is joined to itself."""
    if isinstance(source, ConcatDataset):
        parts = source.datasets
        return len({*map(id, parts)}) < len(parts) or any(map(repeats_items, parts))
    if isinstance(source, Subset) and len({*map(int, source.indices)}) < len(source.indices):
        return True
    inner = getattr(source, "dataset", None)
    return inner is not None and repeats_items(inner)


def read(source: Any, name: str, *, progress: bool = True) -> tuple[Any, Any]:
    """Read images and labels from a source into memory, in the source's order."""
    if isinstance(source, tuple | list):
        return source[0], source[1]
    require_in_memory(source, name)
    if isinstance(source, DataLoader):
        source = whole_dataset(source, name)
    if isinstance(source, TensorDataset) and len(source.tensors) == 2:
        return source.tensors
    total = len(cast(Sized, source)) if hasattr(source, "__len__") else 0
    images: list[Tensor] = []
    labels: list[Tensor] = []
    with bar(total, f"reading {name}", unit="image", progress=progress) as shown:
        for i, item in enumerate(_items(source)):
            if not isinstance(item, tuple | list) or len(item) != 2:
                known = isinstance(item, Mapping) and len(item) > 1
                remedy = f"; convert them: {_rows(list(item), name)}" if known else ""
                raise TypeError(f"{name} must give pairs, {_WANTED}; item {i} is {_short(item)}{remedy}")
            images.append(_image(item[0], f"{name}[{i}]"))
            label = as_tensor(item[1], f"the label of {name}[{i}]", lists=True)
            labels.append(label if isinstance(label, Tensor) else torch.as_tensor(_number(label, f"{name}[{i}]")))
            for got, first, what in ((images[-1], images[0], "image"), (labels[-1], labels[0], "label")):
                if got.shape != first.shape or got.dtype != first.dtype:
                    raise ValueError(
                        f"{name} must have items of one shape and dtype, but the {what} of item {i} is {got.dtype} "
                        f"{list(got.shape)} and that of item 0 {first.dtype} {list(first.shape)}; "
                        "convert them in the dataset's transform"
                    )
            shown.update()
    if not images:
        raise ValueError(f"{name} must hold at least one item, got an empty {type(source).__name__}")
    return torch.stack(images), torch.stack(labels)


def whole_dataset(loader: DataLoader[Any], name: str) -> Any:
    """Return the dataset of a loader. The loader is not iterated, so no random numbers are drawn.

    A loader with its own sampler or `collate_fn` is refused, because it may yield other items than those of its
    dataset.
    """
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
            f"{name} is a DataLoader with a {own}; pass the images as a dataset instead, for example "
            "torch.utils.data.Subset(dataset, indices)"
        )
    if batches is not None and loader.collate_fn is not default_collate:
        raise TypeError(f"{name} is a DataLoader with its own collate_fn; pass a dataset of (image, label) pairs")
    return loader.dataset


def _items(source: Any) -> Iterator[Any]:
    if isinstance(source, IterableDataset) or not hasattr(source, "__len__"):
        yield from source
    else:
        for i in range(len(source)):
            yield source[i]


def _image(value: Any, name: str) -> Tensor:
    if _is_picture(value):
        try:
            array = picture_array(value, None, "put them on a background in the dataset's transform")
        except Exception as error:  # Pillow raises errors of many kinds for damaged files, which it reads only here
            raise ValueError(f"{name} cannot be read: {error or type(error).__name__}") from error
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
    if isinstance(value, Mapping):
        return f"a {type(value).__name__} of {', '.join(map(str, list(value)[:5]))}"
    return type(value).__name__
