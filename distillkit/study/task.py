"""Tasks of a study: data, partition among clients, network, number of rounds and evaluation."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from numbers import Integral
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from distillkit._evaluation_checks import check_test_images
from distillkit._utils import check
from distillkit._utils.options import Decay, Options, PositiveInt, Share, check_options
from distillkit.data import Split, StoredSplit, clients
from distillkit.data._allocation import as_index_tensors
from distillkit.data._hold_out import (
    HoldOut,
    hold_out,
    hold_out_classes,
    hold_out_content,
    hold_out_values,
    record_digests,
    stricter,
)
from distillkit.data.partition import by_domain
from distillkit.networks import NETWORK_NAMES, named_network
from distillkit.sets import Images, LabeledImages, StoredImages, as_set
from distillkit.sets._class_index import class_labels
from distillkit.sets._validation import require_same_order

_NATURAL = ("domain", "user")


@dataclass(frozen=True)
class Allocation:
    """Allocation of a task's images to clients, tests and the server in one run.

    Attributes:
        clients: training set of each client, which may be empty.
        own_tests: for each client, a test set of images that are assigned to this client and not used for training;
            None for a client without a test set.
        test: test set of the run; in tuning runs, the validation set.
        server: sets that only the server has, by name.
        owners: for each client, the indices of its records in the task's training set, int64 [n_k].
    """

    clients: Sequence[LabeledImages]
    own_tests: Sequence[LabeledImages | None]
    test: LabeledImages
    server: Mapping[str, LabeledImages]
    owners: Sequence[Tensor]


@dataclass(frozen=True)
class Task:
    """A task of a study: data, partition among clients, network, number of rounds and evaluation.

    A `Study` compares candidates (methods with their settings), and runs every candidate on every task. Pass functions
    as `functools.partial(load, "digits", size=16)` instead of lambdas, so that `distillkit.serialization` can write the
    task to a file and rebuild it. `named_task` returns common tasks by name.

    Args:
        name: name in tables and folders, made of letters, digits, `-`, `_` and `.`.
        data: function that returns a `Split` (`partial(load_folder, "data/north", size=32)`), or a `StoredSplit`, whose
            images stay on disk until a client or a test uses them (`partial(open_folder, ...)`). You can also pass a
            `Split`, or a pair of training and test set (tensors, datasets or loaders), which is kept in memory.
        partition: function that partitions the training images and returns one index tensor per client, such as a
            function in `distillkit.data.partition`. A study passes the arguments that the function declares: `labels`,
            `generator` (the run's seed), and columns of the training set. The argument for the column `domain` is
            called `domain` or `domains`. Default: one client per value of the column `domain` or `user`.
        factory: function that returns a network for a number of outputs; or a name in
            `distillkit.networks.NETWORK_NAMES`, for a network that fits the images' shape.
        factory_options: additional arguments of a named network, for example `{"width": 32}`.
        rounds: number of rounds of a federated run. A candidate may set another number.
        participation: share in (0, 1] of the clients that take part in a round, or their number; see `fl.simulate`.
        evaluate: clients whose test sets are evaluated after each round: "drawn" (the clients that took part in the
            round), "all" or "none"; None for the default of `fl.simulate`.
        own_tests: share of each class of the training images, in [0, 1), that is held out to give each client its own
            test set. The held-out images are the same for all seeds, but the seed determines which client tests on an
            image. Tuning runs, which choose the best settings of a method, do not use the held-out images. Instead,
            they hold out the same share of the remaining training images.
        server_share: share, in [0, 1), of each class of the training images that is given to the server instead of the
            clients. A federated method finds this set among the server's sets under the name "proxy".
        validation: share of each class of the training images that is used for validation in tuning runs, in (0, 1). If
            the data set has its own validation split, that split is used instead. The test set is never used.
        hold_out: choice of the images that `own_tests`, `server_share` and `validation` hold out. "random": an even
            share of each class. "content": a keyed hash of its content (or of its value in the column of `split_by`)
            decides for each image, whatever the other images are. Private methods require "content".

    Raises:
        TypeError, ValueError: an argument is invalid; the message names it.
    """

    name: str
    data: Callable[[], Split | StoredSplit] | Split | StoredSplit
    partition: Callable[..., Sequence[Tensor]] | None = None
    factory: Callable[[int], nn.Module] | str = "convnet"
    factory_options: Options = field(default_factory=dict)
    rounds: PositiveInt = 10
    participation: float | int = 1.0
    evaluate: Literal["drawn", "all", "none"] | None = None
    own_tests: Decay = 0.0
    server_share: Decay = 0.0
    validation: Share = 0.2
    hold_out: HoldOut = "random"

    def __post_init__(self) -> None:
        check_options(self)
        if not self.name or not set(self.name) <= _LETTERS:
            raise ValueError(
                f"name must consist of letters, digits, '-', '_' and '.', because it names folders; got {self.name!r}"
            )
        if isinstance(self.data, tuple | list):
            if len(self.data) not in (2, 3):
                got = f"{len(self.data)} values"
                raise ValueError(f"data must be a function, a Split, or a pair (train, test), got {got}")
            object.__setattr__(self, "data", as_split(*self.data))
        if not isinstance(self.data, Split | StoredSplit):
            check.callable_with(self.data, "data", [], "partial(load, 'digits', size=16), or a pair (train, test)")
        if isinstance(self.data, Split) and isinstance(self.data.train, LabeledImages):
            check_test_images(self.data.test, {"train": self.data.train, "validation": self.data.validation})
        if self.partition is not None and not callable(self.partition):
            wanted = "a function such as partial(partition.dirichlet, clients=10, alpha=0.1)"
            raise TypeError(f"partition must be {wanted}, got {type(self.partition).__name__}")
        if isinstance(self.factory, str):
            check.one_of(self.factory, "factory", NETWORK_NAMES)
        else:
            check.callable_with(self.factory, "factory", ["outputs"], "partial(ConvNet, (3, 32, 32))", classes=True)
            if self.factory_options:
                raise ValueError("factory_options are for a named network; pass options of a function by partial(...)")
        if isinstance(self.participation, Integral) and not isinstance(self.participation, bool):
            check.positive_int(int(self.participation), "participation")
        else:
            check.real_number(self.participation, "participation", above=0.0, most=1.0)

    def load(self) -> Split:
        """Read the images: training and test set, and validation set if there is one.

        If the result is a `StoredSplit`, its images stay in their file.
        """
        split = self.data if isinstance(self.data, Split | StoredSplit) else self.data()
        if not isinstance(split, Split | StoredSplit):
            raise TypeError(
                f"data must return a Split, as the loaders of distillkit.data do, got {type(split).__name__}; as_split("
                "train, test) makes one"
            )
        return cast(Split, split)  # a `StoredSplit` supports all uses below

    def network(self, split: Split) -> Callable[[int], nn.Module]:
        """Return a network factory for the images of `split`. The factory's argument is the number of outputs."""
        if not isinstance(self.factory, str):
            return self.factory
        return partial(named_network, self.factory, split.train.shape, **self.factory_options)

    def assign(self, split: Split, seed: int, *, validation: bool = False, keep: Tensor | None = None) -> Allocation:
        """Allocate the images to the clients, the test sets and the server, for the run with this seed.

        Args:
            split: the images, from `load`.
            seed: seed of the run, from which the partition is drawn.
            validation: whether this is a tuning run. The validation data are then the test set, and no client trains on
                them.
            keep: indices of the training records to keep, int [M]. Each kept record stays with its client. The test
                sets and the server's sets do not change.

        Raises:
            ValueError: the task's function `partition` has an argument that is neither `labels`, `generator` nor a
                column of the training set, or it returns an invalid partition.
        """
        check.instance(split, Split | StoredSplit, "split", "a Split, as Task.load returns it")
        pool, test, server = self._pool(split, validation)
        train = self._marked(split, validation)
        owners = [pool[part] for part in self._parts(train, pool, seed)]
        tests: list[LabeledImages | None] = [None] * len(owners)
        if self.own_tests:
            tested = torch.zeros(len(train), dtype=torch.bool)
            tested[self._hold_out(train, pool, self.own_tests, "own tests", validation)[1]] = True
            test_rows = [part[tested[part]] for part in owners]
            owners = [part[~tested[part]] for part in owners]
            tests = [train[part] if len(part) else None for part in test_rows]
        owners = [_kept_rows(part, keep, len(train)) for part in owners]
        return Allocation(clients(train, owners), tests, test, server, owners)

    def pooled(
        self, split: Split, *, validation: bool = False, keep: Tensor | None = None
    ) -> tuple[LabeledImages, LabeledImages]:
        """Return the training images of all clients as one set, and the test set.

        Use this function for methods without clients.

        Images that the task's option `own_tests` holds out for the clients' own test sets are not among the training
        images.

        Args:
            split, validation, keep: arguments of `assign`.
        """
        pool, test, _ = self._pool(split, validation)
        if self.own_tests:
            pool, _ = self._hold_out(split.train, pool, self.own_tests, "own tests", validation)
        return _in_memory(self._marked(split, validation)[_kept_rows(pool, keep, len(split.train))]), _in_memory(test)

    def _pool(self, split: Split, validation: bool) -> tuple[Tensor, LabeledImages, dict[str, LabeledImages]]:
        """Return the indices of the training images for clients, int64 [M], the test set, and the server's sets."""
        train, test, server = split.train, split.test, {}
        pool = torch.arange(len(train))
        if self.server_share:
            pool, proxy = self._hold_out(train, pool, self.server_share, "server")
            server["proxy"] = _in_memory(train[proxy])
        if validation and split.validation is not None:
            test = split.validation
        if validation and self.own_tests:
            pool, _ = self._hold_out(train, pool, self.own_tests, "own tests")
        if validation and split.validation is None:
            pool, rows = self._hold_out(train, pool, self.validation, "validation")
            test = train[rows]
        return pool, test, server

    def _hold_out(
        self, train: LabeledImages, rows: Tensor, share: float, purpose: str, tuning: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Split `rows`, indices of images in `train`, into a part to keep and a held-out `share` (of each class).

        Multi-label images count as one class. With `hold_out="content"`, the decisions for different purposes, and
        those among the images that a tuning run has left, are independent.
        """
        groups = train.columns.get(str(train.info.get("apart")))  # set by `split_by`: equal values stay together
        if self.hold_out == "content":
            values = record_digests(train[rows]) if groups is None else [str(v).encode() for v in groups[rows].tolist()]
            kept, held_out = hold_out_content(values, share, f"{purpose} of tuning" if tuning else purpose)
        else:
            own = train.labels[rows] if train.labels.ndim == 1 else torch.zeros(len(rows), dtype=torch.int64)
            kept, held_out = hold_out(own, share) if groups is None else hold_out_values(own, groups[rows], share)
        return rows[kept], rows[held_out]

    def _marked(self, split: Split, validation: bool) -> LabeledImages:
        """Return the training set, whose `info` says how records were held out."""
        held = self.server_share or self.own_tests or (validation and split.validation is None)
        made = stricter(split.train.info.get("hold_out"), self.hold_out if held else None)
        return split.train.replace(info={**split.train.info, **made}) if made else split.train

    def _parts(self, train: LabeledImages, pool: Tensor, seed: int) -> Sequence[Tensor]:
        partition = self.partition
        if partition is None:
            natural = [name for name in _NATURAL if name in train.columns]
            if len(natural) != 1:
                raise ValueError(
                    f"partition must be given for {self.name}, such as partial(partition.dirichlet, clients=10, "
                    f"alpha=0.1): its images have no single column domain or user, but "
                    f"{', '.join(train.columns) or 'none'}"
                )
            return by_domain(train.columns[natural[0]][pool])
        sources = {**train.columns, "labels": train.labels, "generator": seed}
        given: dict[str, Any] = {}
        for name, parameter in inspect.signature(partition).parameters.items():
            if name in getattr(partition, "keywords", {}):
                continue
            column = name if name in sources else name.removesuffix("s")
            if column in sources:
                value = sources[column]
                given[name] = value[pool] if isinstance(value, Tensor) else value
            elif parameter.default is parameter.empty and parameter.kind not in (
                parameter.VAR_POSITIONAL,
                parameter.VAR_KEYWORD,
            ):
                raise ValueError(
                    f"partition has an argument {name!r}, which is not labels, generator or a column of {self.name} "
                    f"({', '.join(train.columns) or 'none'}); pass it by partial(..., {name}=...)"
                )
        try:
            return as_index_tensors(partition(**given), len(pool))
        except ValueError as error:
            if len(pool) == len(train):
                raise
            shares = ", ".join(f"{name}={getattr(self, name)}" for name in ("server_share", "own_tests", "validation"))
            raise ValueError(
                f"{error}. The clients have {len(pool)} of {len(train)} images: {shares} hold out the others"
            ) from error


def as_split(train: Images, test: Images | None = None, validation: Images | None = None) -> Split:
    """Return a `Split` for a `Task`, from images in any form that `as_set` accepts.

    Args:
        train: training images.
        test: test images. Default: a random fifth of each class of `train`, the same in every call.
        validation: images for tuning runs; default: a part of the training images.

    Raises:
        TypeError, ValueError: an argument cannot be converted to a set, or the sets differ in shape, normalization or
            classes.
    """
    if test is None:
        whole = as_set(train, name="train")
        names = whole.class_names or tuple(map(str, range(whole.num_classes)))
        parts = hold_out_classes(class_labels(whole).cpu(), names, 0.2)
        train, test = (whole[rows].replace(info={**whole.info, "hold_out": "random"}) for rows in parts)
    given = {"train": train, "test": test, "validation": validation}
    sets = {name: as_set(one, name=name) for name, one in given.items() if one is not None}
    given_counts = [one.num_classes for one in sets.values() if one.classes_given]
    num_classes = given_counts[0] if given_counts else max(one.num_classes for one in sets.values())
    longest = max(sets, key=lambda name: len(sets[name].class_names))
    for name, one in sets.items():  # names are lost below if the number of classes changes
        if one.class_names:
            require_same_order(sets[longest].class_names, one.class_names, (longest, name))
    known: dict[str, Any] = {"num_classes": num_classes, "classes_given": bool(given_counts)}
    sets = {n: one if one.classes_given else one.replace(**known) for n, one in sets.items()}
    for name, one in sets.items():
        sets["train"].require_compatible(one, names=("train", name))
    names = sets["train"].class_names
    return Split(sets["train"], sets["test"], names or tuple(map(str, range(num_classes))), sets.get("validation"))


_LETTERS = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_.")


def _in_memory(data: Any) -> LabeledImages:
    return data.read() if isinstance(data, StoredImages) else data


def _kept_rows(rows: Tensor, keep: Tensor | None, count: int) -> Tensor:
    """Return the `rows` (indices of the `count` training records) that are also in `keep`; all if it is None."""
    if keep is None:
        return rows
    if not isinstance(keep, Tensor):
        keep = torch.as_tensor(check.sequence(keep, "keep", "numbers of training records"))
    if keep.ndim != 1 or keep.is_floating_point() or keep.dtype == torch.bool:
        raise TypeError(f"keep must be numbers of training records, int [M], got {keep.dtype} {list(keep.shape)}")
    if len(keep) and not (int(keep.min()) >= 0 and int(keep.max()) < count):
        raise ValueError(f"keep must be numbers in [0, {count}), got {int(keep.min())} to {int(keep.max())}")
    kept = torch.zeros(count, dtype=torch.bool)
    kept[keep] = True
    return rows[kept[rows]]
