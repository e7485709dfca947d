"""`StoredImages`: a set whose pictures lie in a file and are read a part at a time."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, overload

import torch
from torch import Tensor

from distillkit._utils import check
from distillkit._utils.conversion import FileBacked
from distillkit.normalization import IDENTITY, Normalization
from distillkit.sets._labeled import LabeledImages
from distillkit.sets._validation import as_index, checked_columns, checked_info, checked_labels, class_counts

__all__ = ["PixelFile", "StoredImages"]

_READ = 1 << 24
"""Bytes of pixels that are turned to floats at a time."""


@dataclass(frozen=True, eq=False)
class PixelFile:
    """Pictures of one shape as bytes in a file, one after the other; `distillkit.data.open_folder` makes it.

    It is read, not mapped: mapped pages would count as memory of the process for as long as they stay.

    Attributes:
        path: the file, in NumPy's `.npy` format.
        start: where the first picture begins, in bytes.
        shape: (C, H, W) of every picture.
        digests: uint8 [N, 16], the BLAKE2b of each picture's bytes.
    """

    path: Path
    start: int
    shape: tuple[int, int, int]
    digests: Tensor

    def read(self, rows: Tensor) -> Tensor:
        """Pictures as uint8 [n, C, H, W].

        Args:
            rows: which, int64 [n], in any order; neighbours in the file are read at once.

        Raises:
            FileNotFoundError: the file is no longer there.
            ValueError: it is shorter than it was.
        """
        pixels = torch.empty(len(rows), *self.shape, dtype=torch.uint8)
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
                f"{self.path} is gone: it was deleted, or its source has changed and was opened again since; open it "
                "again"
            ) from error
        return pixels


class StoredImages(FileBacked):
    """A set whose pictures lie in a file as bytes and become floats when `read` is called, for more than memory holds.

    `distillkit.data.open_folder` and `open_npz` give it. Labels and all facts of the set are in memory, so that it is
    partitioned and cut as a `LabeledImages` is; `fl.simulate` reads a client's part when the client is drawn, and a
    test set piece by piece.

    An index gives the pair `(image, label)`, read and normalised, so it is a map-style dataset for a `DataLoader` too;
    a slice, mask or index tensor gives that part, still in the file.

    Args:
        file: the pictures.
        rows: which of them are the set's, int64 [N], in its order.
        labels: class indices int64 [N], or rows float [N, K].
        num_classes: K.
        normalization: what `read` brings the pixels into.
        columns: what else belongs to each image; see `LabeledImages`.
        info: provenance, JSON values only.
        classes_given: whether K is known apart from these labels.

    Raises:
        TypeError, ValueError: labels, columns or rows of another number, or a normalisation of other channels.
    """

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
    ) -> None:
        self._file, self._rows = file, rows
        self.labels, self.num_classes = checked_labels(labels, len(rows), num_classes)
        Normalization.require(normalization)
        if len(normalization.mean) not in (1, file.shape[0]):
            raise ValueError(
                f"the pictures have {file.shape[0]} channels, normalization has {len(normalization.mean)}; give one "
                "number a channel, or one for all"
            )
        self.normalization = normalization
        self.columns: dict[str, Tensor] = checked_columns(columns or {}, len(rows))
        self.info: dict[str, Any] = checked_info(info or {})
        self.classes_given = check.boolean(classes_given, "classes_given")

    def __len__(self) -> int:
        return len(self._rows)

    @overload
    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]: ...
    @overload
    def __getitem__(self, index: slice | Tensor | Sequence[int]) -> StoredImages: ...
    def __getitem__(self, index: int | slice | Tensor | Sequence[int]) -> tuple[Tensor, Tensor] | StoredImages:
        index = as_index(index)
        if isinstance(index, Tensor) and index.ndim == 0:
            row = self._rows[int(index)]
            return self._encoded(row[None])[0], self.labels[int(index)]
        return StoredImages(
            self._file,
            self._rows[index],
            self.labels[index],
            num_classes=self.num_classes,
            normalization=self.normalization,
            columns={name: column[index] for name, column in self.columns.items()},
            info=self.info,
            classes_given=self.classes_given,
        )

    def read(self, indices: slice | Tensor | Sequence[int] | None = None) -> LabeledImages:
        """Read pictures into memory, as floats in the set's normalisation.

        Args:
            indices: which: a slice, a mask, an index tensor or a list. Default: all, which takes `bytes` of memory.

        Raises:
            FileNotFoundError, ValueError: the file is gone, or not what it was.
        """
        part = self if indices is None else self[indices]
        return LabeledImages._unchecked(
            images=self._encoded(part._rows),
            labels=part.labels,
            num_classes=part.num_classes,
            normalization=part.normalization,
            columns=part.columns,
            info=part.info,
            classes_given=part.classes_given,
        )

    def _encoded(self, rows: Tensor) -> Tensor:
        images = torch.empty(len(rows), *self.shape)
        count = max(1, _READ // math.prod(self.shape))
        for some, out in zip(rows.split(count), images.split(count)):
            out.copy_(self.normalization.encode(self._file.read(some).float() / 255))
        return images

    def replace(self, **changes: Any) -> StoredImages:
        """A copy with some of its parts exchanged; this set is left as it is.

        Args:
            changes: labels, num_classes (which then counts as given), normalization, columns, info or classes_given.

        Raises:
            TypeError, ValueError: as the class does; or an argument that it does not have.
        """
        kept = {
            "labels": self.labels,
            "num_classes": self.num_classes,
            "normalization": self.normalization,
            "columns": self.columns,
            "info": self.info,
            "classes_given": True if "num_classes" in changes else self.classes_given,
        }
        if unknown := sorted(set(changes) - set(kept)):
            raise TypeError(
                f"replace takes {', '.join(kept)}, got {', '.join(unknown)}; the pictures stay in their file"
            )
        return StoredImages(self._file, self._rows, **{**kept, **changes})

    @property
    def images(self) -> Tensor:
        """There are none in memory.

        Raises:
            AttributeError: always; says how to read a part.
        """
        raise AttributeError(f"the images of {self.read_hint('this set')}")

    @property
    def digests(self) -> Tensor:
        """The hash of each picture's bytes, uint8 [N, 16]: what tells sets apart without reading them."""
        return self._file.digests[self._rows]

    @property
    def path(self) -> Path:
        """The file that the pictures lie in."""
        return self._file.path

    @property
    def shape(self) -> tuple[int, int, int]:
        """Channels, height and width (C, H, W) of every picture."""
        return self._file.shape

    @property
    def bytes(self) -> int:
        """How much memory all of it takes once it is read."""
        return 4 * len(self) * math.prod(self.shape)

    @property
    def mean(self) -> tuple[float, ...]:
        """The normalisation's mean per channel, in pixel units."""
        return self.normalization.mean

    @property
    def std(self) -> tuple[float, ...]:
        """The normalisation's standard deviation per channel, in pixel units."""
        return self.normalization.std

    def counts(self) -> Tensor:
        """How many images each class has, int64 [K]; see `LabeledImages.counts`."""
        return class_counts(self.labels, self.num_classes)

    def __repr__(self) -> str:
        c, h, w = self.shape
        kind = f"rows of {self.num_classes}" if self.labels.ndim == 2 else f"{self.num_classes} classes"
        told = "".join(f"; {k}={self.info[k]}" for k in ("dataset", "split", "client") if k in self.info)
        file = os.fspath(self.path)
        return f"StoredImages({len(self)} images {c}x{h}x{w}; {kind}; {self.normalization}{told}; in {file})"
