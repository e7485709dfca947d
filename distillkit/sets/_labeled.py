"""`LabeledImages`, a small image set with labels, normalization and provenance."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias, overload

import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Subset

from distillkit import _sanity_checks
from distillkit._utils import check, conversion
from distillkit._utils.display import as_html, sample_rows, tile
from distillkit._utils.files import read_tensors, write_tensors
from distillkit.normalization import IDENTITY, ZCA, Normalization
from distillkit.sets._export import read_npz, read_picture_folder, write_npz, write_picture_folder
from distillkit.sets._validation import (
    as_index,
    checked_class_names,
    checked_columns,
    checked_images,
    checked_info,
    checked_normalization,
    class_counts,
    class_of_rows,
)

__all__ = [
    "PARAMETRIZATIONS",
    "LabeledImages",
    "Labels",
    "require_consistent",
    "resolve_subset",
    "set_from_arrays",
    "set_from_source",
]

Labels: TypeAlias = Tensor | NDArray[Any] | Sequence[int]
"""Class indices [N] or rows [N, K]."""

_FORMAT = "distillkit.LabeledImages/1"
_ARGUMENTS = ("images", "labels", "num_classes", "normalization", "columns", "info", "classes_given", "class_names")
_REPR_KEYS = ("dataset", "split", "client", "method", "publishes", "init", "ipc", "steps", "iterations", "epsilon")

PARAMETRIZATIONS: dict[str, Callable[..., LabeledImages]] = {}
"""Functions that decode stored images, by the name of the fact in a file that calls for them; see `sets.tiles`."""


class LabeledImages:
    """Small image set with its labels, classes, normalization and provenance.

    The set unpacks as `images, labels` and can be passed to `TensorDataset(*s)`. An integer index returns the pair
    `(image, label)`, so the set is also a map-style dataset for `DataLoader`; a slice, mask or index tensor returns a
    `LabeledImages`. A set without images is allowed if `num_classes` is given, because a client may have no data.

    Args:
        images: float [N, C, H, W] in the normalized space; a NumPy array becomes float32.
        labels: class indices int [N], or rows float [N, K] (soft or multi-label); a tensor, an array or a list.
        num_classes: number of classes, K. Default: the largest label + 1, or the width of the rows. Pass it if classes
            may be absent, and wherever privacy matters: if K is derived from labels, it reveals whether the last class
            occurs.
        normalization: normalization that was applied to pixels in [0, 1]. Default: none; the images are pixels in [0,
            1].
        columns: further data of each image, name -> tensor with N rows (a teacher's logits, a client's index).
        info: provenance, JSON values only (method, steps, seed, ...). It is saved with the set; the repr shows the most
            important entries.
        classes_given: whether K is known independently of these labels. Default: whether `num_classes` is given or
            labels are rows. Sets derived from this one keep the flag; private components reject a K that was derived
            from labels.
        class_names: names of the K classes in label order, which also give K. Default: none. Saved and exported files,
            figures and tables show them; messages of federated methods do not contain them.

    Raises:
        TypeError, ValueError: an invalid argument, which is named.
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
        class_names: Sequence[str] = (),
    ) -> None:
        space = normalization or IDENTITY
        self._assign(images, labels, num_classes, space, columns, info, classes_given, class_names)
        _sanity_checks.check_images(self.images, normalization)
        if not self.classes_given:
            _sanity_checks.check_labels(self.labels)

    def _assign(
        self,
        images: Tensor | NDArray[Any],
        labels: Labels,
        num_classes: int | None = None,
        normalization: Normalization = IDENTITY,
        columns: Mapping[str, Tensor] | None = None,
        info: Mapping[str, Any] | None = None,
        classes_given: bool | None = None,
        class_names: Sequence[str] = (),
    ) -> None:
        self.images: Tensor
        self.labels: Tensor
        names = checked_class_names(class_names)
        num_classes = len(names) or None if num_classes is None else num_classes
        self.images, self.labels, self.num_classes = checked_images(images, labels, num_classes)
        self.class_names: tuple[str, ...] = checked_class_names(names, self.num_classes)
        known = num_classes is not None or self.labels.ndim == 2
        self.classes_given = known if classes_given is None else check.boolean(classes_given, "classes_given")
        self.normalization = checked_normalization(normalization, self.images.shape[1])
        self.columns: dict[str, Tensor] = checked_columns(columns or {}, len(self.images))
        self.info: dict[str, Any] = checked_info(info or {})

    @staticmethod
    def _unchecked(**parts: Any) -> LabeledImages:
        """Create a set without sanity checks, from parts of another set or from checked pixels."""
        made = object.__new__(LabeledImages)
        made._assign(**parts)
        return made

    @staticmethod
    def from_pixels(
        pixels: Tensor | NDArray[Any], labels: Labels, *, normalization: Normalization = IDENTITY, **options: Any
    ) -> LabeledImages:
        """Create a set from pixels and normalize them. Use it for images that are not normalized yet.

        Args:
            pixels: float [N, C, H, W] in [0, 1], or uint8 in 0..255.
            labels: class indices [N] or rows [N, K], as for the class.
            normalization: normalization to apply. Default: none, the images stay pixels.
            options: the arguments num_classes, columns, info, classes_given and class_names of the class.

        Raises:
            TypeError, ValueError: as for the class; also floats outside [0, 1] by more than 0.001.
        """
        given: Any = conversion.as_tensor(pixels, "pixels")
        if isinstance(given, Tensor) and given.dtype == torch.uint8:
            given = given.float() / 255
        if not isinstance(given, Tensor) or given.ndim != 4 or len(given):
            check.batch_of_images(given, "pixels")
            low, high = (float(v) for v in given.detach().aminmax())
            if low < -0.001 or high > 1.001:
                raise ValueError(
                    f"pixels must be in [0, 1], got {low:.4g} to {high:.4g}; divide 0..255 by 255, or pass "
                    "normalized images to LabeledImages(images, labels, normalization=...)"
                )
        _sanity_checks.check_images(given, None)
        made = LabeledImages._unchecked(
            images=normalization.encode(given), labels=labels, normalization=normalization, **options
        )
        if not made.classes_given:
            _sanity_checks.check_labels(made.labels)
        return made

    @staticmethod
    def from_dataset(
        dataset: Dataset[Any] | DataLoader[Any],
        *,
        num_classes: int | None = None,
        normalization: Normalization | None = None,
        progress: bool = True,
    ) -> LabeledImages:
        """Read a PyTorch dataset of (image, label) pairs into memory once.

        Random transforms of the dataset are applied only once. Use a dataset without them, and pass `augment=` to the
        component that trains on the set.

        Args:
            dataset: see `as_set`.
            num_classes: number of classes, K. Default: the number of the dataset's class names (`classes`), which the
                set keeps, else as for the class.
            normalization: normalization that the dataset's transform applies after `ToTensor`. Default: none, pixels in
                [0, 1]. Items that are uint8 or PIL images are pixels and are normalized here.
            progress: whether long reading shows a progress bar.

        Raises:
            TypeError, ValueError: see `as_set`.
        """
        conversion.require_in_memory(dataset, "dataset")
        if not conversion.is_dataset(dataset):
            raise TypeError(f"dataset must be a torch.utils.data.Dataset or DataLoader, got {type(dataset).__name__}")
        whole = resolve_subset(dataset)
        if isinstance(whole, LabeledImages):
            return require_consistent(whole, "dataset", num_classes, normalization)
        return set_from_source(dataset, "dataset", num_classes, normalization, progress=progress)

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
        index = as_index(index)
        if isinstance(index, Tensor) and index.ndim == 0:
            return self.images[int(index)], self.labels[int(index)]
        columns = {name: column[index] for name, column in self.columns.items()}
        return self.replace(images=self.images[index], labels=self.labels[index], columns=columns)

    def replace(self, **changes: Any) -> LabeledImages:
        """Return a copy with some parts replaced.

        Args:
            changes: constructor arguments by name. If `num_classes` is among them, it counts as given
                (`classes_given`), and class names are dropped if the number differs or the labels are replaced, too.

        Raises:
            TypeError, ValueError: as for the class; or an unknown argument.
        """
        kept = {name: getattr(self, name) for name in _ARGUMENTS}
        if "num_classes" in changes:
            kept["classes_given"] = True
            same = changes["num_classes"] == self.num_classes and "labels" not in changes
            kept["class_names"] = self.class_names if same else ()
        if unknown := sorted(set(changes) - set(kept)):
            raise TypeError(f"replace takes {', '.join(kept)}, got {', '.join(unknown)}")
        return LabeledImages._unchecked(**{**kept, **changes})

    @property
    def shape(self) -> tuple[int, int, int]:
        """Channels, height and width (C, H, W) of every image."""
        _, c, h, w = self.images.shape
        return c, h, w

    @property
    def mean(self) -> tuple[float, ...]:
        """Mean of the normalization per channel, in pixel units."""
        return self.normalization.mean

    @property
    def std(self) -> tuple[float, ...]:
        """Standard deviation of the normalization per channel, in pixel units."""
        return self.normalization.std

    def counts(self) -> Tensor:
        """Return the number of images of each class, int64 [K].

        For label rows (multi-label), return the number of entries above one half in each column.
        """
        return class_counts(self.labels, self.num_classes)

    def pixels(self) -> Tensor:
        """Return the images as pixels float [N, C, H, W], clamped to [0, 1], to show or export them."""
        return self.normalization.decode(self.images).clamp(0, 1)

    def renormalize(self, normalization: Normalization) -> LabeledImages:
        """Return the same images in another normalization, for use with a set that has this normalization.

        Args:
            normalization: new normalization. Nothing is clamped, so converting back returns the same images up to
                rounding.
        """
        images = normalization.encode(self.normalization.decode(self.images))
        return self.replace(images=images, normalization=normalization)

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> LabeledImages:
        """Return this set on another device or in another precision, like `Tensor.to`.

        Args:
            device: device of images, labels and columns. Default: unchanged.
            dtype: dtype of images and label rows; class indices and columns keep their dtype. Default: unchanged.
        """
        labels = self.labels.to(device, dtype) if self.labels.ndim == 2 else self.labels.to(device)
        columns = {name: column.to(device) for name, column in self.columns.items()}
        return self.replace(images=self.images.to(device, dtype), labels=labels, columns=columns)

    def require_compatible(self, other: LabeledImages, *, names: tuple[str, str] | None = None) -> None:
        """Refuse a set with another normalization, image shape or class count.

        Components that join two sets, or train on one and test on the other, call this first.

        Args:
            other: set to compare with this one.
            names: names of this set and of the other set in error messages.

        Raises:
            ValueError: the sets differ; the message explains how to convert one of them.
        """
        a, b = names or ("a", "b")
        both = f"{a} and {b}" if names else "the sets"
        if self.normalization != other.normalization:
            raise ValueError(
                f"{both} have different normalizations: {self.normalization} and {other.normalization}; "
                f"convert one with `{b}.renormalize({a}.normalization)`"
            )
        if self.shape != other.shape:
            raise ValueError(
                f"{both} have images of different shapes: {self.shape} and {other.shape}; resize the pixels of one "
                "and rebuild it with `LabeledImages.from_pixels`"
            )
        if self.num_classes != other.num_classes:
            raise ValueError(
                f"{both} have different class counts: {self.num_classes} and {other.num_classes}; if the classes are "
                f"the same, use `{b}.replace(num_classes={a}.num_classes)`"
            )
        if self.class_names != other.class_names and sorted(self.class_names) == sorted(other.class_names):
            raise ValueError(
                f"{both} have the same classes in another order: {', '.join(self.class_names)} and "
                f"{', '.join(other.class_names)}; change the labels of one of them"
            )

    @staticmethod
    def concatenate(sets: Sequence[LabeledImages]) -> LabeledImages:
        """Join sets in the given order, for example the sets that clients sent.

        Args:
            sets: at least one set, all with the same normalization, shape, classes, columns and kind of labels. The
                result has the `info` of the first. It has class names if all sets that name their classes agree.

        Raises:
            ValueError: no sets, incompatible sets (the message explains how to convert one), or different columns.
        """
        if not sets:
            raise ValueError("sets must hold at least one set, got none")
        first = sets[0]
        for other in sets[1:]:
            first.require_compatible(other)
            if set(other.columns) != set(first.columns):
                raise ValueError(
                    f"the sets have different columns: {sorted(first.columns)} and {sorted(other.columns)}; "
                    "keep the common ones with `b.replace(columns={...})`"
                )
            if other.labels.ndim != first.labels.ndim:
                raise ValueError(
                    "the sets have different labels: class indices and rows; convert the indices to rows with "
                    "`a.replace(labels=torch.nn.functional.one_hot(a.labels, a.num_classes).float())`"
                )
        columns = {name: torch.cat([s.columns[name] for s in sets]) for name in first.columns}
        labels, images = torch.cat([s.labels for s in sets]), torch.cat([s.images for s in sets])
        given = all(s.classes_given for s in sets)
        names = {s.class_names for s in sets if s.class_names}
        whole = {"images": images, "labels": labels, "columns": columns, "classes_given": given}
        return first.replace(**whole, class_names=names.pop() if len(names) == 1 else ())

    def grid(self, columns: int | None = None, padding: int = 2) -> Tensor:
        """Return one image that shows all images row by row on white, as pixels float [C, H', W'] in [0, 1].

        Args:
            columns: number of images per row. Default: 10, or all images if there are fewer.
            padding: number of pixels between images.

        Raises:
            ValueError: an empty set, or an invalid number of columns or pixels.
        """
        if not len(self):
            raise ValueError("an empty set has no grid")
        columns = min(len(self), 10) if columns is None else check.positive_int(columns, "columns")
        check.positive_int(padding, "padding", least=0)
        return tile(self.pixels().detach().cpu().split(columns), columns, padding)

    def parts(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Split the set into named tensors and JSON values, for a file or a message. `from_parts` is the inverse.

        The tensors are "images", "labels", "column.<name>" for each column, and "zca.center", "zca.matrix" and
        "zca.inverse" if the images are whitened.
        """
        tensors = {"images": self.images, "labels": self.labels}
        tensors |= {f"column.{name}": column for name, column in self.columns.items()}
        zca = self.normalization.zca
        if zca is not None:
            tensors |= {"zca.center": zca.center, "zca.matrix": zca.matrix, "zca.inverse": zca.inverse}
        facts: dict[str, Any] = {"mean": self.mean, "std": self.std, "measured": self.normalization.measured}
        facts |= {"num_classes": self.num_classes, "given": self.classes_given, "info": self.info}
        return tensors, facts | ({"class_names": list(self.class_names)} if self.class_names else {})

    @staticmethod
    def from_parts(tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> LabeledImages:
        """Create a set from the result of `parts`.

        Args:
            tensors, facts: result of `parts`. If an older file does not state whether the normalization was measured or
                the class count given, the normalization counts as measured and the class count as derived from the
                labels. Private components reject both.

        Raises:
            KeyError, TypeError, ValueError: missing or inconsistent parts.
        """
        zca = None
        if "zca.matrix" in tensors:
            zca = ZCA(tensors["zca.center"], tensors["zca.matrix"], tensors["zca.inverse"])
        options: dict[str, Any] = {
            "num_classes": facts["num_classes"],
            "normalization": Normalization(facts["mean"], facts["std"], zca, measured=facts.get("measured", True)),
            "columns": {k.removeprefix("column."): v for k, v in tensors.items() if k.startswith("column.")},
            "info": facts["info"],
            "classes_given": facts.get("given", False),
            "class_names": facts.get("class_names", ()),
        }
        for name, decoded in PARAMETRIZATIONS.items():
            if name in facts:
                return decoded(tensors["images"], tensors["labels"], facts[name], **options)
        return LabeledImages._unchecked(images=tensors["images"], labels=tensors["labels"], **options)

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write images, labels, columns, normalization and info to one `.safetensors` file, which `load` reads.

        Args:
            path: path of the file. The file is replaced atomically, so readers see the old or the new file.

        Returns:
            The path.

        Raises:
            OSError: the folder is missing, unwritable or full. An existing file is left unchanged.
        """
        tensors, facts = self.parts()
        return write_tensors(path, tensors, {"format": _FORMAT, "set": json.dumps(facts)})

    def export(self, path: str | os.PathLike[str]) -> Path:
        """Write the set for programs without distillkit: an `.npz`, or a folder of PNG pictures.

        An `.npz` loses nothing. Its arrays are named as in `parts`; `mean`, `std` and `class_names` are arrays, too.
        Images are in the set's normalization: `images * std + mean` gives pixels.

        A folder has one sub-folder per class, whose alphabetical order is the class order, so that torchvision's
        `ImageFolder` reads it. An image with a label row is in the folder of the class in its column `class`, or else
        of its largest entry. `labels.csv` has the file and label of each picture, with label rows in full, and
        `set.json` the rest. Pixels are rounded to 8 bits (an error of at most 1/510), and clipped to [0, 1]. Columns
        and whitening are left out. A warning names what is clipped or left out.

        Args:
            path: path that ends in `.npz`, or of a folder, which must be empty or not exist.

        Returns:
            The path; `load` reads it.

        Raises:
            FileExistsError: the folder has files.
            ValueError: a path with another suffix, or PNG pictures of neither 1 nor 3 channels.
        """
        path, (tensors, facts) = Path(path), LabeledImages.parts(self)  # decoded images, if the set is tiled
        if path.suffix == ".npz":
            write_npz(path, tensors, facts)
        elif path.suffix and not path.is_dir():
            raise ValueError(f"path must end in .npz, or be a folder without suffix, got {path.name!r}; see also save")
        else:
            lost = [f"the column {name!r}" for name in self.columns]
            if self.normalization.zca is not None:
                lost.append("the whitening")
                facts |= {"mean": IDENTITY.mean, "std": IDENTITY.std}
            pixels, classes = self.normalization.decode(self.images), class_of_rows(self.labels, self.columns)
            write_picture_folder(path, pixels, self.labels, classes, facts, lost)
        return path

    @staticmethod
    def load(path: str | os.PathLike[str]) -> LabeledImages:
        """Read a set that `save` or `export` wrote, with its normalization.

        Args:
            path: path of the `.safetensors` or `.npz` file, or of the exported folder.

        Raises:
            FileNotFoundError: the file does not exist.
            ValueError: the file is damaged or not a saved set.
        """
        if (path := Path(path)).is_dir() or path.suffix == ".npz":
            tensors, facts = read_picture_folder(path) if path.is_dir() else read_npz(path)
        else:
            tensors, strings = read_tensors(path, kind=_FORMAT, what="a saved LabeledImages")
            facts = {"set": strings.get("set", "")}
        try:
            return LabeledImages.from_parts(tensors, json.loads(facts["set"]) if "set" in facts else facts)
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
        told = [f"{k}={v}" for k, v in self.info.items() if k in _REPR_KEYS and isinstance(v, str | int | float)]
        if len(self.info) > len(told):
            told.append(f"{len(self.info)} facts in info")
        if told:
            parts.append(", ".join(told))
        return f"LabeledImages({'; '.join(parts)})"

    def _repr_html_(self) -> str:
        classes = self.labels if self.labels.ndim == 1 else self.labels.argmax(1)
        return as_html(repr(self), [self[rows].pixels() for rows in sample_rows(classes)], len(classes.unique()))


def resolve_subset(images: Any) -> Any:
    """Return a `torch.utils.data.Subset` of a `LabeledImages` as a `LabeledImages`.

    If the subset were read item by item, its normalization, class count and columns would be lost.

    Args:
        images: subset of a set, possibly nested; other values are returned unchanged.
    """
    if not isinstance(images, Subset):
        return images
    whole = resolve_subset(images.dataset)
    return whole[torch.as_tensor(images.indices)] if isinstance(whole, LabeledImages) else images


def require_consistent(
    data: LabeledImages, name: str, num_classes: int | None, normalization: Normalization | None
) -> LabeledImages:
    """Check that a class count and a normalization passed with a set do not contradict the set, and return the set.

    Args:
        data: set to check.
        name: name of the argument in error messages.
        num_classes: number of classes passed by the caller, if any. It replaces a number that the set derived from its
            labels.
        normalization: normalization passed by the caller, if any.

    Raises:
        ValueError: the values contradict the set, or the images were overwritten and are no longer finite.
    """
    if num_classes is not None and not data.classes_given:
        data = data.replace(num_classes=num_classes)
    if num_classes not in (None, data.num_classes):
        raise ValueError(
            f"num_classes={num_classes}, but the set has {data.num_classes}; omit it, or use "
            "`data.replace(num_classes=...)`"
        )
    if normalization not in (None, data.normalization):
        raise ValueError(
            f"normalization is {normalization}, but the set's is {data.normalization}; omit it, or convert the set "
            "with `data.renormalize(normalization)`"
        )
    if not math.isfinite(float(data.images.detach().sum())):
        check.batch_of_images(data.images, name)
    return data


def set_from_source(
    source: Any, name: str, num_classes: int | None, normalization: Normalization | None, *, progress: bool
) -> LabeledImages:
    """Read a dataset, a loader or a pair into a set.

    Args:
        source: source of images and labels; see `as_set`.
        name: name of the argument in error messages.
        num_classes: number of classes, K. Default: the number of class names of the dataset, if it has any.
        normalization: see `as_set`.
        progress: whether long reading shows a progress bar.
    """
    names = conversion.class_names(source)
    num_classes = len(names) or None if num_classes is None else num_classes
    images, labels = conversion.read(source, name, progress=progress)
    found = set_from_arrays(images, labels, name, num_classes, normalization)
    return found.replace(class_names=names) if len(names) == found.num_classes else found


def set_from_arrays(
    images: Any, labels: Any, name: str, num_classes: int | None, normalization: Normalization | None
) -> LabeledImages:
    """Create a set from arrays or tensors.

    Args:
        images: images [N, C, H, W]; uint8 values are pixels in 0..255 and are normalized here, floats are already
            normalized.
        labels: class indices [N] or rows [N, K].
        name: name of the images' argument in error messages.
        num_classes, normalization: see `as_set`.
    """
    images, labels = conversion.as_tensor(images, name), conversion.as_tensor(labels, "labels", lists=True)
    if isinstance(images, Tensor) and images.dtype == torch.uint8:
        normalization = IDENTITY if normalization is None else normalization
        return LabeledImages.from_pixels(images, labels, num_classes=num_classes, normalization=normalization)
    return LabeledImages(images, labels, num_classes=num_classes, normalization=normalization)
