"""Copy of any dataset in a file of bytes, for images that do not fit in memory."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset

from distillkit._utils import check, conversion
from distillkit._utils.pixels import AnyPath, Size, height_and_width, to_bytes
from distillkit._utils.progress import bar
from distillkit._utils.user_warnings import without_warnings
from distillkit.data._cache import BLOCK, CacheWriter, open_written
from distillkit.locking import locked
from distillkit.normalization import IDENTITY, Normalization
from distillkit.sets import LabeledImages, StoredImages
from distillkit.sets._validation import checked_class_names

_ROUNDED = 0.001


def store_dataset(
    dataset: Dataset[Any] | DataLoader[Any] | Iterable[Any],
    path: AnyPath,
    *,
    image: str | None = None,
    label: str | None = None,
    size: Size | None = None,
    channels: int | None = None,
    num_classes: int | None = None,
    normalization: Normalization | None = None,
    class_names: Sequence[str] = (),
    progress: bool = True,
) -> StoredImages:
    """Write the images of any dataset to a file, and return them as a set that is read from this file when needed.

    Use it for a dataset that does not fit in memory. The images are rounded to bytes, so pixels that were bytes before
    are exact. Every image is read once: random transforms are applied only then. If the file is complete, it is opened
    and `dataset` is not read. To store other images, delete the file or give another path.

    Args:
        dataset: a `Dataset`, a list or another iterable of pairs (image, label) or of rows, a dataset of Hugging Face,
            also streamed, or a pair of arrays (images, labels), which may be memory-mapped. Of a `DataLoader`, the
            batches of one pass are stored; its workers decode in parallel.
        path: path of the file, which ends in `.npy`: uint8 [N, C, H, W]. Labels and hashes are written to a file with
            the suffix `.safetensors` beside it, at the end. An interrupted call starts again.
        image, label, size, channels, num_classes, normalization, class_names: as in `LabeledImages.from_dataset`.
        progress: whether to show a progress bar.

    Raises:
        TypeError, ValueError: as in `LabeledImages.from_dataset`; or `dataset` is a part of a set, or float images are
            not in [0, 1] without their normalization, or the file holds another number or shape of images.
        OSError, distillkit.locking.InUse: the file cannot be written, or another process has been writing it for long.
    """
    path = check.path(path, "path")
    if path.suffix != ".npy":
        raise ValueError(f"path must end in .npy, got {path}")
    part = isinstance(dataset, Subset | DataLoader)
    if part and isinstance(conversion.innermost(dataset), LabeledImages | StoredImages):
        raise TypeError(f"dataset must give pictures, but this {type(dataset).__name__} is of a set; keep it with save")
    if normalization is not None:
        Normalization.require(normalization)
    names = checked_class_names(class_names, num_classes)
    complete = path.with_suffix(".safetensors")
    options = {"image": image, "label": label, "size": size, "channels": channels, "normalization": normalization}
    with locked(path.with_name(f".{path.name}.lock"), f"the file {path}", wait=24 * 3600.0):
        if not (complete.is_file() and path.is_file()):
            _write(dataset, complete, progress, {**options, "class_names": names})
        cache, tensors, facts = open_written(complete)
    count, (c, h, w) = len(cache.file.digests), cache.file.shape
    total = _length(dataset)
    if total not in (None, count) or channels not in (None, c) or height_and_width(size) not in (None, (h, w)):
        raise ValueError(
            f"{path} holds {count} images {c}x{h}x{w}, but this call asks for other ones "
            f"({total if total is not None else 'an unknown number of'} images, size={size}, channels={channels}); "
            "delete the file, or give another path"
        )
    found: dict[str, Any] = json.loads(facts["found"])
    known = names or tuple(found["names"])
    given = num_classes is not None or bool(names) or tensors["labels"].ndim == 2
    if num_classes is None:
        num_classes = len(known) or None
    with without_warnings():  # of a set of one pixel each, which knows how labels and classes are read
        like = LabeledImages(torch.zeros(count, 1, 1, 1), tensors["labels"], num_classes=num_classes)
    known = known if len(known) == like.num_classes else ()
    return StoredImages(
        cache.file,
        torch.arange(count),
        like.labels,
        num_classes=like.num_classes,
        normalization=normalization or IDENTITY,
        info={"classes": found["origin"]} if known and not names else {},
        classes_given=given,
        class_names=known,
    )


def _write(dataset: Any, complete: Path, progress: bool, options: dict[str, Any]) -> None:
    """Write the pictures, labels and names of a dataset."""
    total = _length(dataset)
    writer: CacheWriter | None = None
    labels: list[Tensor] = []
    words: list[str] = []
    found: dict[str, Any] = {"names": (), "origin": None}
    count = 0
    with bar(total or 0, f"storing {complete.stem}", unit="image", progress=progress) as shown:
        for block in _blocks(dataset):
            made = _converted(block, count, options)
            if writer is None:
                writer = CacheWriter(complete, total or 0, made.shape, resume=False)
                found = {"names": made.class_names, "origin": made.info.get("classes")}
            if made.shape != writer.shape or made.labels.shape[1:] != (labels or [made.labels])[0].shape[1:]:
                raise ValueError(
                    f"dataset must have images and labels of one shape, but those of item {count} and later have "
                    f"shapes {made.shape} and {list(made.labels.shape[1:])}; give size= and channels="
                )
            writer.write(count, list(to_bytes(made.images)))
            labels.append(made.labels)
            if made.info.get("classes") == "labels":
                words += [made.class_names[i] for i in made.labels.tolist()]
            count += len(made)
            shown.update(len(made))
    if writer is None or total not in (None, count):
        raise ValueError(f"dataset must hold {total or 'at least one'} items, as its length says, but gave {count}")
    own = torch.cat(labels)
    if words:
        own, found["names"] = conversion.label_indices(words, name="the labels of dataset")
    writer.count = count
    writer.finish(complete, {"labels": own}, {"found": json.dumps(found)})


def _converted(block: Any, begin: int, options: dict[str, Any]) -> LabeledImages:
    """Return some items as a set of pixels in [0, 1]."""
    try:
        with without_warnings():  # a block may lack classes, or have a single picture
            made = LabeledImages.from_dataset(block, **options, progress=False)
    except (TypeError, ValueError) as error:
        kind = TypeError if isinstance(error, TypeError) else ValueError
        raise kind(f"{error} (items are counted from item {begin} of the dataset)" if begin else str(error)) from error
    pixels = made.normalization.decode(made.images)
    low, high = (float(value) for value in pixels.aminmax())
    if low < -_ROUNDED or high > 1 + _ROUNDED:
        raise ValueError(
            f"dataset must give pixels in [0, 1], or bytes, but items {begin} and later have values from {low:.4g} to "
            f"{high:.4g}; if its transform normalizes, pass normalization="
        )
    return made.replace(images=pixels, normalization=IDENTITY)


def _blocks(dataset: Any) -> Iterator[Subset[Any]]:
    """Yield the items of a dataset in blocks, each of which is a dataset in memory."""
    source, kept = conversion.innermost(dataset), ("features", "classes", "find_classes")
    known = {name: getattr(source, name) for name in kept if hasattr(source, name)}
    items = _all_items(dataset)
    while block := _Items(islice(items, BLOCK)):
        vars(block).update(known)
        yield Subset(cast("Dataset[Any]", block), range(len(block)))


def _all_items(dataset: Any) -> Iterator[Any]:
    if isinstance(dataset, DataLoader):
        with torch.random.fork_rng(devices=[]):  # the pass draws as usual, but leaves the global state as it was
            for batch in dataset:
                rows = zip(*batch.values()) if isinstance(batch, Mapping) else zip(*batch)
                yield from (dict(zip(batch, row)) for row in rows) if isinstance(batch, Mapping) else rows
    elif isinstance(dataset, tuple) and len(dataset) == 2:
        yield from zip(*map(conversion.items, dataset))
    elif (
        isinstance(dataset, str | Mapping | Tensor)
        or hasattr(dataset, "columns")
        or not (isinstance(dataset, Iterable) or hasattr(dataset, "__getitem__"))
    ):
        raise TypeError(conversion.unsupported(dataset, "dataset", labels=False))
    else:
        yield from conversion.items(dataset)


class _Items(list[Any]):
    """Items of a dataset, with what the dataset knows about its classes."""


def _length(dataset: Any) -> int | None:
    """Return the number of items, or None if only a pass over them shows it."""
    if isinstance(dataset, tuple) and len(dataset) == 2:
        return len(dataset[0])
    streamed = isinstance(dataset, DataLoader | IterableDataset | Mapping | Tensor | str)
    return len(dataset) if not streamed and hasattr(dataset, "__len__") else None
