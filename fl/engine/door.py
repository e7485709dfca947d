"""The door of `simulate`: every argument is checked before round 1; what is odd but possible is warned of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from numbers import Integral, Real
from typing import Any, overload

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from distillkit import check, sources
from distillkit.plausible import warn
from distillkit.privacy import Ledger
from distillkit.privacy.guards import refuse_measured, require_given_classes
from distillkit.sets import Images, LabeledImages, as_set
from fl.engine.holding import Holding
from fl.method import Method
from fl.task import Classification, Task

__all__ = [
    "Roster",
    "device_at",
    "drawn_count",
    "panel",
    "require_ledger",
    "server_sets",
    "task_at",
    "test_set",
]


def device_at(device: torch.device | str) -> torch.device:
    """The `device` as a `torch.device`, if this machine can compute on it.

    Raises:
        TypeError, ValueError: no device, or none that is here.
    """
    if not isinstance(device, str | torch.device):
        raise TypeError(f"device must be a torch.device or its name, got {type(device).__name__}")
    try:
        found = torch.device(device)
        torch.zeros((), device=found).item()
    except (RuntimeError, NotImplementedError, AssertionError) as error:
        here = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
        reason = str(error).splitlines()[0]
        raise ValueError(
            f"device {str(device)!r} cannot be used here ({reason}); there is {', '.join(here)}"
        ) from error
    return found


# The sets.


def _data(given: Any, name: str, progress: bool) -> LabeledImages:
    """What was given as a set, as one; a dataset, loader or pair is read."""
    if isinstance(given, LabeledImages):
        return given
    if not sources.is_source(given):
        raise TypeError(
            f"{name} must be a LabeledImages, a Dataset, or a pair of images and labels, got {type(given).__name__}; "
            "make a set with LabeledImages(images, labels, num_classes=..., normalization=...)"
        )
    return as_set(given, name=name, progress=progress)


def _grown(data: LabeledImages, classes: int, given: bool) -> LabeledImages:
    """The set with `classes` classes, if it has fewer and nobody said how many it has."""
    if data.classes_given or data.num_classes >= classes:
        return data
    return data.replace(num_classes=classes, classes_given=given)


def _require_like(first: LabeledImages, other: LabeledImages, name: str, *, classes: bool = True) -> None:
    """Refuse a set of another space, shape, dtype, class count or kind of labels than the first client's."""
    no_labels = torch.empty(0, dtype=torch.int64)
    try:
        first.require_same_space(
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


class Roster(Sequence[Holding]):
    """The clients of a run, each checked against the first: all at the door, or one by one as they are looked at.

    Datasets, loaders and pairs of images and labels are read into memory. A set that does not say how many classes
    there are has as many as `classes`, or the sets that say it, or else the largest of them.

    Args:
        clients: a list or tuple, which is checked whole, or another sequence (it may be long, and make its clients on
            demand), of which only the first is looked at here.
        classes: how many there are, if a task says so.
        progress: whether long reading shows a bar.

    Raises:
        TypeError: no sequence of sets.
        ValueError: no clients; a set that does not fit the first client's. Of a sequence that is checked as it is
            looked at, such a client fails in its round, by name.
    """

    def __init__(self, clients: Sequence[Images | Holding], classes: int | None = None, progress: bool = True) -> None:
        if isinstance(clients, type | LabeledImages | Tensor | Dataset | DataLoader | str | Mapping) or not (
            hasattr(clients, "__len__") and hasattr(clients, "__getitem__")
        ):
            raise TypeError(f"clients must be a sequence of sets, one a client, got one {type(clients).__name__}")
        if not len(clients):
            raise ValueError("clients must hold at least one client, a set each, got none")
        self.whole = isinstance(clients, list | tuple)
        self._clients, self._progress = clients, progress
        self._checked: list[Holding] = []
        read = [self._read(k) for k in range(len(clients) if self.whole else 1)]
        said = [h.train.num_classes for h in read if h.train.classes_given]
        self._said = classes is not None or bool(said)
        self._classes = classes or (said[0] if said else max(h.train.num_classes for h in read))
        self.first = self._fitting(read[0]).train
        if self.whole:
            self._checked = [self._fit(k, held) for k, held in enumerate(read)]

    def __len__(self) -> int:
        return len(self._clients)

    def _read(self, number: int) -> Holding:
        given, name = self._clients[number], f"clients[{number}]"
        if not isinstance(given, Holding):
            return Holding(_data(given, name, self._progress))
        test = None if given.test is None else _data(given.test, f"{name}.test", self._progress)
        return Holding(_data(given.train, f"{name}.train", self._progress), test)

    def _fitting(self, held: Holding) -> Holding:
        test = None if held.test is None else _grown(held.test, self._classes, self._said)
        return Holding(_grown(held.train, self._classes, self._said), test)

    @overload
    def __getitem__(self, number: int) -> Holding: ...
    @overload
    def __getitem__(self, number: slice) -> Sequence[Holding]: ...
    def __getitem__(self, number: int | slice) -> Holding | Sequence[Holding]:
        if isinstance(number, slice):
            return [self[k] for k in range(*number.indices(len(self)))]
        return self._checked[number] if self.whole else self._fit(number, self._read(number))

    def _fit(self, number: int, held: Holding) -> Holding:
        held = self._fitting(held)
        _require_like(self.first, held.train, f"clients[{number}]")
        if held.test is not None:
            _require_like(self.first, held.test, f"clients[{number}].test")
        return held


def task_at(task: Task | None, first: LabeledImages) -> Task:
    """The task, by default one class an image among as many as the first client's set has.

    Args:
        task: as it was given to `simulate`, or None.
        first: the first client's set.

    Raises:
        TypeError: no task.
        ValueError: a task of other labels, or of another class count, than the clients'.
    """
    rows = first.labels.ndim == 2
    if task is None:
        if rows:
            raise ValueError(
                "the clients' labels are rows: give task=MultiLabel(num_classes) if an image may have any number of "
                "classes, or class indices, `data.replace(labels=data.labels.argmax(1))`"
            )
        return Classification(first.num_classes)
    if isinstance(task, type) or not all(hasattr(task, n) for n in ("num_classes", "single_label", "loss", "sums")):
        got = f"the class {task.__name__}" if isinstance(task, type) else type(task).__name__
        raise TypeError(f"task must be an object, as Classification(10) or MultiLabel(10), got {got}")
    if task.num_classes != first.num_classes:
        raise ValueError(
            f"the task has {task.num_classes} classes, the clients' sets have {first.num_classes}; say how many there "
            "are with `data.replace(num_classes=...)`"
        )
    if task.single_label == rows:
        wanted, got = ("class indices [N]", "rows [N, K]") if rows else ("rows [N, K] of 0 and 1", "class indices [N]")
        raise ValueError(f"{task!r} wants labels as {wanted}, the clients have {got}")
    return task


def test_set(test: object, first: LabeledImages, progress: bool) -> LabeledImages | None:
    """The global test set, if it fits the clients' sets.

    Args:
        test: as it was given to `simulate`; a dataset, loader or pair is read.
        first: the first client's set.
        progress: whether long reading shows a bar.

    Raises:
        TypeError, ValueError: no set, an empty one, or one in another space.
    """
    if test is None:
        return None
    data = _grown(_data(test, "test", progress), first.num_classes, True)
    if not len(data):
        raise ValueError("test holds no images: leave it out, or give some")
    _require_like(first, data, "test")
    return data


def server_sets(given: Mapping[str, Images] | None, first: LabeledImages, progress: bool) -> dict[str, LabeledImages]:
    """The server's sets by name, if they are in the clients' space; their classes may be others (a proxy set's are).

    Args:
        given: `server_data` as it was given to `simulate`.
        first: the first client's set.
        progress: whether long reading shows a bar.

    Raises:
        TypeError, ValueError: no mapping of names to sets, an empty one, or one in another space.
    """
    if given is not None and not isinstance(given, Mapping):
        raise TypeError(f"server_data must map names to sets, as {{'proxy': data}}, got {type(given).__name__}")
    sets = {
        name: _grown(
            _data(data, f"server_data[{name!r}]", progress), first.num_classes if name == "validation" else 0, True
        )
        for name, data in (given or {}).items()
    }
    for name, data in sets.items():
        if not len(data):
            raise ValueError(f"server_data[{name!r}] holds no images: leave it out, or give some")
        _require_like(first, data, f"server_data[{name!r}]", classes=name == "validation")
    return sets


# Who takes part, and who is tested.


def drawn_count(participation: float | int, clients: int, min_replies: int, *, drawn_by_method: bool) -> int:
    """How many clients take part in a round.

    Args:
        participation: a share of the clients in (0, 1], or their number, as it was given to `simulate`.
        clients: how many there are.
        min_replies: the fewest usable replies that a round needs.
        drawn_by_method: whether the method draws its clients itself.

    Raises:
        TypeError, ValueError: no share in (0, 1] and no number of clients; fewer than `min_replies`; or anything but
            the defaults where the method draws.
    """
    check.positive_int(min_replies, "min_replies")
    if drawn_by_method and (isinstance(participation, Integral) or participation != 1.0 or min_replies != 1):
        raise ValueError(
            "the method draws its clients itself, and every round counts: leave participation at 1.0 and min_replies "
            f"at 1, got {participation} and {min_replies} (a privacy filter has a rate of its own)"
        )
    if isinstance(participation, Integral) and not isinstance(participation, bool):
        wanted = check.positive_int(int(participation), "participation")
        if wanted == 1 and clients > 1:
            warn(
                f"participation=1 is one client a round, of {clients}; all of them are participation=1.0 (one without "
                "this warning: participation=1 / len(clients))"
            )
    else:
        number = isinstance(participation, Real) and not isinstance(participation, bool)
        share = float(participation) if number else participation
        wanted = max(1, round(check.real_number(share, "participation", above=0.0, most=1.0) * clients))
    if wanted > clients:
        raise ValueError(f"participation asks for {wanted} clients, but there are {clients}")
    if min_replies > wanted:
        raise ValueError(f"min_replies is {min_replies}, but only {wanted} clients take part in a round")
    return wanted


def panel(evaluate: object, clients: int, *, private: bool) -> str | list[int]:
    """Whose own test images are used: "drawn", "all", "none", or clients' numbers.

    Args:
        evaluate: as it was given to `simulate`; None is the default: "drawn", and "none" in a private run.
        clients: how many there are.
        private: whether the method is private.

    Raises:
        TypeError, ValueError: another word, or numbers of clients that do not exist, or twice.
    """
    if evaluate is None:
        return "none" if private else "drawn"
    if isinstance(evaluate, str):
        return check.one_of(evaluate, "evaluate", ("drawn", "all", "none"))
    wanted = "evaluate must be 'drawn', 'all', 'none' or a list of clients' numbers"
    if isinstance(evaluate, type | Mapping) or not hasattr(evaluate, "__iter__"):
        raise TypeError(f"{wanted}, got {type(evaluate).__name__}")
    given = [n.item() if isinstance(n, Tensor) and n.ndim == 0 else n for n in evaluate]
    if not all(isinstance(n, Integral) and not isinstance(n, bool) for n in given):
        raise TypeError(f"{wanted}, got {given!r}")
    numbers = [int(n) for n in given]
    missing = [n for n in numbers if not 0 <= n < clients]
    if missing or not numbers or len(set(numbers)) < len(numbers):
        raise ValueError(f"{wanted}, each once, from 0 to {clients - 1}; got {numbers}")
    return numbers


def require_public(method: Method, first: LabeledImages, task: Task | None) -> None:
    """Refuse a private run whose images were normalised, or whose classes were counted, on the clients' own data.

    Args:
        method: what is to run; one that is not private is not looked at.
        first: the first client's set.
        task: as it was given to `simulate`: it says how many classes there are, or is None.

    Raises:
        PrivacyError: one of its kinds, with what to do.
    """
    if method.private:
        # A method with an option of that name has its own say (`PrivateFedDM`).
        if getattr(method.inner, "public_statistics", None) is None:
            refuse_measured(first.normalization, type(method.inner).__name__)
        if task is None:
            require_given_classes(first)


def require_ledger(method: Method, ledger: object, secret: object, out: object) -> None:
    """Refuse a ledger or a secret that a run would not use, or a ledger that would not outlive the run's folder.

    Args:
        method: what is to run.
        ledger, secret, out: as they were given to `simulate`.

    Raises:
        TypeError, ValueError: as said.
    """
    if ledger is not None and not isinstance(ledger, Ledger):
        raise TypeError(f"ledger must be a distillkit.privacy.Ledger, got {type(ledger).__name__}")
    for name, value in {"ledger": ledger, "secret": secret}.items():
        if value is not None and not method.private:
            raise ValueError(
                f"{name} is given, but the method is not private and charges nothing, so that it would promise what "
                "does not hold: leave it out, or take a private method (DPSGD, ClientDP, PrivateFedDM)"
            )
    if secret is not None:
        check.positive_int(secret, "secret", least=0)  # type: ignore[arg-type]
    if isinstance(ledger, Ledger) and ledger.path is None and out is not None:
        raise ValueError("ledger must outlive the process as the run in `out` does: give it a file, Ledger(path, ...)")
