"""Conversion of arrays, datasets, loaders and pairs of images and labels to tensors in memory."""

from __future__ import annotations

import io
import math
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

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
from distillkit._utils.user_warnings import warn

IMAGE_COLUMNS = ("image", "img", "picture", "photo", "pixel_values")
"""Usual names of a column of images."""
LABEL_COLUMNS = ("label", "labels", "class", "cls", "target", "category")
"""Usual names of a column of labels."""
_WANTED = "an image (a tensor or array [C, H, W] or a PIL picture) and its label"


class Found(NamedTuple):
    """Content of a source: images, labels, names of classes, and what the names were found in."""

    images: Any
    labels: Any
    names: tuple[str, ...] = ()
    origin: Literal["dataset", "folders", "labels"] = "dataset"


def require_in_memory(source: Any, name: str) -> None:
    """Refuse images that are stored in a file, for a function that needs them in memory."""
    if (hint := getattr(innermost(source), "read_hint", None)) is not None:
        raise TypeError(f"{name} must be in memory, but {hint()}")


def require_memory(count: int, shape: Sequence[int], open_with: str) -> None:
    """Refuse pictures that exceed the machine's memory as floats, and warn if they need more than half of it."""
    if not hasattr(os, "sysconf"):
        return
    size, memory = 4 * count * math.prod(shape), os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    message = (
        f"{count} pictures of {list(shape)} take {format_bytes(size)} as floats, and this machine has "
        f"{format_bytes(memory)} of memory; use {open_with}(...), which reads them when needed, or give a smaller size="
    )
    if size > memory:
        raise ValueError(message)
    if size > memory / 2:
        warn(message)


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


def is_labeled_source(value: object) -> bool:
    """Return whether `read` accepts `value`: a `Dataset`, a `DataLoader`, rows, a table, or a pair (images, labels)."""
    if isinstance(value, list | tuple):
        pair = len(value) == 2 and not is_pictures(value) and not isinstance(value[0], str | os.PathLike)
        return pair or _is_items(value)
    return isinstance(value, Dataset | DataLoader) or _is_rows(value) or _columns(value) is not None


def is_pictures(value: object) -> bool:
    """Return whether `value` is a list of images: PIL pictures, or tensors or arrays [H, W] or [C, H, W]."""
    return isinstance(value, list | tuple) and bool(value) and all(_is_image(one) for one in value[:2])


def _is_image(value: object) -> bool:
    encoded = isinstance(value, Mapping) and {"bytes", "path"} == set(value)
    return _is_picture(value) or encoded or (isinstance(value, Tensor | np.ndarray) and value.ndim in (2, 3))


def _is_items(value: Sequence[Any]) -> bool:
    """Return whether a list holds rows, or pairs of one image and its label."""
    first = value[0] if value else None
    if isinstance(first, tuple | list) and len(first) == 2:
        return _is_image(first[0]) and not _is_image(first[1])
    return isinstance(first, Mapping) and not _is_image(first)


def _is_rows(value: object) -> bool:
    """Return whether `value` is a dataset of rows of Hugging Face; a streamed one may not know its columns."""
    streamed = type(value).__module__.startswith("datasets.") and hasattr(value, "__iter__")
    return not isinstance(value, Mapping) and (streamed or isinstance(getattr(value, "column_names", None), list))


def _columns(value: Any) -> Mapping[str, Any] | None:
    """Return the columns of a table: of a mapping from names to sequences, a pandas data frame or a pyarrow table."""
    if type(value).__module__.startswith("pandas") and hasattr(value, "columns"):
        return {str(name): value[name].tolist() for name in value.columns}
    if hasattr(value, "to_pydict"):  # of pyarrow
        return dict(value.to_pydict())
    parts = isinstance(value, Mapping) and any(
        isinstance(v, Dataset | DataLoader) or _is_rows(v) for v in value.values()
    )
    kinds = (Tensor, np.ndarray, list, tuple)
    columns = isinstance(value, Mapping) and len(value) > 1 and all(isinstance(v, kinds) for v in value.values())
    return value if columns and not parts else None


def column(
    given: str | None, what: str, columns: Collection[str], typed: Sequence[str], usual: Sequence[str], call: str
) -> str:
    """Return the column of images or labels: the given one, else the only one of its type or with a usual name."""
    if given is not None:
        if given not in columns:
            raise ValueError(f"{what} must be one of the columns {', '.join(columns)}, got {given!r}")
        return given
    named = [name for name in columns if name.lower() in usual]
    found = list(typed) or [name for name in named if name == usual[0]] or named
    if len(found) != 1:
        several = f"several columns may be the {what} ({', '.join(found)})" if found else f"no column is the {what}"
        raise TypeError(f"{several} among {', '.join(columns)}; name it: {call}")
    return found[0]


def unsupported(images: Any, name: str, *, labels: bool = True) -> str:
    """Return an error message that says which forms of images are accepted, and how to convert this value."""
    kind = f"{type(images).__module__}.{type(images).__name__}".removeprefix("builtins.")
    if _is_picture(images):
        kind = "one PIL picture"
    elif isinstance(images, list | tuple):
        kind = f"a {kind} of {len(images)} {type(images[0]).__name__} items" if images else f"an empty {kind}"
    wanted = "a LabeledImages, images [N, C, H, W] or a list of pictures together with labels, a pair of both, "
    wanted = f"{wanted}a torch.utils.data.Dataset" if labels else "a torch.utils.data.Dataset, a list of pairs"
    return f"{name} must be {wanted}, rows of a dataset or a DataLoader, got {kind}{_remedy(images, name)}"


def _remedy(images: Any, name: str) -> str:
    """Return what to do with images in an unsupported form, for common forms, or an empty text."""
    if isinstance(images, os.PathLike | str):
        path = os.fspath(images)
        call = "load_table" if path.endswith((".csv", ".tsv", ".parquet")) else "load_folder"
        return f"; read it first: distillkit.data.{call}({path!r}).train"
    if isinstance(images, Mapping) and images:
        return f"; pass one of its values: {name}[{next(iter(images))!r}] ({', '.join(map(str, list(images)[:5]))})"
    if isinstance(images, list | tuple) and images and isinstance(images[0], str | os.PathLike):
        return f"; read the files: distillkit.data.load_table({{'image': {name}, 'label': labels}}).train"
    return "; pass a list of pictures, and their labels" if _is_picture(images) else ""


def _is_picture(value: object) -> bool:
    """Return whether a value is a PIL picture, without importing PIL."""
    return hasattr(value, "getbands")


def label_indices(labels: Any, names: Sequence[str] = (), name: str = "labels") -> tuple[Any, tuple[str, ...]]:
    """Convert names of classes to class indices, by `names` or in alphabetical order, and return the names, too.

    Other labels are returned unchanged, except that a pandas Series becomes an array.
    """
    values = labels.to_numpy() if hasattr(labels, "to_numpy") else labels
    listed = values.tolist() if isinstance(values, np.ndarray) and values.dtype.kind in "OUT" else values
    if not isinstance(listed, list | tuple) or not any(isinstance(value, str) for value in listed):
        return values, tuple(names)
    if other := [i for i, value in enumerate(listed) if not isinstance(value, str) or not value]:
        raise ValueError(
            f"{name} must be names of classes throughout, but {len(other)} of {len(listed)} are not, such as "
            f"{name}[{other[0]}], which is {listed[other[0]]!r}; drop such images, or give them a label"
        )
    known = {one: i for i, one in enumerate(names or sorted(set(listed)))}
    if unknown := sorted(set(listed) - set(known)):
        raise ValueError(f"{name} must be among class_names ({', '.join(known)[:80]}), got {', '.join(unknown[:5])}")
    return torch.tensor([known[value] for value in listed], device="cpu"), tuple(known)


def channels_last(shape: Sequence[int]) -> bool:
    """Return whether the shape of an image is rather [H, W, C] than [C, H, W]."""
    c, h, w = shape
    return w in (1, 3, 4) and min(c, h) >= 8


def channels_first(images: Tensor, name: str, *, array: bool) -> Tensor:
    """Return gray images [N, H, W] and images [N, H, W, C] as [N, C, H, W], if only this reading is possible."""
    if images.ndim == 3:
        return images[:, None]
    if images.ndim != 4 or not images.numel():
        return images
    n, c, h, w = images.shape
    if channels_last((c, h, w)) and w != 4:
        return images.permute(0, 3, 1, 2).contiguous()
    if array and w in (1, 3) and (c not in (1, 3) or h > 4):
        raise ValueError(
            f"{name} of shape {[n, c, h, w]} may be [N, C, H, W] or [N, H, W, C]; pass torch.from_numpy({name}) in the "
            "first case, and add .permute(0, 3, 1, 2) in the second"
        )
    return images


def innermost(source: Any) -> Any:
    """Return the dataset inside of subsets and loaders."""
    while (inner := getattr(source, "dataset", None)) is not None:
        source = inner
    return source


def _types(source: Any) -> Mapping[str, Any]:
    """Return the types that Hugging Face declares for columns, or none."""
    features = getattr(innermost(source), "features", None)
    return features if isinstance(features, Mapping) else {}


def _names_of(source: object, label: str) -> tuple[tuple[str, ...], Literal["dataset", "folders"]]:
    """Return the names of the classes of a dataset, or (), and what these are names of."""
    types, source = _types(source), innermost(source)
    names = getattr(types[label], "names", None) if label in types else getattr(source, "classes", None)
    found = tuple(names) if isinstance(names, list | tuple) and all(isinstance(n, str) for n in names) else ()
    return found, "folders" if callable(getattr(source, "find_classes", None)) else "dataset"  # as ImageFolder


def repeats_items(source: object) -> bool:
    """Return whether a dataset repeats items: by the indices of a `Subset`, or because it is joined to itself."""
    if isinstance(source, ConcatDataset):
        parts = source.datasets
        return len({*map(id, parts)}) < len(parts) or any(map(repeats_items, parts))
    if isinstance(source, Subset) and len({*map(int, source.indices)}) < len(source.indices):
        return True
    inner = getattr(source, "dataset", None)
    return inner is not None and repeats_items(inner)


def read(
    source: Any,
    name: str,
    *,
    image: str | None = None,
    label: str | None = None,
    class_names: Sequence[str] = (),
    convert: Callable[[Tensor], Tensor] | None = None,
    progress: bool = True,
) -> Found:
    """Read images and labels from a source into memory, in the source's order.

    Args:
        source: a `Dataset`, a `DataLoader`, rows, a table or a pair (images, labels).
        name: name of the source in error messages.
        image, label: columns of the image and its label, if the items are rows. Default: those that can only be meant.
        class_names: names of the classes in label order, for labels that are names.
        convert: function that converts an image [C, H, W] of 8 or 16 bits to pixels of another size.
        progress: whether to show a progress bar if reading takes long.
    """
    require_in_memory(source, name)
    if isinstance(source, DataLoader):
        source = whole_dataset(source, name)
    chosen: tuple[str, str] | None = None
    if (columns := _columns(source)) is not None:
        first = {key: values[0] for key, values in columns.items() if len(values)}
        chosen = _image_and_label(source, first or columns, image, label, name)
        source = tuple(columns[key] for key in chosen)
    if isinstance(source, TensorDataset) and len(source.tensors) == 2:
        source = source.tensors
    if isinstance(source, tuple | list) and len(source) == 2 and not _is_items(source):
        images, own = source
        if isinstance(images, Tensor | np.ndarray) and convert is None:
            return Found(images, *label_indices(own, class_names), "labels")
        if not hasattr(images, "__len__"):
            raise TypeError(unsupported(images, name))
        if len(images) != len(own):
            raise ValueError(f"labels must have one entry per image: got {len(own)} for {len(images)} images")
        source = list(zip(images, own.tolist() if hasattr(own, "tolist") and np.ndim(own) == 1 else own))
    total = len(source) if hasattr(source, "__len__") else 0
    images, labels = [], list[Any]()
    with bar(total, f"reading {name}", unit="image", progress=progress) as shown:
        for i, item in enumerate(items(source)):
            if isinstance(item, Mapping) and not _is_image(item):
                chosen = chosen or _image_and_label(source, item, image, label, name)
                item = (item[chosen[0]], item[chosen[1]])
            elif chosen is None and (image is not None or label is not None):
                raise TypeError(f"image and label are columns of rows, but item {i} of {name} is {_short(item)}")
            if not isinstance(item, tuple | list) or len(item) != 2:
                raise TypeError(f"{name} must give pairs, {_WANTED}; item {i} is {_short(item)}")
            images.append(_image(item[0], f"{name}[{i}]", convert))
            if not i:
                require_memory(total, images[0].shape, "distillkit.data.store_dataset")
            own = item[1] if isinstance(item[1], str) else as_tensor(item[1], f"the label of {name}[{i}]", lists=True)
            word = isinstance(own, Tensor | str) or (own is None and i and isinstance(labels[0], str))
            labels.append(own if word else torch.as_tensor(_number(own, f"{name}[{i}]"), device="cpu"))
            for got, like, what in ((images[-1], images[0], "image"), (labels[-1], labels[0], "label")):
                both = isinstance(got, Tensor) and isinstance(like, Tensor)
                if both and (got.shape != like.shape or got.dtype != like.dtype):
                    raise ValueError(
                        f"{name} must have items of one shape and dtype, but the {what} of item {i} is {got.dtype} "
                        f"{list(got.shape)} and that of item 0 {like.dtype} {list(like.shape)}; convert them in the "
                        f"dataset's transform, or pictures by LabeledImages.from_dataset({name}, size=..., channels=3)"
                    )
            shown.update()
    if not images:
        raise ValueError(f"{name} must hold at least one item, got an empty {type(source).__name__}")
    names, origin = _names_of(source, chosen[1] if chosen else "")
    names = tuple(class_names) or names
    if all(isinstance(one, Tensor) for one in labels):
        return Found(torch.stack(images), torch.stack(labels), names, origin)
    own, found = label_indices(labels, names, f"the labels of {name}")
    return Found(torch.stack(images), own, found, origin if names else "labels")


def _image_and_label(
    source: Any, row: Mapping[str, Any], image: str | None, label: str | None, name: str
) -> tuple[str, str]:
    """Return the columns of the image and of the label of a row."""
    kinds = {key: type(one).__name__ for key, one in _types(source).items() if key in row}
    pictures = [key for key in kinds if kinds[key] == "Image"] or [key for key, v in row.items() if _is_image(v)]
    call = f'LabeledImages.from_dataset({name}, image="...", label="...")'
    image = column(image, "image", row, pictures, IMAGE_COLUMNS, call)
    typed = [key for key in kinds if kinds[key] == "ClassLabel"]
    if not typed and len(row) == 2:
        typed = [key for key in row if key != image]
    return image, column(label, "label", row, typed, LABEL_COLUMNS, call)


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


def items(source: Any) -> Iterator[Any]:
    """Yield the items of a dataset."""
    indexed = hasattr(source, "__getitem__") and hasattr(source, "__len__")
    if indexed and not isinstance(source, IterableDataset) and not _is_rows(source):
        yield from (source[i] for i in range(len(source)))
    else:
        yield from source


def _image(value: Any, name: str, convert: Callable[[Tensor], Tensor] | None) -> Tensor:
    if isinstance(value, Mapping) and _is_image(value):  # an encoded picture of Hugging Face
        from PIL import Image

        value = Image.open(value["path"] if value["bytes"] is None else io.BytesIO(value["bytes"]))
    if _is_picture(value):
        try:
            array = picture_array(value, None, "put them on a background in the dataset's transform")
        except Exception as error:  # Pillow raises errors of many kinds for damaged files, which it reads only here
            raise ValueError(f"{name} cannot be read: {str(error) or type(error).__name__}") from error
        image = torch.from_numpy(array).reshape(*array.shape[:2], -1).permute(2, 0, 1)
    else:
        image = as_tensor(value, name, lists=True)
        if not isinstance(image, Tensor) or image.ndim not in (2, 3):
            files = "; read files with distillkit.data.load_table" if isinstance(value, str | os.PathLike) else ""
            raise TypeError(f"{name} must be {_WANTED}, got {_short(value)}{files}")
        own = isinstance(value, np.ndarray)
        image = channels_first(image[None], name, array=own)[0] if image.ndim == 3 else image[None]
    return image if convert is None else convert(image)


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
