"""`StoredImages`: an image set that is stored in a file and read in parts."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any, TypeAlias, overload

import torch
from torch import Tensor

from distillkit._utils import check
from distillkit._utils.conversion import format_bytes
from distillkit._utils.threads import thread_pool
from distillkit.normalization import IDENTITY, Normalization
from distillkit.sets._info import replaced_info
from distillkit.sets._labeled import ImageSet, LabeledImages
from distillkit.sets._validation import (
    as_index,
    checked_class_names,
    checked_columns,
    checked_info,
    checked_labels,
    checked_normalization,
)

_ARGUMENTS = ("labels", "num_classes", "normalization", "columns", "info", "classes_given", "class_names")
_READ = 1 << 24
"""Number of bytes of pixels that are converted to floats at a time."""
_CACHED = 1 << 30
"""A set of at most this many bytes as floats is read into memory once by functions that read images many times."""


@dataclass(frozen=True, eq=False)
class PixelFile:
    """File of images of the same shape, stored as consecutive bytes. `distillkit.data.open_folder` creates such files.

    The file is read, not memory-mapped, because mapped pages would count toward the process's memory.

    Attributes:
        path: path of the file, which is in NumPy's `.npy` format.
        start: offset of the first picture in bytes.
        shape: (C, H, W) of every picture.
        digests: BLAKE2b hash of each picture's bytes, uint8 [N, 16].
    """

    path: Path
    start: int
    shape: tuple[int, int, int]
    digests: Tensor

    def read(self, rows: Tensor) -> Tensor:
        """Read pictures from the file, and return them as uint8 [n, C, H, W]."""
        pixels = torch.empty(len(rows), *self.shape, dtype=torch.uint8, device="cpu")
        if not len(rows):
            return pixels
        each, out = math.prod(self.shape), pixels.flatten().numpy().data
        cuts = ((rows.diff() != 1).nonzero().flatten() + 1).tolist()
        try:
            with open(self.path, "rb", buffering=0) as file:
                for begin, end in zip([0, *cuts], [*cuts, len(rows)]):
                    file.seek(self.start + int(rows[begin]) * each)
                    part = out[begin * each : end * each]
                    while part:
                        if not (got := file.readinto(part)):
                            raise ValueError(f"{self.path} is shorter than it was; open its source again")
                        part = part[got:]
        except FileNotFoundError as error:
            raise FileNotFoundError(
                f"{self.path} does not exist: it was deleted, or its source changed and was reopened; open the source "
                "again"
            ) from error
        return pixels


class StoredImages(ImageSet):
    """Image set for data larger than memory: images are stored in a file as bytes, and `read` converts them to floats.

    Create it with `distillkit.data.open_folder` or `open_npz`. Labels and metadata are in memory, so the set can be
    partitioned and sliced like a `LabeledImages`. `fl.simulate` reads the images of a client when the client is
    sampled, and the test images in chunks.

    An integer index reads and normalizes an image, and returns the pair `(image, label)`, so the set is also a
    map-style dataset for `DataLoader`. A slice, mask or index tensor returns a `StoredImages` with these images,
    without reading them.

    Args:
        file: file that contains the images.
        rows: for each image of the set, its index in the file, int64 [N].
        labels: class indices int64 [N], or label rows float [N, K].
        num_classes: number of classes, K.
        normalization: normalization that `read` applies to pixels.
        columns: further data of each image; see `LabeledImages`.
        info: provenance of the set; see `LabeledImages`.
        classes_given: whether K is known independently of the labels.
        class_names: names of the K classes in label order; see `LabeledImages`.

    Raises:
        TypeError, ValueError: labels, columns and rows have different lengths, or the normalization has another number
            of channels than the images.
    """

    _device = torch.device("cpu")

    def __init__(
        self,
        file: PixelFile,
        rows: Tensor,
        labels: Tensor,
        *,
        num_classes: int,
        normalization: Normalization = IDENTITY,
        columns: Mapping[str, Tensor] | None = None,
        info: Mapping[str, Any] | None = None,
        classes_given: bool = True,
        class_names: Sequence[str] = (),
    ) -> None:
        self._file = check.instance(file, PixelFile, "file", "the file of a set that open_folder made")
        self._rows = rows
        self.labels, self.num_classes = checked_labels(labels, len(rows), num_classes)
        self.normalization = checked_normalization(normalization, file.shape[0])
        self.columns = checked_columns(columns, len(rows))
        self.info = checked_info(info)
        self.classes_given = check.boolean(classes_given, "classes_given")
        self.class_names = checked_class_names(class_names, self.num_classes)

    def __len__(self) -> int:
        return len(self._rows)

    @overload
    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]: ...
    @overload
    def __getitem__(self, index: slice | Tensor | Sequence[int]) -> StoredImages: ...
    def __getitem__(self, index: int | slice | Tensor | Sequence[int]) -> tuple[Tensor, Tensor] | StoredImages:
        index = as_index(index, len(self))
        if isinstance(index, Tensor) and index.ndim == 0:
            row = self._rows[int(index)]
            return self._encoded(row[None])[0], self.labels[int(index)]
        return self._with_rows(self._rows[index], **self._selected(index))

    def read(self, indices: slice | Tensor | Sequence[int] | None = None) -> LabeledImages:
        """Read pictures into memory, as floats in the set's normalization.

        Args:
            indices: pictures to read, as a slice, a mask, an index tensor or a list. Default: all pictures, which take
                `self.bytes` bytes of memory.

        Raises:
            FileNotFoundError, ValueError: the file was removed or changed.
        """
        part = self if indices is None else self[indices]
        parts = {name: getattr(part, name) for name in _ARGUMENTS}
        made = LabeledImages._unchecked(images=part._encoded(part._rows), **parts)
        return made if made.labels.device == self._device else made.to(self._device)

    def _take(self, rows: Tensor) -> Tensor:
        return self._encoded(self._rows[rows.cpu()])

    def _part(self, rows: Tensor) -> LabeledImages:
        return self.read(rows.cpu())

    @contextmanager
    def _reader(self, rows: Callable[[int], Tensor], count: int) -> Iterator[Callable[[int], Tensor]]:
        ahead: dict[int, Future[Tensor]] = {}
        last, lock = -1, Lock()

        def take(i: int) -> Tensor:
            return self._take(rows(i))

        def read(i: int) -> Tensor:
            nonlocal last
            with lock:
                found = ahead.pop(i, None)
                if last <= i:  # a thread reads what is needed next
                    last = i + 1
                    if last < count:
                        ahead[last] = pool.submit(take, last)
            return take(i) if found is None else found.result()

        with thread_pool(1, "read") as pool:
            yield read

    def _encoded(self, rows: Tensor) -> Tensor:
        images = torch.empty(len(rows), *self.shape, dtype=torch.float32, device="cpu")
        count = max(1, _READ // math.prod(self.shape))
        for some, out in zip(rows.split(count), images.split(count)):
            out.copy_(self.normalization.encode(self._file.read(some).float() / 255))
        return images.to(self._device)

    def _on(self, device: torch.device) -> StoredImages:
        """Return this set with pictures that are read to another device."""
        made = self._with_rows(self._rows)
        made._device = device
        return made

    def replace(self, **changes: Any) -> StoredImages:
        """Return a copy with some parts replaced.

        Args:
            changes: the constructor's arguments `labels`, `num_classes`, `normalization`, `columns`, `info`,
                `class_names` or `classes_given` (whether the number of classes is known independently of the labels).
                Passing `num_classes` sets `classes_given` to True.

        Raises:
            TypeError, ValueError: an argument is unknown or invalid.
        """
        if unknown := sorted(set(changes) - set(_ARGUMENTS)):
            raise TypeError(
                f"replace takes {', '.join(_ARGUMENTS)}, got {', '.join(unknown)}; the pictures stay in their file"
            )
        return self._with(**{"info": replaced_info(self, changes), **changes})

    def _with(self, **changes: Any) -> StoredImages:
        return self._with_rows(self._rows, **changes)

    def _with_rows(self, rows: Tensor, **changes: Any) -> StoredImages:
        made = StoredImages(self._file, rows, **self._changed(_ARGUMENTS, changes))
        made._device = self._device
        return made

    @property
    def images(self) -> Tensor:
        """Refuse access to the tensor of all images, because the images are not in memory.

        Raises:
            AttributeError: always. The message explains how to read some of the images.
        """
        raise AttributeError(self.read_hint())

    def read_hint(self) -> str:
        """Return a sentence that states that the images are in a file, and how to read them, for error messages."""
        return (
            f"the images of this StoredImages are in a file: read a part with `data.read(indices)`, or all {len(self)} "
            f"with `data.read()` ({format_bytes(self.bytes)} as floats)"
        )

    @property
    def digests(self) -> Tensor:
        """Stored hash of each image's bytes, uint8 [N, 16]. With it, images are compared without reading them."""
        return self._file.digests[self._rows]

    @property
    def path(self) -> Path:
        """Path of the file that contains the pictures."""
        return self._file.path

    @property
    def shape(self) -> tuple[int, int, int]:
        """Channels, height and width (C, H, W) of every picture."""
        return self._file.shape

    @property
    def bytes(self) -> int:
        """Number of bytes that all images would take in memory as floats."""
        return 4 * len(self) * math.prod(self.shape)

    def __repr__(self) -> str:
        c, h, w = self.shape
        kind = f"rows of {self.num_classes}" if self.labels.ndim == 2 else f"{self.num_classes} classes"
        told = "".join(f"; {k}={self.info[k]}" for k in ("dataset", "split", "client") if k in self.info)
        file = os.fspath(self.path)
        return f"StoredImages({len(self)} images {c}x{h}x{w}; {kind}; {self.normalization}{told}; in {file})"


RealImages: TypeAlias = LabeledImages | StoredImages
"""Real images, in memory or in a file."""


def images_of(data: RealImages) -> Tensor | StoredImages:
    """Return the tensor of a set's images, or a stored set itself."""
    return data if isinstance(data, StoredImages) else data.images.detach()


def images_like(images: Tensor | StoredImages) -> Tensor:
    """Return a tensor with the shape (except N), dtype and device of images."""
    return images._empty.images if isinstance(images, StoredImages) else images


def read_batches(images: Tensor | StoredImages, batches: Sequence[Tensor]) -> Iterator[Tensor]:
    """Yield the images of each batch of indices; a stored set is read ahead."""
    if isinstance(images, Tensor):
        yield from (images.index_select(0, index.to(images.device, non_blocking=True)) for index in batches)
    else:
        with images._reader(batches.__getitem__, len(batches)) as read:
            yield from map(read, range(len(batches)))


def cached(data: RealImages) -> RealImages:
    """Read a stored set into memory if it is small, for a function that reads its images many times."""
    return data.read() if isinstance(data, StoredImages) and data.bytes <= _CACHED else data
