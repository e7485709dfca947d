"""`LabeledImages`: a small image set in memory, with labels, normalization and provenance."""

from __future__ import annotations

import json
import math
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeAlias, overload

import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import ConcatDataset, DataLoader, Dataset, Subset

from distillkit import _sanity_checks
from distillkit._utils import check, conversion
from distillkit._utils.devices import is_accelerator
from distillkit._utils.display import as_html, sample_rows, tile
from distillkit._utils.files import read_tensors, write_tensors
from distillkit._utils.pixels import Size, to_pixels
from distillkit.normalization import IDENTITY, ZCA, Normalization
from distillkit.sets._export import as_rows, read_npz, read_picture_folder, write_npz, write_picture_folder
from distillkit.sets._info import combined_info, repeated_info, replaced_info
from distillkit.sets._validation import (
    as_index,
    checked_class_names,
    checked_columns,
    checked_images,
    checked_info,
    checked_normalization,
    class_of_rows,
    repeats_images,
    require_same_order,
)

Labels: TypeAlias = Tensor | NDArray[Any] | Sequence[int]
"""Class indices [N] or label rows [N, K]."""

_FORMAT = "distillkit.LabeledImages/1"
_AHEAD = 128
"""Number of samples whose indices are copied to an accelerator together."""
_ARGUMENTS = ("images", "labels", "num_classes", "normalization", "columns", "info", "classes_given", "class_names")
_CONTENT = ("images", "stored", "labels", "columns", "normalization")
_REPR_KEYS = (
    "dataset", "split", "client", "method", "publishes", "init", "ipc", "steps", "iterations", "epsilon", "delta",
)  # fmt: skip

PARAMETRIZATIONS: dict[str, Callable[..., LabeledImages]] = {}
"""Functions that decode stored images. The key is the name of the JSON value that marks them in a file."""


class ImageSet(ABC):
    """Common part of `LabeledImages` and `StoredImages`, for functions whose images may be in memory or in a file."""

    labels: Tensor
    num_classes: int
    class_names: tuple[str, ...]
    classes_given: bool
    normalization: Normalization
    columns: Mapping[str, Tensor]
    info: dict[str, Any]

    @property
    def mean(self) -> tuple[float, ...]:
        """Mean of the normalization per channel, for pixels in [0, 1]."""
        return self.normalization.mean

    @property
    def std(self) -> tuple[float, ...]:
        """Standard deviation of the normalization per channel, for pixels in [0, 1]."""
        return self.normalization.std

    def counts(self) -> Tensor:
        """Return the number of images of each class, int64 [K].

        If the labels are rows [N, K], an image counts for every class whose value is above 0.5.
        """
        if self.labels.ndim == 2:
            return (self.labels > 0.5).sum(0)
        return torch.bincount(self.labels, minlength=self.num_classes)

    @abstractmethod
    def __len__(self) -> int: ...

    @property
    @abstractmethod
    def shape(self) -> tuple[int, int, int]:
        """Channels, height and width (C, H, W) of every image."""

    @abstractmethod
    def __getitem__(self, index: Any) -> Any: ...

    @abstractmethod
    def _take(self, rows: Tensor) -> Tensor:
        """Return the images at rows, int64 [n], as float [n, C, H, W]."""

    @abstractmethod
    def _part(self, rows: Tensor) -> LabeledImages:
        """Return a set in memory with the images at rows, int64 [n]."""

    @property
    def _empty(self) -> LabeledImages:
        """Set in memory without images, which has the device, dtype, shape and classes of this set."""
        return self._part(torch.empty(0, dtype=torch.int64, device="cpu"))

    @contextmanager
    def _reader(self, rows: Callable[[int], Tensor], count: int) -> Iterator[Callable[[int], Tensor]]:
        """Provide a function `read(i)` that returns `_take(rows(i))`, for i in range(count) in about this order."""
        yield lambda i: self._take(rows(i))

    def _selected(self, index: slice | Tensor) -> dict[str, Any]:
        """Return the labels, columns and info of the images at an index from `as_index`."""
        columns = {name: column[index] for name, column in self.columns.items()}
        info = repeated_info(self.info) if repeats_images(index, len(self.labels)) else self.info
        return {"labels": self.labels[index], "columns": columns, "info": info}

    def _changed(self, arguments: Sequence[str], changes: Mapping[str, Any]) -> dict[str, Any]:
        """Return the constructor arguments of a copy. Class names go with the classes that they name."""
        kept = {name: getattr(self, name) for name in arguments}
        if "num_classes" in changes:
            same = changes["num_classes"] == self.num_classes and "labels" not in changes
            kept |= {"classes_given": True, "class_names": self.class_names if same else ()}
        return {**kept, **changes}


class LabeledImages(ImageSet):
    """Small image set in memory, with labels, classes, normalization and provenance.

    `images, labels = data` unpacks a set, so `TensorDataset(*data)` works. An integer index returns the pair `(image,
    label)`, so the set is also a map-style dataset for `DataLoader`. A slice, mask or index tensor returns a
    `LabeledImages`. A set without images is allowed if `num_classes` is given, because a client may have no data.

    Args:
        images: float [N, C, H, W] in the normalized space; a NumPy array becomes float32.
        labels: class indices int [N], or label rows float [N, K] (soft or multi-label), as a tensor, an array or a
            list.
        num_classes: number of classes, K. Default: the largest label + 1, or the width of label rows. Pass it if
            classes may be absent, and if privacy matters: a K that is derived from the labels reveals that the largest
            label, K - 1, occurs.
        normalization: normalization that was applied to the pixels in [0, 1]. Default: none, so that the images are
            pixels in [0, 1].
        columns: further data of each image, such as a teacher's logits: a mapping from names to tensors with N rows.
        info: provenance of the set, such as method, steps and seed: a mapping from names to JSON values. It is saved
            with the set, and the repr shows its most important entries. A guarantee in it (`epsilon`) is taken as
            given: pass the `info` of another set only if its guarantee covers these images and labels.
        classes_given: whether the caller declared K and the class names, independently of the data. Default: True if
            `num_classes` or `class_names` are given or labels are rows. Sets that are derived from this set keep the
            flag. Differentially private methods reject sets whose classes were found in the data.
        class_names: names of the K classes in label order. If they are given, `num_classes` can be omitted. Default:
            none. They are written to saved and exported files, figures and tables, but not to the messages of federated
            methods.

    Raises:
        TypeError, ValueError: an argument is invalid; the message says which.
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
        if normalization is not None:
            Normalization.require(normalization)
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
        names = checked_class_names(class_names)
        num_classes = len(names) or None if num_classes is None else num_classes
        self.images, self.labels, self.num_classes = checked_images(images, labels, num_classes)
        self.class_names = checked_class_names(names, self.num_classes)
        known = num_classes is not None or self.labels.ndim == 2
        self.classes_given = known if classes_given is None else check.boolean(classes_given, "classes_given")
        self.normalization = checked_normalization(normalization, self.images.shape[1])
        self.columns = checked_columns(columns, len(self.images))
        self.info = checked_info(info)

    def __setattr__(self, name: str, value: Any) -> None:
        """Assign an attribute. New content of unknown origin ends a guarantee, as in `replace`."""
        if name in _CONTENT and "info" in vars(self):
            vars(self)["info"] = replaced_info(self, {name: value})
        super().__setattr__(name, value)

    @staticmethod
    def _unchecked(**parts: Any) -> LabeledImages:
        """Create a set from constructor arguments, without sanity checks of the pixel values."""
        made = object.__new__(LabeledImages)
        made._assign(**parts)
        return made

    @staticmethod
    def from_pixels(
        pixels: Tensor | NDArray[Any], labels: Labels, *, normalization: Normalization = IDENTITY, **options: Any
    ) -> LabeledImages:
        """Create a set from images that are not normalized yet, and normalize them.

        Args:
            pixels: float [N, C, H, W] in [0, 1], or uint8 in 0..255.
            labels: class indices [N] or label rows [N, K], as in the constructor.
            normalization: normalization to apply. Default: none, so that the images remain pixels.
            options: the constructor's arguments `num_classes`, `columns`, `info`, `classes_given` and `class_names`.

        Raises:
            TypeError, ValueError: an argument is invalid, or a float pixel is outside [0, 1] by more than 0.001.
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
        dataset: Dataset[Any] | DataLoader[Any] | Iterable[Any],
        *,
        image: str | None = None,
        label: str | None = None,
        size: Size | None = None,
        channels: int | None = None,
        num_classes: int | None = None,
        normalization: Normalization | None = None,
        class_names: Sequence[str] = (),
        progress: bool = True,
    ) -> LabeledImages:
        """Read a dataset of (image, label) pairs or of rows into memory once.

        Random transforms of the dataset are applied only once. To augment images in every epoch, use a dataset without
        random transforms, and pass `augment=` to the function that trains on the set.

        Args:
            dataset: a `Dataset` or a list of pairs or rows, a dataset of Hugging Face, a table or mapping of columns,
                or a `DataLoader` whose dataset is read; see `distillkit.sets.as_set`.
            image, label: names of the columns of the image and of the label, for rows. Default: those that can only be
                meant.
            size: height and width in pixels of every picture, or one number for square pictures. Resizing is bilinear
                with antialiasing and ignores the aspect ratio. Required if the pictures differ in size.
            channels: 1 to convert RGB to gray, or 3 to repeat gray as RGB. Required if only some pictures are gray.
            num_classes: number of classes, K. Default: the number of class names in the dataset (a `ClassLabel`, the
                attribute `classes`, or labels that are names). The new set keeps these names, as found in the data
                (`classes_given` is False). Without names: the largest label + 1, or the length of a label if labels
                are vectors.
            normalization: normalization that the dataset's transform applies after `ToTensor`. Default: none, so that
                the images are pixels in [0, 1]. If the dataset returns uint8 or PIL images, this function normalizes
                them.
            class_names: names of the classes in label order, as in `as_set`.
            progress: whether to show a progress bar if reading takes long.

        Raises:
            TypeError, ValueError: an item is neither a pair nor a row of an image and a label, several columns may be
                meant, float images are to be resized, or an argument is invalid.
        """
        conversion.require_in_memory(dataset, "dataset")
        if isinstance(dataset, list) and not any(isinstance(item, LabeledImages | Tensor) for item in dataset[:2]):
            dataset = Subset(dataset, range(len(dataset)))  # type: ignore[arg-type]
        if isinstance(dataset, tuple | list) or not conversion.is_labeled_source(dataset):
            raise TypeError(conversion.unsupported(dataset, "dataset", labels=False))

        def converted(picture: Tensor) -> Tensor:
            if picture.is_floating_point():
                raise TypeError("size and channels are for uint8 and PIL pictures; convert floats in the transform")
            return to_pixels(picture[None], size, channels)[0]

        options: dict[str, Any] = {"image": image, "label": label, "progress": progress, "class_names": class_names}
        options["convert"] = None if size is None and channels is None else converted
        return set_from_source(dataset, "dataset", num_classes, normalization, **options)

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
        index = as_index(index, len(self))
        if isinstance(index, Tensor) and index.ndim == 0:
            return self.images[int(index)], self.labels[int(index)]
        return self._with(images=self.images[index], **self._selected(index))

    def _take(self, rows: Tensor) -> Tensor:
        return self.images.index_select(0, rows.to(self.images.device, non_blocking=True))

    @contextmanager
    def _reader(self, rows: Callable[[int], Tensor], count: int) -> Iterator[Callable[[int], Tensor]]:
        ahead: dict[int, Tensor] = {}

        def read(i: int) -> Tensor:
            if i not in ahead:
                some = [rows(k) for k in range(i, min(count, i + _AHEAD))]
                moved = torch.cat(some).to(self.images.device, non_blocking=True)
                ahead.clear()
                ahead.update(enumerate(moved.split([len(own) for own in some]), i))
            return self._take(ahead[i])

        yield read if is_accelerator(self.images.device) else lambda i: self._take(rows(i))

    def _part(self, rows: Tensor) -> LabeledImages:
        return self[rows.to(self.images.device)]

    def replace(self, **changes: Any) -> LabeledImages:
        """Return a copy with some parts replaced.

        The origin of new images, labels, columns or measured statistics is unknown. If the set has a guarantee
        (`info["epsilon"]`), they end it, and `info["reason"]` states why; so does an assignment to these attributes.
        Pass `info=data.info` if the guarantee covers the new content, for example because it was computed from this set
        alone. Leaving out columns keeps the guarantee.

        Args:
            changes: constructor arguments by name. Passing `num_classes` sets `classes_given` (whether the classes were
                declared independently of the data) to True. The class names are then kept only if the number of classes
                stays the same and you do not also pass `labels`.

        Raises:
            TypeError, ValueError: an argument is unknown or invalid.
        """
        return self._with(**{"info": replaced_info(self, changes), **changes})

    def _with(self, **changes: Any) -> LabeledImages:
        """Return a copy with some parts replaced by what was computed from this set alone. It keeps the guarantee."""
        if unknown := sorted(set(changes) - set(_ARGUMENTS)):
            raise TypeError(f"replace takes {', '.join(_ARGUMENTS)}, got {', '.join(unknown)}")
        return LabeledImages._unchecked(**self._changed(_ARGUMENTS, changes))

    @property
    def shape(self) -> tuple[int, int, int]:
        """Channels, height and width (C, H, W) of every image."""
        _, c, h, w = self.images.shape
        return c, h, w

    def pixels(self) -> Tensor:
        """Return the images as pixels, float [N, C, H, W], clamped to [0, 1]. Use it to show or export them."""
        return self.normalization.decode(self.images).clamp(0, 1)

    def renormalize(self, normalization: Normalization) -> LabeledImages:
        """Return the set with its images converted to another normalization.

        Args:
            normalization: the new normalization. Pixels are not clamped, so converting back returns the same images up
                to rounding. If it was measured on images, it ends a guarantee of the set, see `replace`.
        """
        Normalization.require(normalization)
        images = normalization.encode(self.normalization.decode(self.images))
        info = replaced_info(self, {"normalization": normalization})
        return self._with(images=images, normalization=normalization, info=info)

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> LabeledImages:
        """Return this set on another device or in another precision, like `Tensor.to`.

        Args:
            device: device of the images, the labels and the tensors in `columns`. Default: unchanged.
            dtype: dtype of the images and of soft or multi-label rows. Class indices and the tensors in `columns` keep
                their dtype. Default: unchanged.

        Raises:
            TypeError, ValueError: this machine does not have the device, or the dtype is not floating point.
        """
        device = None if device is None else check.device(device)
        labels = self.labels.to(device, dtype) if self.labels.ndim == 2 else self.labels.to(device)
        columns = {name: column.to(device) for name, column in self.columns.items()}
        return self._with(images=self.images.to(device, dtype), labels=labels, columns=columns)

    def require_compatible(self, other: LabeledImages, *, names: tuple[str, str] | None = None) -> None:
        """Refuse another set that differs in normalization, image shape, number or order of classes.

        If both sets have class names, a name that occurs in both must have the same index. If only one has, and `names`
        is given, the class names must not be numbers in another order than ascending, such as "1", "10", "2": a folder
        sorts them so, but the labels of the other set are probably in numeric order.

        Functions that join two sets, or train on one set and test on another, call this method first.

        Args:
            other: set to compare with this one.
            names: names of this set and of the other set in error messages, if both come from the caller.

        Raises:
            ValueError: the sets differ. The message explains how to convert one of them.
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
        require_same_order(self.class_names, other.class_names, names)

    @staticmethod
    def concatenate(sets: Sequence[LabeledImages]) -> LabeledImages:
        """Join sets in the given order, for example the sets of several clients.

        If two sets have different class names, the result has no class names. A set without class names may be joined
        with a set that has class names, which are kept.

        In `info`, entries that are the same in all sets are kept. If there are others, `info["provenance"]` lists the
        `info` of each set. If all sets have a privacy guarantee, epsilon and delta are added (basic composition), which
        also holds for sets that were made from the same records. A ledger that paid for all of them states a smaller
        epsilon. If a set has no guarantee, `info["epsilon"]` is None, and `info["reason"]` states why. `publishes`
        lists what any of the sets publishes.

        Args:
            sets: at least one set. All sets must have the same normalization, image shape, number of classes, kind of
                labels (class indices or label rows), and names in `columns`.

        Raises:
            ValueError: there are no sets, or the sets differ in one of the required properties. The message explains
                how to convert a set.
        """
        for index, one in enumerate(check.sequence(sets, "sets", "LabeledImages")):
            check.instance(one, LabeledImages, f"sets[{index}]", "a LabeledImages")
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
        whole: dict[str, Any] = {"images": images, "labels": labels, "columns": columns, "classes_given": given}
        whole["info"] = combined_info([s.info for s in sets])
        places = [(s.images.data_ptr(), s.images.shape, s.images.stride()) for s in sets if len(s)]
        if len(set(places)) < len(places):  # a set is joined to itself
            whole["info"] = repeated_info(whole["info"])
        return first._with(**whole, class_names=names.pop() if len(names) == 1 else ())

    def grid(self, columns: int | None = None, padding: int = 2) -> Tensor:
        """Return one picture with all images in a grid on white, as pixels float [C, H', W'] in [0, 1].

        Args:
            columns: number of images per row. Default: 10, or all images if there are fewer.
            padding: number of pixels between images.

        Raises:
            ValueError: the set is empty, or `columns` or `padding` is invalid.
        """
        if not len(self):
            raise ValueError("an empty set has no grid")
        columns = min(len(self), 10) if columns is None else check.positive_int(columns, "columns")
        check.positive_int(padding, "padding", least=0)
        return tile(self.pixels().detach().cpu().split(columns), columns, padding)

    def parts(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return the content of the set as named tensors and JSON values, for a file or a message.

        The tensors are "images", "labels", `"column.<name>"` for each column and, if the images are ZCA-whitened,
        "zca.center", "zca.matrix" and "zca.inverse". `from_parts` creates a set from the result.
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
        """Create a set from tensors and JSON values that `parts` returned.

        Args:
            tensors, facts: the tensors and the JSON values.

        Raises:
            KeyError, TypeError, ValueError: a part is missing, or the parts contradict each other.
        """
        known = ("images", "labels", "zca.center", "zca.matrix", "zca.inverse")
        if unknown := [name for name in tensors if name not in known and not name.startswith("column.")]:
            raise ValueError(f"tensors must be parts of a set, got {', '.join(unknown)}")
        zca = None
        if "zca.matrix" in tensors:
            zca = ZCA(tensors["zca.center"], tensors["zca.matrix"], tensors["zca.inverse"])
        options: dict[str, Any] = {
            "num_classes": facts["num_classes"],
            "normalization": Normalization(facts["mean"], facts["std"], zca, measured=facts["measured"]),
            "columns": {k.removeprefix("column."): v for k, v in tensors.items() if k.startswith("column.")},
            "info": facts["info"],
            "classes_given": facts["given"],
            "class_names": facts.get("class_names", ()),
        }
        for name, decoded in PARAMETRIZATIONS.items():
            if name in facts:
                return decoded(tensors["images"], tensors["labels"], facts[name], **options)
        return LabeledImages._unchecked(images=tensors["images"], labels=tensors["labels"], **options)

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write images, labels, columns, normalization and info to one `.safetensors` file, which `load` reads.

        Args:
            path: path of the file. An existing file is replaced atomically, so a reader sees either the old or the new
                file.

        Returns:
            The path.

        Raises:
            OSError: the folder does not exist, is not writable or has no space left. An existing file is left
                unchanged.
        """
        tensors, facts = self.parts()
        return write_tensors(check.path(path, "path"), tensors, {"format": _FORMAT, "set": json.dumps(facts)})

    def export(self, path: str | os.PathLike[str]) -> Path:
        """Write the set to an `.npz` file or a folder of PNG pictures, which programs without distillkit can read.

        An `.npz` file contains the whole set without loss. It has one array for each tensor that the method `parts`
        returns, and arrays `mean`, `std` and `class_names`. The images are normalized, so `images * std + mean` gives
        pixels. A `TiledImages` has its decoded images there, and its stored images in the array `stored`.

        A folder has one sub-folder per class. Their alphabetical order is the order of the classes, so torchvision's
        `ImageFolder` can read the folder. If the labels are rows, such as soft labels, the class of an image is read
        from `columns["class"]`. Without this column, it is the class of the largest entry of the row. `labels.csv`
        contains the file and the label of each picture, including label rows. `set.json` contains the JSON values that
        the method `parts` returns. Pixels are rounded to 8 bits, with an error of at most 1/510, and clipped to [0, 1].
        The tensors in `columns` are not written, nor is the ZCA whitening of a whitened set. Tiled images are decoded.
        A warning lists what is clipped or not written.

        Args:
            path: path of a file that ends in `.npz`, or of a folder, which must either be empty or not exist.

        Returns:
            The path, which you can pass to `load`.

        Raises:
            OSError: the path cannot be written, for example because its parent folder does not exist.
            FileExistsError: the folder is not empty.
            ValueError: the path has a suffix other than `.npz`, or the images of a folder have neither 1 nor 3
                channels.
        """
        path = check.path(path, "path")
        if path.suffix == ".npz":
            tensors, facts = self.parts()
            tiled = {"stored": tensors["images"], "images": self.images} if "tiles" in facts else {}
            write_npz(path, tensors | tiled, facts)
        elif path.suffix and not path.is_dir():
            raise ValueError(f"path must end in .npz, or be a folder without suffix, got {path.name!r}; see also save")
        else:
            pixels, facts, lost = self._as_pixels()
            lost = [*(f"the column {name!r}" for name in self.columns), *lost]
            classes = class_of_rows(self.labels, self.columns)
            write_picture_folder(path, pixels, self.labels, classes, facts, lost)
        return path

    def to_huggingface(self) -> Any:
        """Return the set as a `datasets.Dataset` of Hugging Face, to publish, map or stream it.

        The column `image` has pictures of 8 bits, with an error of at most 1/510, clipped to [0, 1]. The column `label`
        is a `ClassLabel` with the class names ("0", "1", ... if there are none), or a list of numbers for label rows.
        The tensors in `columns` become further columns. `info.description` is a JSON object with the normalization and
        the `info` of the set. Tiled images are decoded, and whitened images are not whitened any more; a warning says
        so. `as_set` reads the images and labels of the result, but not its `info`.

        Raises:
            ImportError: `datasets` is not installed: `pip install 'distillkit[data]'`.
            ValueError: the images have neither 1 nor 3 channels, or a column is named "image" or "label".
        """
        pixels, facts, lost = self._as_pixels()
        return as_rows(pixels, self.labels, self.columns, facts, lost)

    def _as_pixels(self) -> tuple[Tensor, dict[str, Any], list[str]]:
        """Return pixels, the JSON values of `parts` about them, and what pictures do not hold."""
        facts, lost = LabeledImages.parts(self)[1], list[str]()
        if "tiles" in self.parts()[1]:
            lost.append(f"the stored form of {len(self)} tiled images, which are decoded")
        if self.normalization.zca is not None:
            lost.append("the whitening")
            facts |= {"mean": IDENTITY.mean, "std": IDENTITY.std}
        return self.normalization.decode(self.images), facts, lost

    @staticmethod
    def load(path: str | os.PathLike[str]) -> LabeledImages:
        """Read a set that `save` or `export` wrote, with its normalization.

        The set is as it was saved, or exported up to what `export` warns of. An exported folder in which a file was
        added, removed, renamed or changed is refused, except for further files beside the class folders, such as a
        README.

        Args:
            path: path of the `.safetensors` or `.npz` file, or of the exported folder.

        Raises:
            FileNotFoundError: the file, or a file of the exported folder, does not exist.
            ValueError: the file is damaged or changed, or does not contain a saved set. The message names the file.
        """
        if (path := check.path(path, "path")).is_dir() or path.suffix.lower() == ".npz":
            tensors, facts = read_picture_folder(path) if path.is_dir() else read_npz(path)
        else:
            tensors, strings = read_tensors(path, kind=_FORMAT, content="a saved LabeledImages")
            facts = {"set": strings.get("set", "")}
        try:
            return LabeledImages.from_parts(tensors, json.loads(facts["set"]) if "set" in facts else facts)
        except (KeyError, TypeError, ValueError, ArithmeticError, AttributeError, RuntimeError) as error:
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
        if self.info.get("epsilon", 0) is None:
            told.append(f"no guarantee: {self.info.get('reason', 'no reason is recorded')}")
        if len(self.info) > len(told):
            told.append(f"{len(self.info)} facts in info")
        if told:
            parts.append(", ".join(told))
        return f"LabeledImages({'; '.join(parts)})"

    def _repr_html_(self) -> str:
        classes = self.labels if self.labels.ndim == 1 else self.labels.argmax(1)
        return as_html(repr(self), [self[rows].pixels() for rows in sample_rows(classes)], len(classes.unique()))


def resolve_subset(images: Any, name: str = "images") -> Any:
    """Convert a `Subset`, `ConcatDataset` or `DataLoader` of `LabeledImages`, or a `Subset` or `DataLoader` of a
    `StoredImages`, to a set of that kind.

    Reading the subset item by item would lose the set's normalization, its `columns` and its number of classes.

    Args:
        images: a `Subset`, `ConcatDataset` or `DataLoader` of sets, or of such objects. Other values are returned
            unchanged.
        name: name of the argument in error messages.
    """
    if isinstance(images, DataLoader):
        whole = resolve_subset(images.dataset)
        if isinstance(whole, ImageSet):
            conversion.whole_dataset(images, name)  # refuses a loader that yields other items
            return whole
        return images
    if any(isinstance(images, k) and type(images).__getitem__ is not k.__getitem__ for k in (Subset, ConcatDataset)):
        return images  # a subclass may transform the items
    if isinstance(images, ConcatDataset):
        parts = [resolve_subset(part) for part in images.datasets]
        return LabeledImages.concatenate(parts) if all(isinstance(part, LabeledImages) for part in parts) else images
    if not isinstance(images, Subset):
        return images
    whole = resolve_subset(images.dataset)
    return whole[images.indices] if isinstance(whole, ImageSet) else images


def require_consistent(
    data: LabeledImages,
    name: str,
    num_classes: int | None,
    normalization: Normalization | None,
    class_names: Sequence[str] = (),
) -> LabeledImages:
    """Check that a user's arguments about classes and normalization agree with a set, and return the set.

    Args:
        data: set to check.
        name: name of the argument in error messages.
        num_classes: number of classes that the user passed, or None. If the set derived its number of classes from its
            labels, the result has `num_classes` instead.
        normalization: normalization that the user passed, or None.
        class_names: names of the classes that the user passed, or ().

    Raises:
        ValueError: a value differs from that of the set, or the images are no longer finite because they were
            overwritten.
    """
    if class_names and tuple(class_names) != data.class_names:
        raise ValueError(
            f"class_names differ from those of the set ({', '.join(data.class_names) or 'none'}); omit them, or use "
            "`data.replace(class_names=...)`"
        )
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
    source: Any,
    name: str,
    num_classes: int | None,
    normalization: Normalization | None,
    class_names: Sequence[str] = (),
    convert: Callable[[Tensor], Tensor] | None = None,
    **options: Any,
) -> LabeledImages:
    """Create a set from a source of images and labels, or return a set of which the source is a part.

    uint8 and uint16 images are pixels in 0..255 and 0..65535, which this function normalizes. Float images are already
    normalized, unless `convert` made them.

    Args:
        source: source of images and labels; see `as_set`.
        name: name of the argument in error messages.
        num_classes: number of classes, K. Default: the number of class names, if there are any. If they were found in
            the data, they do not count as given, and `info["classes"]` says where they come from.
        normalization, class_names: as in `as_set`.
        convert, options: options of `conversion.read`.
    """
    source = resolve_subset(source, name)
    if isinstance(source, LabeledImages):
        if convert is not None:
            raise TypeError(f"size and channels are for uint8 and PIL pictures, but {name} is a LabeledImages")
        return require_consistent(source, name, num_classes, normalization, class_names)
    given = checked_class_names(class_names)
    if normalization is not None:
        Normalization.require(normalization)
    found = conversion.read(source, name, class_names=given, convert=convert, **options)
    images = conversion.as_tensor(found.images, name)
    if normalization is None or len(normalization.mean) in (1, images.shape[-1]):
        images = conversion.channels_first(images, name, array=not isinstance(found.images, Tensor))
    labels = conversion.as_tensor(found.labels, "labels", lists=True)
    if isinstance(labels, Tensor) and labels.ndim == 2 and labels.shape[1] == 1 and not labels.is_floating_point():
        labels = labels[:, 0]
    wanted = len(found.names) or None if num_classes is None else num_classes
    if images.dtype in (torch.uint8, torch.uint16) or convert is not None:
        images = images.float() / 65535 if images.dtype == torch.uint16 else images
        space = IDENTITY if normalization is None else normalization
        made = LabeledImages.from_pixels(images, labels, num_classes=wanted, normalization=space)
    else:
        made = LabeledImages(images, labels, num_classes=wanted, normalization=normalization)
    if conversion.repeats_items(source):
        made.info = repeated_info(made.info)
    if given:
        return made.replace(class_names=given)
    if len(found.names) != made.num_classes:
        if found.origin == "labels" and found.names:
            raise ValueError(
                f"num_classes={num_classes}, but the labels name {len(found.names)} classes; pass all by class_names="
            )
        return made
    classes_given = num_classes is not None or made.labels.ndim == 2
    info = {**made.info, "classes": found.origin}
    return made.replace(class_names=found.names, classes_given=classes_given, info=info)
