"""The clients' data: read the image sets, and check that all of them are compatible with the first client's set."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from distillkit.sets import Images, LabeledImages, StoredImages
from distillkit.sets._validation import require_same_order
from distillkit.sets.as_set import open_set

Either = TypeVar("Either", bound=LabeledImages | StoredImages)


@dataclass(frozen=True)
class ClientData:
    """Data of one client, for `simulate(method, [ClientData(train, test), ...])`.

    Attributes:
        train: training images. A `StoredImages` (a set in a file) is read each time the client gets a request, and its
            images are freed afterwards.
        test: the client's own test images; None if it has none.
    """

    train: LabeledImages | StoredImages
    test: LabeledImages | StoredImages | None = None

    def read(self) -> tuple[LabeledImages, LabeledImages | None]:
        """Read the training and test images into memory, and return them."""
        return _in_memory(self.train), None if self.test is None else _in_memory(self.test)


def _in_memory(data: LabeledImages | StoredImages) -> LabeledImages:
    return data.read() if isinstance(data, StoredImages) else data


def extend_classes(data: Either, classes: int, given: bool, names: tuple[str, ...] = ()) -> Either:
    """Raise a set's number of classes to `classes`, if the number was only inferred from the set's labels.

    The names of the set's classes must be the first of `names`, which it gets if there are enough.
    """
    if data.classes_given or data.num_classes >= classes:
        return data
    require_same_order(names, data.class_names, None)
    names = names if len(names) == classes else ()
    return data.replace(num_classes=classes, classes_given=given, class_names=names)  # type: ignore[return-value]


def require_like(first: LabeledImages, other: LabeledImages | StoredImages, name: str, *, classes: bool = True) -> None:
    """Refuse a set whose normalization, shape, dtype, classes or form of labels differ from the first client's set.

    The form of labels is either class indices [N] or rows [N, K] with one value per class.
    """
    other = other.read([]) if isinstance(other, StoredImages) else other
    no_labels = torch.empty(0, dtype=torch.int64)
    try:
        like = other if classes else other[:0].replace(labels=no_labels, num_classes=first.num_classes)
        if not classes and len(first.class_names) == other.num_classes and other.class_names:
            like = like.replace(class_names=other.class_names)
        first.require_compatible(like, names=("clients[0]", name) if classes else None)
    except ValueError as error:
        raise ValueError(f"{name} does not fit clients[0]: {error}") from error
    if first.images.dtype != other.images.dtype:
        raise ValueError(
            f"{name} has {other.images.dtype} images, clients[0] has {first.images.dtype}; convert with "
            f"`data.to(dtype={first.images.dtype})`"
        )
    if classes and first.labels.ndim != other.labels.ndim:
        kinds = {1: "class indices", 2: "rows"}
        raise ValueError(f"{name} has labels as {kinds[other.labels.ndim]}, clients[0] as {kinds[first.labels.ndim]}")


def fitting_set(data: Either, name: str, first: LabeledImages, *, classes: bool = True) -> Either:
    """Return a set of the server, after checking that it has images and is compatible with the first client's set."""
    if not len(data):
        raise ValueError(f"{name} has no images: leave it out, or pass some")
    data = extend_classes(data, first.num_classes, True, first.class_names) if classes else data
    require_like(first, data, name, classes=classes)
    return data


class ClientRegistry:
    """Sequence with the `ClientData` of every client of a run, checked for compatibility with the first client's set.

    Datasets, loaders, and pairs of images and labels are read into memory; a `StoredImages` stays in its file.

    All sets get the same number of classes: `classes` if it is given, otherwise a number that the user gave for one of
    the sets, otherwise the largest number inferred from a client's labels.

    Args:
        clients: the clients' sets. If this is a list or tuple, all sets are read and checked here. Use another type of
            sequence for many clients, or to create sets on demand. Then only the first set is read here, and every
            other set is read and checked when its client is drawn.
        classes: number of classes of the task; None if the user gave no task.
        progress: whether to show a progress bar while large data is read.

    Attributes:
        all_loaded: whether all clients were read at the start, that is, `clients` is a list or tuple.
        first: set without images, with the image shape, dtype and normalization of the first client's set.
        on_read: function that is called with the data of each client that is read on demand, in a list.

    Raises:
        TypeError: `clients` is not a sequence of sets.
        ValueError: there are no clients, or a set is not compatible with the first client's set. If clients are read
            on demand, the incompatible client fails when it is drawn, and no error is raised here.
    """

    def __init__(
        self, clients: Sequence[Images | StoredImages | ClientData], classes: int | None = None, progress: bool = True
    ) -> None:
        if isinstance(
            clients, type | LabeledImages | StoredImages | Tensor | Dataset | DataLoader | str | Mapping
        ) or not (hasattr(clients, "__len__") and hasattr(clients, "__getitem__")):
            raise TypeError(f"clients must be a sequence of sets, one for each client, got {type(clients).__name__}")
        if not len(clients):
            raise ValueError("clients must have at least one set, got none")
        self.all_loaded = isinstance(clients, list | tuple)
        self._clients, self._progress = clients, progress
        self._checked: list[ClientData] = []
        self.on_read: Callable[[Sequence[ClientData]], object] = len
        read = [self._read(k) for k in range(len(clients) if self.all_loaded else 1)]
        given_classes = [h.train.num_classes for h in read if h.train.classes_given]
        self._classes_given = classes is not None or bool(given_classes)
        self._classes = classes or (given_classes[0] if given_classes else max(h.train.num_classes for h in read))
        self._names = max((data.train.class_names for data in read), key=len)
        self.first = _without_images(self._extended(read[0]).train)
        if self.all_loaded:
            self._checked = [self._checked_data(k, data) for k, data in enumerate(read)]

    def __len__(self) -> int:
        return len(self._clients)

    def __iter__(self) -> Iterator[ClientData]:
        return (self[number] for number in range(len(self)))

    def _read(self, number: int) -> ClientData:
        given, name = self._clients[number], f"clients[{number}]"
        if not isinstance(given, ClientData):
            return ClientData(open_set(given, name=name, progress=self._progress))
        test = None if given.test is None else open_set(given.test, name=f"{name}.test", progress=self._progress)
        return ClientData(open_set(given.train, name=f"{name}.train", progress=self._progress), test)

    def _extended(self, data: ClientData) -> ClientData:
        options = (self._classes, self._classes_given, self._names)
        test = None if data.test is None else extend_classes(data.test, *options)
        return ClientData(extend_classes(data.train, *options), test)

    def __getitem__(self, number: int) -> ClientData:
        if self.all_loaded:
            return self._checked[number]
        data = self._checked_data(number, self._read(number))
        self.on_read([data])
        return data

    def _checked_data(self, number: int, data: ClientData) -> ClientData:
        data = self._extended(data)
        require_like(self.first, data.train, f"clients[{number}]")
        if data.test is not None:
            require_like(self.first, data.test, f"clients[{number}].test")
        return data


def _without_images(data: LabeledImages | StoredImages) -> LabeledImages:
    """Return an empty copy of the set, with its shape, classes and normalization, so that the images can be freed."""
    return data.read([]) if isinstance(data, StoredImages) else data[torch.empty(0, dtype=torch.int64)]
