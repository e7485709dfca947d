"""`LabeledImages`: a small image set that knows what its pixels and labels mean."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, overload

import numpy as np
import torch
from torch import Tensor

from distillkit import check, plausible, sources
from distillkit.normalization import IDENTITY, ZCA, Normalization

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch.utils.data import DataLoader, Dataset

__all__ = ["Images", "LabeledImages", "Labels", "as_set"]

Images: TypeAlias = (
    "LabeledImages | Tensor | NDArray[Any] | Dataset[Any] | DataLoader[Any] | tuple[Any, Any] | list[Any]"
)
"""What every component takes as images: see `as_set`."""

Labels: TypeAlias = "Tensor | NDArray[Any] | Sequence[int]"
"""Class indices [N] or rows [N, K]."""

_FORMAT = "distillkit.LabeledImages/1"
_TOLD = ("dataset", "split", "client", "method", "init", "ipc", "steps", "iterations", "epsilon")


class LabeledImages:
    """Images, labels, and what they mean. Unpacks as `images, labels`; feeds `TensorDataset(*s)`.

    Args:
        images: float [N, C, H, W] in the normalised space; a NumPy array becomes float32.
        labels: class indices int [N], or rows float [N, K] (soft or multi-label); a tensor, an array or a list.
        num_classes: K. Default: the largest label + 1, or the width of the rows. Say it when classes may be absent,
            and wherever privacy matters: a K that is read off the labels tells whether somebody has the last class.
        normalization: how `images` came from pixels in [0, 1]. Default: they are such pixels.
        columns: what else belongs to each image, name -> tensor with N rows (a teacher's logits, a client's number).
        info: provenance, JSON values only (method, steps, seed, ...); saved with the set; the
            most telling are shown in its repr.
        classes_given: whether K is known apart from these labels. Default: whether `num_classes` is given, or labels
            are rows. Sets made of this one remember it; private components refuse a K that was derived.

    A set of zero images is allowed (a client may own nothing) if `num_classes` is given.
    An integer index gives the pair `(image, label)`, so a set is also a map-style dataset for `DataLoader`; a slice,
    mask or index tensor gives a `LabeledImages`.

    Raises:
        TypeError, ValueError: what is wrong with which argument.
    """

    def __init__(
        self,
        images: Tensor | NDArray[Any],
        labels: Labels,
        *,
        num_classes: int | None = None,
        normalization: Normalization | None = None,
        columns: Mapping[str, Tensor] | None = None,
        info: Mapping[str, Any] | None = None,
        classes_given: bool | None = None,
    ) -> None:
        self._fill(images, labels, num_classes, normalization or IDENTITY, columns, info, classes_given)
        plausible.look_at_images(self.images, normalization)
        if not self.classes_given:
            plausible.look_at_labels(self.labels)

    def _fill(
        self,
        images: Tensor | NDArray[Any],
        labels: Labels,
        num_classes: int | None = None,
        normalization: Normalization = IDENTITY,
        columns: Mapping[str, Tensor] | None = None,
        info: Mapping[str, Any] | None = None,
        classes_given: bool | None = None,
    ) -> None:
        given: Any = sources.as_tensor(images, "images")
        marks: Any = sources.as_tensor(labels, "labels", lists=True)
        empty = isinstance(given, Tensor) and given.ndim == 4 and len(given) == 0 and given.is_floating_point()
        self.images: Tensor = given if empty else check.batch_of_images(given)
        self.labels: Tensor
        n = len(given)
        if isinstance(marks, Tensor) and marks.ndim == 2 and marks.is_floating_point():
            if len(marks) != n or not bool(torch.isfinite(marks).all()):
                raise ValueError(f"labels must be {n} finite rows, one an image, got shape {list(marks.shape)}")
            if num_classes is not None and marks.shape[1] != num_classes:
                raise ValueError(f"labels have {marks.shape[1]} columns, but num_classes={num_classes}")
            self.labels, self.num_classes = marks, marks.shape[1]
        else:
            if num_classes is None and n == 0:
                raise ValueError("num_classes must be given for an empty set")
            self.labels = check.class_labels(marks, n, num_classes)
            self.num_classes = int(self.labels.max()) + 1 if num_classes is None else num_classes
        self.num_classes = check.positive_int(self.num_classes, "num_classes")
        known = num_classes is not None or self.labels.ndim == 2
        self.classes_given = known if classes_given is None else bool(classes_given)
        if not isinstance(normalization, Normalization):
            came = type(normalization).__name__
            raise TypeError(f"normalization must be a Normalization(mean, std), got {came}")
        if len(normalization.mean) not in (1, given.shape[1]):
            raise ValueError(f"images have {given.shape[1]} channels, normalization has {len(normalization.mean)}")
        self.normalization = normalization
        self.columns = dict(columns or {})
        for name, column in self.columns.items():
            if not isinstance(column, Tensor):
                raise TypeError(f"column {name!r} must be a torch.Tensor, got {type(column).__name__}")
            if column.ndim == 0 or len(column) != n:
                raise ValueError(f"column {name!r} must have {n} rows, one an image, got shape {list(column.shape)}")
        try:
            self.info: dict[str, Any] = json.loads(json.dumps(dict(info or {}), default=_plain))
        except (TypeError, ValueError) as error:
            raise TypeError(f"info must be a mapping of JSON values: {error}") from error

    @staticmethod
    def _made(**parts: Any) -> LabeledImages:
        """A set whose values need no look, since they came out of another set or of pixels that were looked at."""
        made = object.__new__(LabeledImages)
        made._fill(**parts)
        return made

    @staticmethod
    def from_pixels(
        pixels: Tensor | NDArray[Any],
        labels: Labels,
        *,
        normalization: Normalization = IDENTITY,
        **options: Any,
    ) -> LabeledImages:
        """Build a set from `pixels` in [0, 1], float, or uint8 in 0..255, [N, C, H, W]; `options` as the class's.

        Raises:
            TypeError, ValueError: as the class does; also floats outside [0, 1] (by more than 0.001).
        """
        given: Any = sources.as_tensor(pixels, "pixels")
        if isinstance(given, Tensor) and given.dtype == torch.uint8:
            given = given.float() / 255
        if not isinstance(given, Tensor) or given.ndim != 4 or len(given):
            check.batch_of_images(given, "pixels")
            low, high = (float(v) for v in given.detach().aminmax())
            if low < -0.001 or high > 1.001:
                raise ValueError(
                    f"pixels must lie in [0, 1], got {low:.4g} to {high:.4g}; divide 0..255 by 255, or give "
                    "normalized images to LabeledImages(images, labels, normalization=...)"
                )
        plausible.look_at_images(given, None)
        made = LabeledImages._made(
            images=normalization.encode(given), labels=labels, normalization=normalization, **options
        )
        if not made.classes_given:
            plausible.look_at_labels(made.labels)
        return made

    @staticmethod
    def from_dataset(
        dataset: Dataset[Any] | DataLoader[Any],
        *,
        num_classes: int | None = None,
        normalization: Normalization | None = None,
        progress: bool = True,
    ) -> LabeledImages:
        """Read a PyTorch dataset of (image, label) pairs into memory, once, with a bar if it takes long.

        Whatever random transforms the dataset has are drawn this one time: give it none, and pass `augment=` to what
        trains on the set.

        Args:
            dataset: see `as_set`.
            num_classes: K. Default: the number of the dataset's `classes` if it has names, else as the class's.
            normalization: what the dataset's transform does after `ToTensor`. Default: nothing, pixels in [0, 1].
                Items of uint8 and PIL pictures are pixels, and are normalised here.
            progress: whether long reading shows a bar.

        Raises:
            TypeError, ValueError: see `as_set`.
        """
        if not sources.is_dataset(dataset):
            raise TypeError(f"dataset must be a torch.utils.data.Dataset or DataLoader, got {type(dataset).__name__}")
        return as_set(dataset, num_classes=num_classes, normalization=normalization, name="dataset", progress=progress)

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
        """Return a set with some of the constructor's arguments changed; a `num_classes` among them counts as given."""
        kept = {
            "images": self.images,
            "labels": self.labels,
            "num_classes": self.num_classes,
            "normalization": self.normalization,
            "columns": self.columns,
            "info": self.info,
            "classes_given": True if "num_classes" in changes else self.classes_given,
        }
        if unknown := sorted(set(changes) - set(kept)):
            raise TypeError(f"replace takes {', '.join(kept)}, got {', '.join(unknown)}")
        return LabeledImages._made(**{**kept, **changes})

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
        given = all(s.classes_given for s in sets)
        return first.replace(images=images, labels=labels, columns=columns, classes_given=given)

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
        facts = {"mean": self.mean, "std": self.std, "measured": self.normalization.measured}
        return tensors, facts | {"num_classes": self.num_classes, "given": self.classes_given, "info": self.info}

    @staticmethod
    def from_parts(tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> LabeledImages:
        """The inverse of `parts`; what an older file does not say counts as measured, and derived."""
        zca = None
        if "zca.matrix" in tensors:
            zca = ZCA(tensors["zca.center"], tensors["zca.matrix"], tensors["zca.inverse"])
        return LabeledImages._made(
            images=tensors["images"],
            labels=tensors["labels"],
            num_classes=facts["num_classes"],
            normalization=Normalization(facts["mean"], facts["std"], zca, measured=facts.get("measured", True)),
            columns={k.removeprefix("column."): v for k, v in tensors.items() if k.startswith("column.")},
            info=facts["info"],
            classes_given=facts.get("given", False),
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
        told = [f"{k}={v}" for k, v in self.info.items() if k in _TOLD and isinstance(v, str | int | float)]
        if len(self.info) > len(told):
            told.append(f"{len(self.info)} facts in info")
        if told:
            parts.append(", ".join(told))
        return f"LabeledImages({'; '.join(parts)})"

    def _repr_html_(self) -> str:
        from distillkit.display import as_html, shown

        classes = self.labels if self.labels.ndim == 1 else self.labels.argmax(1)
        return as_html(repr(self), [self[rows].pixels() for rows in shown(classes)], len(classes.unique()))


def _plain(value: Any) -> Any:
    """A NumPy number as Python's, for JSON."""
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"{type(value).__name__} is no JSON value")


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
        TypeError, ValueError: labels missing, or given beside what has its own; a class count or normalisation that
            contradicts the set's; items that are no pairs of an image and a label.
    """
    images = _within_a_set(images)
    if isinstance(images, LabeledImages):
        if labels is not None:
            raise TypeError(f"labels must be left out when {name} is a LabeledImages (it has its own)")
        if num_classes is not None and not images.classes_given:
            images = images.replace(num_classes=num_classes)
        if num_classes not in (None, images.num_classes):
            raise ValueError(f"num_classes={num_classes}, but the set has {images.num_classes}")
        if normalization not in (None, images.normalization):
            raise ValueError(f"normalization is {normalization}, but the set's is {images.normalization}")
        if not math.isfinite(float(images.images.detach().sum())):
            check.batch_of_images(images.images, name)  # somebody wrote into the tensor after the set was made
        return images
    if sources.is_source(images):
        if labels is not None:
            raise TypeError(f"labels must be left out when {name} is a {type(images).__name__} (it has its own)")
        num_classes = sources.class_names(images) if num_classes is None else num_classes
        images, labels = sources.read(images, name, progress=progress)
    elif labels is None:
        raise TypeError(
            f"labels must be given with {name} that have none ({type(images).__name__}); a LabeledImages, a pair "
            "(images, labels), a Dataset and a DataLoader have their own"
        )
    return _from_arrays(images, labels, name, num_classes=num_classes, normalization=normalization)


def _within_a_set(images: Any) -> Any:
    """What a `torch.utils.data.Subset` of a set selects, as a set, whose space a copy item by item would lose."""
    from torch.utils.data import Subset

    if not isinstance(images, Subset):
        return images
    whole = _within_a_set(images.dataset)
    return whole[torch.as_tensor(images.indices)] if isinstance(whole, LabeledImages) else images


def _from_arrays(images: Any, labels: Any, name: str, **options: Any) -> LabeledImages:
    images, labels = sources.as_tensor(images, name), sources.as_tensor(labels, "labels", lists=True)
    if isinstance(images, Tensor) and images.dtype == torch.uint8:
        normalization = options.pop("normalization")
        return LabeledImages.from_pixels(images, labels, normalization=normalization or IDENTITY, **options)
    return LabeledImages(images, labels, **options)
