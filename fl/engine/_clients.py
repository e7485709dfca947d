"""The clients' data: read, and checked against the first client's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, overload

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from distillkit._utils import conversion
from distillkit.sets import Images, LabeledImages, StoredImages, as_set

__all__ = ["ClientData", "ClientRegistry", "grown", "read_or_stored", "read_set", "require_like"]

Either = TypeVar("Either", bound=LabeledImages | StoredImages)


@dataclass(frozen=True)
class ClientData:
    """Data of one client, for `simulate(method, [ClientData(train, test), ...])`.

    Attributes:
        train: training images. A `StoredImages` is read each time the client is asked, and then released.
        test: the client's own test images, if any.
    """

    train: LabeledImages | StoredImages
    test: LabeledImages | StoredImages | None = None

    @property
    def stored(self) -> bool:
        """Whether any of the images are in a file."""
        return isinstance(self.train, StoredImages) or isinstance(self.test, StoredImages)

    def read(self) -> tuple[LabeledImages, LabeledImages | None]:
        """Return the training and test images in memory."""
        return _in_memory(self.train), None if self.test is None else _in_memory(self.test)


def _in_memory(data: LabeledImages | StoredImages) -> LabeledImages:
    return data.read() if isinstance(data, StoredImages) else data


def read_set(given: Any, name: str, progress: bool) -> LabeledImages:
    """What a user gave as a set, as one; a dataset, loader or pair of images and labels is read into memory.

    Args:
        given: whatever came.
        name: of the argument, for messages.
        progress: whether long reading shows a bar.

    Raises:
        TypeError, ValueError: it is no set and none can be made of it, or its pictures lie in a file.
    """
    if isinstance(given, LabeledImages):
        return given
    conversion.require_in_memory(given, name)
    if not conversion.is_labeled_source(given):
        raise TypeError(
            f"{name} must be a LabeledImages, a Dataset, or a pair of images and labels, got {type(given).__name__}; "
            "make a set with LabeledImages(images, labels, num_classes=..., normalization=...)"
        )
    return as_set(given, name=name, progress=progress)


def grown(data: Either, classes: int, given: bool) -> Either:
    """A set with more classes, if nobody said how many it has.

    Args:
        data: the set; one that says how many classes there are, or has as many, is returned as it is.
        classes: how many there are.
        given: whether somebody said so, and it is no guess.
    """
    if data.classes_given or data.num_classes >= classes:
        return data
    return data.replace(num_classes=classes, classes_given=given)  # type: ignore[return-value]


def require_like(first: LabeledImages, other: LabeledImages | StoredImages, name: str, *, classes: bool = True) -> None:
    """Refuse a set of another space, shape, dtype, class count or kind of labels than the first client's.

    Args:
        first: the first client's set.
        other: the set in question; of a stored one, whose pictures are bytes and so finite, nothing is read.
        name: of the argument, for messages.
        classes: whether its classes and labels must be alike too.

    Raises:
        ValueError: with what differs, and how to convert.
    """
    other = other.read([]) if isinstance(other, StoredImages) else other
    no_labels = torch.empty(0, dtype=torch.int64)
    try:
        first.require_compatible(
            other if classes else other[:0].replace(labels=no_labels, num_classes=first.num_classes)
        )
    except ValueError as error:
        raise ValueError(f"{name} does not fit clients[0]: {error}") from error
    if not bool(torch.isfinite(other.images).all()):
        raise ValueError(f"{name} holds NaN or Inf among its pixels: leave such images out, or mend them")
    if first.images.dtype != other.images.dtype:
        raise ValueError(
            f"{name} holds {other.images.dtype} images, clients[0] {first.images.dtype}; convert with "
            f"`data.to(dtype={first.images.dtype})`"
        )
    if classes and first.labels.ndim != other.labels.ndim:
        kinds = {1: "class indices", 2: "rows"}
        raise ValueError(f"{name} has labels as {kinds[other.labels.ndim]}, clients[0] as {kinds[first.labels.ndim]}")


def read_or_stored(given: Any, name: str, progress: bool) -> LabeledImages | StoredImages:
    """What `read_set` gives, or a stored set as it is: nothing of it is read here.

    Args:
        given, name, progress: see `read_set`.

    Raises:
        TypeError, ValueError: see `read_set`.
    """
    return given if isinstance(given, StoredImages) else read_set(given, name, progress)


class ClientRegistry(Sequence[ClientData]):
    """The clients of a run, each checked against the first: all at the door, or one by one as they are looked at.

    Datasets, loaders and pairs of images and labels are read into memory; a stored set stays in its file. A set that
    does not say how many classes there are has as many as `classes`, or the sets that say it, or else the largest.

    Args:
        clients: a list or tuple, which is checked whole, or another sequence (it may be long, and make its clients on
            demand), of which only the first is looked at here.
        classes: how many there are, if a task says so.
        progress: whether long reading shows a bar.

    Attributes:
        whole: whether all clients were looked at.
        first: none of the images of the first client, in its space.

    Raises:
        TypeError: no sequence of sets.
        ValueError: no clients; a set that does not fit the first client's. Of a sequence that is checked as it is
            looked at, such a client fails in its round, by name.
    """

    def __init__(
        self,
        clients: Sequence[Images | StoredImages | ClientData],
        classes: int | None = None,
        progress: bool = True,
    ) -> None:
        if isinstance(
            clients, type | LabeledImages | StoredImages | Tensor | Dataset | DataLoader | str | Mapping
        ) or not (hasattr(clients, "__len__") and hasattr(clients, "__getitem__")):
            raise TypeError(f"clients must be a sequence of sets, one a client, got one {type(clients).__name__}")
        if not len(clients):
            raise ValueError("clients must hold at least one client, a set each, got none")
        self.whole = isinstance(clients, list | tuple)
        self._clients, self._progress = clients, progress
        self._checked: list[ClientData] = []
        read = [self._read(k) for k in range(len(clients) if self.whole else 1)]
        said = [h.train.num_classes for h in read if h.train.classes_given]
        self._said = classes is not None or bool(said)
        self._classes = classes or (said[0] if said else max(h.train.num_classes for h in read))
        self.first = _none_of(self._fitting(read[0]).train)
        if self.whole:
            self._checked = [self._fit(k, held) for k, held in enumerate(read)]

    def __len__(self) -> int:
        return len(self._clients)

    def _read(self, number: int) -> ClientData:
        given, name = self._clients[number], f"clients[{number}]"
        if not isinstance(given, ClientData):
            return ClientData(read_or_stored(given, name, self._progress))
        test = None if given.test is None else read_or_stored(given.test, f"{name}.test", self._progress)
        return ClientData(read_or_stored(given.train, f"{name}.train", self._progress), test)

    def _fitting(self, held: ClientData) -> ClientData:
        test = None if held.test is None else grown(held.test, self._classes, self._said)
        return ClientData(grown(held.train, self._classes, self._said), test)

    @overload
    def __getitem__(self, number: int) -> ClientData: ...
    @overload
    def __getitem__(self, number: slice) -> Sequence[ClientData]: ...
    def __getitem__(self, number: int | slice) -> ClientData | Sequence[ClientData]:
        if isinstance(number, slice):
            return [self[k] for k in range(*number.indices(len(self)))]
        return self._checked[number] if self.whole else self._fit(number, self._read(number))

    def _fit(self, number: int, held: ClientData) -> ClientData:
        held = self._fitting(held)
        require_like(self.first, held.train, f"clients[{number}]")
        if held.test is not None:
            require_like(self.first, held.test, f"clients[{number}].test")
        return held


def _none_of(data: LabeledImages | StoredImages) -> LabeledImages:
    """A set's space without its images, which it does not keep alive."""
    return data.read([]) if isinstance(data, StoredImages) else data[torch.empty(0, dtype=torch.int64)]
