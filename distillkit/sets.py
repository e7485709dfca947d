"""`LabeledImages`: a small image set that knows what its pixels and labels mean."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, overload

import torch
from torch import Tensor

from distillkit import check
from distillkit.normalization import IDENTITY, ZCA, Normalization

__all__ = ["LabeledImages", "as_set"]

_FORMAT = "distillkit.LabeledImages/1"


class LabeledImages:
    """Images, labels, and what they mean. Unpacks as `images, labels`; feeds `TensorDataset(*s)`.

    Args:
        images: float [N, C, H, W] in the normalised space.
        labels: class indices int [N], or rows float [N, K] (soft or multi-label).
        num_classes: K. Default: the largest label + 1, or the width of the rows. Say it when classes may be absent.
        normalization: how `images` came from pixels in [0, 1]. Default: they are such pixels.
        columns: what else belongs to each image, name -> tensor with N rows (a teacher's logits, a client's number).
        info: provenance, JSON values only (method, steps, seed, ...); saved with the set and shown in its repr.

    A set of zero images is allowed (a client may own nothing) if `num_classes` is given.
    An integer index gives the pair `(image, label)`, so a set is also a map-style dataset for `DataLoader`; a slice,
    mask or index tensor gives a `LabeledImages`.

    Raises:
        TypeError, ValueError: what is wrong with which argument.
    """

    def __init__(
        self,
        images: Tensor,
        labels: Tensor,
        *,
        num_classes: int | None = None,
        normalization: Normalization = IDENTITY,
        columns: Mapping[str, Tensor] | None = None,
        info: Mapping[str, Any] | None = None,
    ) -> None:
        empty = isinstance(images, Tensor) and images.ndim == 4 and len(images) == 0 and images.is_floating_point()
        self.images = images if empty else check.batch_of_images(images)
        n = len(images)
        if isinstance(labels, Tensor) and labels.ndim == 2 and labels.is_floating_point():
            if len(labels) != n or not bool(torch.isfinite(labels).all()):
                raise ValueError(f"labels must be {n} finite rows, one an image, got shape {list(labels.shape)}")
            if num_classes is not None and labels.shape[1] != num_classes:
                raise ValueError(f"labels have {labels.shape[1]} columns, but num_classes={num_classes}")
            self.labels, self.num_classes = labels, labels.shape[1]
        else:
            if num_classes is None and n == 0:
                raise ValueError("num_classes must be given for an empty set")
            self.labels = check.class_labels(labels, n, num_classes)
            self.num_classes = int(self.labels.max()) + 1 if num_classes is None else num_classes
        check.positive_int(self.num_classes, "num_classes")
        if len(normalization.mean) not in (1, images.shape[1]):
            raise ValueError(f"images have {images.shape[1]} channels, normalization has {len(normalization.mean)}")
        self.normalization = normalization
        self.columns = dict(columns or {})
        for name, column in self.columns.items():
            if not isinstance(column, Tensor):
                raise TypeError(f"column {name!r} must be a torch.Tensor, got {type(column).__name__}")
            if column.ndim == 0 or len(column) != n:
                raise ValueError(f"column {name!r} must have {n} rows, one an image, got shape {list(column.shape)}")
        try:
            self.info: dict[str, Any] = json.loads(json.dumps(dict(info or {})))
        except (TypeError, ValueError) as error:
            raise TypeError(f"info must be a mapping of JSON values: {error}") from error

    @classmethod
    def from_pixels(
        cls, pixels: Tensor, labels: Tensor, *, normalization: Normalization = IDENTITY, **options: Any
    ) -> LabeledImages:
        """Build a set from `pixels` in [0, 1], float, or uint8 in 0..255, [N, C, H, W]; `options` as the class's.

        Raises:
            TypeError, ValueError: as the class does; also floats outside [0, 1] (by more than 0.001).
        """
        if isinstance(pixels, Tensor) and pixels.dtype == torch.uint8:
            pixels = pixels.float() / 255
        if not isinstance(pixels, Tensor) or pixels.ndim != 4 or len(pixels):
            check.batch_of_images(pixels, "pixels")
            low, high = (float(v) for v in pixels.detach().aminmax())
            if low < -0.001 or high > 1.001:
                raise ValueError(
                    f"pixels must lie in [0, 1], got {low:.4g} to {high:.4g}; divide 0..255 by 255, or give "
                    "normalized images to LabeledImages(images, labels, normalization=...)"
                )
        return cls(normalization.encode(pixels), labels, normalization=normalization, **options)

    def __len__(self) -> int:
        return len(self.images)

    def __iter__(self) -> Iterator[Tensor]:
        yield self.images
        yield self.labels

    @overload
    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]: ...
    @overload
    def __getitem__(self, index: slice | Tensor | Sequence[int]) -> LabeledImages: ...
    def __getitem__(self, index: int | slice | Tensor | Sequence[int]) -> tuple[Tensor, Tensor] | LabeledImages:
        if not isinstance(index, slice | Tensor):
            index = torch.as_tensor(index)
            index = index if len(index.flatten()) else index.long()
        if isinstance(index, Tensor) and index.ndim == 0:
            return self.images[int(index)], self.labels[int(index)]
        columns = {name: column[index] for name, column in self.columns.items()}
        return self.replace(images=self.images[index], labels=self.labels[index], columns=columns)

    def replace(self, **changes: Any) -> LabeledImages:
        """Return a set with some of the constructor's arguments changed."""
        kept = {
            "images": self.images,
            "labels": self.labels,
            "num_classes": self.num_classes,
            "normalization": self.normalization,
            "columns": self.columns,
            "info": self.info,
        }
        return LabeledImages(**{**kept, **changes})

    @property
    def shape(self) -> tuple[int, int, int]:
        """(C, H, W) of one image."""
        _, c, h, w = self.images.shape
        return c, h, w

    @property
    def mean(self) -> tuple[float, ...]:
        """The normalisation's mean per channel, in pixel units."""
        return self.normalization.mean

    @property
    def std(self) -> tuple[float, ...]:
        """The normalisation's standard deviation per channel, in pixel units."""
        return self.normalization.std

    def counts(self) -> Tensor:
        """Images per class, int64 [K]; for rows, the sum of each column above one half (multi-label)."""
        if self.labels.ndim == 2:
            return (self.labels > 0.5).sum(0)
        return torch.bincount(self.labels, minlength=self.num_classes)

    def pixels(self) -> Tensor:
        """The images in pixel units, clamped to [0, 1]."""
        return self.normalization.decode(self.images).clamp(0, 1)

    def renormalized(self, normalization: Normalization) -> LabeledImages:
        """The same pictures in another normalisation (nothing is clamped)."""
        images = normalization.encode(self.normalization.decode(self.images))
        return self.replace(images=images, normalization=normalization)

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> LabeledImages:
        """Move everything to a device, and floating images (and label rows) to a dtype."""
        labels = self.labels.to(device, dtype) if self.labels.ndim == 2 else self.labels.to(device)
        columns = {name: column.to(device) for name, column in self.columns.items()}
        return self.replace(images=self.images.to(device, dtype), labels=labels, columns=columns)

    def require_same_space(self, other: LabeledImages) -> None:
        """Raise a ValueError that says how to convert if `other` has another normalisation, shape or class count."""
        if self.normalization != other.normalization:
            raise ValueError(
                f"the sets have different normalizations: {self.normalization} and {other.normalization}; "
                "convert one with `b.renormalized(a.normalization)`"
            )
        if self.shape != other.shape:
            raise ValueError(
                f"the sets have images of different shapes: {self.shape} and {other.shape}; resize the pixels of one "
                "and build it again with `LabeledImages.from_pixels`"
            )
        if self.num_classes != other.num_classes:
            raise ValueError(
                f"the sets have different class counts: {self.num_classes} and {other.num_classes}; if the classes are "
                "the same ones, say so with `b.replace(num_classes=a.num_classes)`"
            )

    @staticmethod
    def concatenate(sets: Sequence[LabeledImages]) -> LabeledImages:
        """Join sets of the same normalisation, shape and classes; columns that all have are kept, others refused.

        Raises:
            ValueError: no sets, sets of different spaces (the message says how to convert), or differing columns.
        """
        if not sets:
            raise ValueError("sets must hold at least one set, got none")
        first = sets[0]
        for other in sets[1:]:
            first.require_same_space(other)
            if set(other.columns) != set(first.columns):
                raise ValueError(
                    f"the sets have different columns: {sorted(first.columns)} and {sorted(other.columns)}; "
                    "keep the common ones with `b.replace(columns={...})`"
                )
            if other.labels.ndim != first.labels.ndim:
                raise ValueError(
                    "the sets have different labels: class indices and rows; make rows of the indices with "
                    "`a.replace(labels=torch.nn.functional.one_hot(a.labels, a.num_classes).float())`"
                )
        columns = {name: torch.cat([s.columns[name] for s in sets]) for name in first.columns}
        labels, images = torch.cat([s.labels for s in sets]), torch.cat([s.images for s in sets])
        return first.replace(images=images, labels=labels, columns=columns)

    def grid(self, columns: int | None = None, padding: int = 2) -> Tensor:
        """One picture of all images, pixel units float [C, H', W'] in [0, 1], row by row, white between them.

        Args:
            columns: images a row; default 10, or fewer if there are fewer.
            padding: pixels between images.
        """
        if not len(self):
            raise ValueError("an empty set has no grid")
        columns = min(len(self), 10) if columns is None else check.positive_int(columns, "columns")
        check.positive_int(padding, "padding", least=0)
        pixels = self.pixels().detach().cpu()
        rows = -(-len(pixels) // columns)
        c, h, w = self.shape
        sheet = pixels.new_ones(c, rows * (h + padding) + padding, columns * (w + padding) + padding)
        for i, image in enumerate(pixels):
            top, left = padding + (i // columns) * (h + padding), padding + (i % columns) * (w + padding)
            sheet[:, top : top + h, left : left + w] = image
        return sheet

    def parts(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """The set as named tensors and JSON values, for files and messages; `from_parts` puts it together again."""
        tensors = {"images": self.images, "labels": self.labels}
        tensors |= {f"column.{name}": column for name, column in self.columns.items()}
        zca = self.normalization.zca
        if zca is not None:
            tensors |= {"zca.center": zca.center, "zca.matrix": zca.matrix, "zca.inverse": zca.inverse}
        return tensors, {"mean": self.mean, "std": self.std, "num_classes": self.num_classes, "info": self.info}

    @staticmethod
    def from_parts(tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> LabeledImages:
        """The inverse of `parts`."""
        zca = None
        if "zca.matrix" in tensors:
            zca = ZCA(tensors["zca.center"], tensors["zca.matrix"], tensors["zca.inverse"])
        return LabeledImages(
            tensors["images"],
            tensors["labels"],
            num_classes=facts["num_classes"],
            normalization=Normalization(facts["mean"], facts["std"], zca),
            columns={k.removeprefix("column."): v for k, v in tensors.items() if k.startswith("column.")},
            info=facts["info"],
        )

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write images, labels, columns and meaning to one `.safetensors` file, atomically; return its path.

        Raises:
            OSError: the folder is missing, unwritable or full; a file that was there before is left as it was.
        """
        from safetensors import SafetensorError
        from safetensors.torch import save_file

        path = Path(path)
        tensors, meta = self.parts()
        temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        try:
            contiguous = {k: v.detach().cpu().contiguous().clone() for k, v in tensors.items()}
            save_file(contiguous, temporary, metadata={"format": _FORMAT, "set": json.dumps(meta)})
            os.replace(temporary, path)
        except SafetensorError as error:
            raise OSError(f"cannot write {path}: {error}") from error
        finally:
            temporary.unlink(missing_ok=True)
        return path

    @staticmethod
    def load(path: str | os.PathLike[str]) -> LabeledImages:
        """Read a set that `save` wrote.

        Raises:
            FileNotFoundError: there is no such file.
            ValueError: the file is damaged, or is not a saved set.
        """
        from safetensors import SafetensorError, safe_open

        if not Path(path).is_file():
            raise FileNotFoundError(f"no set at {path}")
        try:
            with safe_open(path, framework="pt") as file:
                meta = file.metadata() or {}
                tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
        except SafetensorError as error:
            raise ValueError(f"{path} is damaged or not a safetensors file: {error}") from error
        if meta.get("format") != _FORMAT:
            raise ValueError(f"{path} is not a saved LabeledImages (format {meta.get('format')!r}, want {_FORMAT!r})")
        try:
            return LabeledImages.from_parts(tensors, json.loads(meta["set"]))
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path} is damaged: {error!r}") from error

    def __repr__(self) -> str:
        c, h, w = self.images.shape[1:]
        kind = f"rows of {self.num_classes}" if self.labels.ndim == 2 else f"{self.num_classes} classes"
        if self.labels.ndim == 1 and len(self):
            counts = self.counts()
            low, high = int(counts.min()), int(counts.max())
            kind += f" ({low} each)" if low == high else f" ({low} to {high} each)"
        parts = [f"{len(self)} images {c}x{h}x{w}", kind, str(self.normalization)]
        if self.columns:
            parts.append("columns " + ", ".join(sorted(self.columns)))
        if self.info:
            parts.append(", ".join(f"{k}={v}" for k, v in self.info.items()))
        return f"LabeledImages({'; '.join(parts)})"


def as_set(
    images: Tensor | LabeledImages,
    labels: Tensor | None = None,
    *,
    num_classes: int | None = None,
    normalization: Normalization | None = None,
) -> LabeledImages:
    """Return the set that a component was called with: `(images, labels)` tensors, or a `LabeledImages` alone.

    Raises:
        TypeError, ValueError: labels missing, or given beside a set; a class count or normalisation that
            contradicts the set's.
    """
    if isinstance(images, LabeledImages):
        if labels is not None:
            raise TypeError("labels must be left out when images is a LabeledImages (it has its own)")
        if num_classes not in (None, images.num_classes):
            raise ValueError(f"num_classes={num_classes}, but the set has {images.num_classes}")
        if normalization not in (None, images.normalization):
            raise ValueError(f"normalization is {normalization}, but the set's is {images.normalization}")
        return images
    if labels is None:
        raise TypeError("labels must be given with an images tensor")
    return LabeledImages(images, labels, num_classes=num_classes, normalization=normalization or IDENTITY)
