"""What methods are compared on: which images, who holds them, which network, for how long, tested on what."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from distillkit._utils import check
from distillkit.data import Split, StoredSplit, clients
from distillkit.data._hold_out import hold_out, hold_out_values
from distillkit.data.partition import by_domain
from distillkit.networks import NETWORK_NAMES, named_network
from distillkit.sets import Images, LabeledImages, StoredImages, as_set

__all__ = ["Allocation", "Task", "as_split"]

_NATURAL = ("domain", "user")


@dataclass(frozen=True)
class Allocation:
    """Who holds what in one run of a task.

    Attributes:
        clients: the training set of each client; it may be empty.
        own_tests: the test set of each client, None for one without.
        test: what the run is tested on: the test set, or while settings are tried the validation set.
        server: what only the server holds, by name.
        owners: for each client the numbers of its records in the task's training set, int64 [n_k].
    """

    clients: Sequence[LabeledImages]
    own_tests: Sequence[LabeledImages | None]
    test: LabeledImages
    server: Mapping[str, LabeledImages]
    owners: Sequence[Tensor]


@dataclass(frozen=True)
class Task:
    """What methods are compared on, under one name: data, who holds them, network, schedule and evaluation.

    A `Study` runs every way on every task. A task is built of functions with their arguments
    (`functools.partial(load, "digits", size=16)`), so `distillkit.serialization` can write it to a file and rebuild it,
    which makes a run repeatable from its record. `distillkit.study.named_tasks` has ready ones, and makers for a
    folder, several folders, or a data set by name.

    Args:
        name: what tables and folders call it: letters, digits, `-`, `_` and `.`.
        data: gives the images when it is called, a `Split` (`partial(load_folder, "data/north", size=32)`), or a
            `StoredSplit`, whose clients and tests are then read a part at a time (`partial(open_folder, ...)`); or one
            of them, or a pair of training and test set as tensors, datasets or loaders, which is kept as it is.
        partition: who holds which training image. A function that returns one index tensor a client, as those of
            `distillkit.data.partition`; it is called with what its arguments are named after: `labels`, `generator`
            (the run's seed), or a column of the training set (`domains` or `domain` for the column `domain`).
            Default: a client for each value of the column `domain` or `user`, if the set has one of them.
        factory: what makes the network, called with the number of outputs; or a name, see
            `distillkit.networks.NETWORK_NAMES`, made for the images' shape.
        factory_options: further arguments for a named network, as `{"width": 32}`.
        rounds: of a federated run. A way may set its own.
        participation: of the clients in a round, as `fl.simulate` takes it: a share in (0, 1], or a number.
        evaluate: whose own tests are made after a round, as `fl.simulate` takes it.
        own_tests: share of each class of the training images that is held back for the clients' own tests, in [0, 1):
            always the same images, with whoever has them under a seed. No try trains on them or is judged by them.
        server_share: share of each class of the training images that nobody but the server holds (as `proxy`).
        validation: share of each class of the training images on which settings are tried, in (0, 1). A data set with
            a validation split of its own uses that one. It is never the test set.

    Raises:
        TypeError, ValueError: an argument is of the wrong kind or range; it is named.
    """

    name: str
    data: Callable[[], Split | StoredSplit] | Split | StoredSplit
    partition: Callable[..., Sequence[Tensor]] | None = None
    factory: Callable[[int], nn.Module] | str = "convnet"
    factory_options: Mapping[str, Any] = field(default_factory=dict)
    rounds: int = 10
    participation: float | int = 1.0
    evaluate: Literal["drawn", "all", "none"] | None = None
    own_tests: float = 0.0
    server_share: float = 0.0
    validation: float = 0.2

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name or not set(self.name) <= _LETTERS:
            raise ValueError(
                f"name must be of letters, digits, '-', '_' and '.', as it names folders, got {self.name!r}"
            )
        if isinstance(self.data, tuple | list):
            object.__setattr__(self, "data", as_split(*self.data))
        if not isinstance(self.data, Split | StoredSplit):
            check.callable_with(self.data, "data", [], "partial(load, 'digits', size=16), or a pair (train, test)")
        if self.partition is not None and not callable(self.partition):
            raise TypeError(
                "partition must be a function as partial(partition.dirichlet, clients=10, alpha=0.1), got "
                f"{type(self.partition).__name__}"
            )
        if isinstance(self.factory, str):
            check.one_of(self.factory, "factory", NETWORK_NAMES)
        else:
            check.callable_with(self.factory, "factory", ["outputs"], "partial(ConvNet, (3, 32, 32))", classes=True)
            if self.factory_options:
                raise ValueError("factory_options are for a network's name; give them with partial(...) to a function")
        check.positive_int(self.rounds, "rounds")
        for name in ("own_tests", "server_share"):
            check.real_number(getattr(self, name), name, least=0.0, below=1.0)
        check.real_number(self.validation, "validation", above=0.0, below=1.0)

    def load(self) -> Split:
        """Read the images: the training and the test set, and where there is one the validation set.

        Those of a `StoredSplit` stay in their file: what is dealt to clients and tested on is a `StoredImages` then.
        """
        found = self.data if isinstance(self.data, Split | StoredSplit) else self.data()
        return cast(Split, found)  # what is done with a split here is done with either

    def network(self, split: Split) -> Callable[[int], nn.Module]:
        """What makes the network for the images that `load` gave as `split`; called with the number of outputs."""
        if not isinstance(self.factory, str):
            return self.factory
        return partial(named_network, self.factory, split.train.shape, **self.factory_options)

    def assign(self, split: Split, seed: int, *, validation: bool = False, keep: Tensor | None = None) -> Allocation:
        """Say who holds what in the run with this seed.

        Args:
            split: what `load` gave.
            seed: of the run; the partition is drawn from it.
            validation: for trying settings: the validation part is the test set, and nobody trains on it.
            keep: numbers of training records, int [M]: every client has only those of its records that are among them,
                and each record is with the client that has it in the whole run. Tests and the server's share stay.

        Raises:
            ValueError: `partition` asks for what the set does not have, or does not deal as it must.
        """
        train = split.train
        pool, test, server = self._pool(split, validation)
        owners = [pool[part] for part in self._parts(train, pool, seed)]
        tests: list[LabeledImages | None] = [None] * len(owners)
        if self.own_tests:
            tested = torch.zeros(len(train), dtype=torch.bool)
            tested[_held_back(train, pool, self.own_tests)[1]] = True
            held = [part[tested[part]] for part in owners]
            owners = [part[~tested[part]] for part in owners]
            tests = [train[part] if len(part) else None for part in held]
        owners = [_among(part, keep, len(train)) for part in owners]
        return Allocation(clients(train, owners), tests, test, server, owners)

    def pooled(
        self, split: Split, *, validation: bool = False, keep: Tensor | None = None
    ) -> tuple[LabeledImages, LabeledImages]:
        """All training images that clients would share, in one set, and what is tested on: for ways without clients.

        Those of the clients' own tests are not among them.

        Args:
            split, validation, keep: see `assign`.
        """
        pool, test, _ = self._pool(split, validation)
        if self.own_tests:
            pool, _ = _held_back(split.train, pool, self.own_tests)
        return _in_memory(split.train[_among(pool, keep, len(split.train))]), _in_memory(test)

    def _pool(self, split: Split, validation: bool) -> tuple[Tensor, LabeledImages, dict[str, LabeledImages]]:
        """Who may be dealt to clients, what is tested on, and what the server holds."""
        train, test, server = split.train, split.test, {}
        pool = torch.arange(len(train))
        if self.server_share:
            pool, held = _held_back(train, pool, self.server_share)
            server["proxy"] = _in_memory(train[held])
        if validation and split.validation is not None:
            test = split.validation
        if validation and self.own_tests:
            pool, _ = _held_back(train, pool, self.own_tests)
        if validation and split.validation is None:
            pool, held = _held_back(train, pool, self.validation)
            test = train[held]
        return pool, test, server

    def _parts(self, train: LabeledImages, pool: Tensor, seed: int) -> Sequence[Tensor]:
        deal = self.partition
        if deal is None:
            natural = [name for name in _NATURAL if name in train.columns]
            if len(natural) != 1:
                raise ValueError(
                    f"partition must be given, as partial(partition.dirichlet, clients=10, alpha=0.1): the images of "
                    f"{self.name} do not say whose they are (their columns: {', '.join(train.columns) or 'none'})"
                )
            return by_domain(train.columns[natural[0]][pool])
        given: dict[str, Any] = {}
        bound = set(deal.keywords) if isinstance(deal, partial) else set()
        for name, parameter in inspect.signature(deal).parameters.items():
            column = name if name in train.columns else name.removesuffix("s")
            if name in bound:
                continue
            if name == "labels":
                given[name] = train.labels[pool]
            elif name == "generator":
                given[name] = seed
            elif column in train.columns:
                given[name] = train.columns[column][pool]
            elif parameter.default is parameter.empty and parameter.kind not in (
                parameter.VAR_POSITIONAL,
                parameter.VAR_KEYWORD,
            ):
                raise ValueError(
                    f"partition wants {name!r}, which is neither labels nor generator nor a column of {self.name} "
                    f"({', '.join(train.columns) or 'it has none'}); give it as partial(..., {name}=...)"
                )
        return deal(**given)


def as_split(train: Images, test: Images, validation: Images | None = None) -> Split:
    """Make the `Split` that a `Task` takes of sets, pairs of tensors, datasets or loaders.

    Args:
        train, test: the training and the test images.
        validation: images on which settings are tried; without them a part of the training images is held back.

    Raises:
        TypeError, ValueError: no sets, or sets of different spaces.
    """
    given = {"train": train, "test": test, "validation": validation}
    sets = {name: as_set(one, name=name) for name, one in given.items() if one is not None}
    said = [one.num_classes for one in sets.values() if one.classes_given]
    most = said[0] if said else max(one.num_classes for one in sets.values())
    sets = {n: one if one.classes_given else one.replace(num_classes=most) for n, one in sets.items()}
    for one in sets.values():
        sets["train"].require_compatible(one)
    return Split(sets["train"], sets["test"], tuple(map(str, range(most))), sets.get("validation"))


_LETTERS = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_.")


def _in_memory(data: Any) -> LabeledImages:
    return data.read() if isinstance(data, StoredImages) else data


def _together(train: LabeledImages) -> Tensor | None:
    """What must not be on both sides of a cut, if the set was cut so before (`split_by`)."""
    return train.columns.get(str(train.info.get("apart")))


def _held_back(train: LabeledImages, rows: Tensor, share: float) -> tuple[Tensor, Tensor]:
    """`hold_out` among the `rows` of a set; of multi-label images, a share of all."""
    own = train.labels[rows] if train.labels.ndim == 1 else torch.zeros(len(rows), dtype=torch.int64)
    together = _together(train)
    kept, held = hold_out(own, share) if together is None else hold_out_values(own, together[rows], share)
    return rows[kept], rows[held]


def _among(rows: Tensor, keep: Tensor | None, count: int) -> Tensor:
    """Those of the `rows` of a set of `count` records that are kept."""
    if keep is None:
        return rows
    keep = torch.as_tensor(keep)
    if keep.ndim != 1 or keep.is_floating_point() or keep.dtype == torch.bool:
        raise TypeError(f"keep must be numbers of training records, int [M], got {keep.dtype} {list(keep.shape)}")
    if len(keep) and not (int(keep.min()) >= 0 and int(keep.max()) < count):
        raise ValueError(f"keep must be numbers in [0, {count}), got {int(keep.min())} to {int(keep.max())}")
    kept = torch.zeros(count, dtype=torch.bool)
    kept[keep] = True
    return rows[kept[rows]]
