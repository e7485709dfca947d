"""Options of a run, as dataclasses whose fields become keywords of `simulate` and of the Flower apps."""

from __future__ import annotations

import functools
import inspect
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Concatenate, Generic, Literal, ParamSpec, TypeVar, overload

import torch

from distillkit._utils import check
from distillkit.privacy import Ledger
from distillkit.sets import Images, StoredImages
from fl.task import LabelTask

__all__ = ["RunConfig", "RunFolder", "SimulationConfig", "options"]

P = ParamSpec("P")
A = TypeVar("A")
B = TypeVar("B")
C = TypeVar("C")
D = TypeVar("D")
E = TypeVar("E")
R = TypeVar("R")


@dataclass(frozen=True)
class RunFolder:
    """Folder for a run's files, with options. Pass it as the argument `out` of `fl.simulate` in place of a path.

    Args:
        path: folder for config.json, history.jsonl and checkpoint/.
        transcript: whether to save every message that the server sends and accepts, under transcript/. The query that
            some methods send to clients before round 1 (`Method.answer`) is included. Evaluation results are not saved.
        notes: JSON values that are written to config.json under "notes", such as the source of the data. You may
            change them when you resume a run.
        deadline: time, as from `time.time()`, after which the run ends with `fl.participants.Interrupted`. The run
            first finishes and saves the current round or, if a client is condensing its data, the current step of the
            condensation. Continue with `resume=True`.
        cache: folder of condensed sets that several runs share. If data, networks, seed and options are equal, a client
            loads its first set from there instead of condensing it (see `fl.addons.Condensed`). Private runs do not use
            the cache.
    """

    path: str | Path
    transcript: bool = False
    notes: Mapping[str, Any] | None = None
    deadline: float | None = None
    cache: str | Path | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.path, str | Path):
            raise TypeError(f"out must be a folder's path or a RunFolder(path, ...), got {type(self.path).__name__}")
        if self.cache is not None:
            check.folder(self.cache, "cache")
        check.boolean(self.transcript, "transcript")
        if self.notes is not None:
            check.mapping(self.notes, "notes")
            try:
                json.dumps(dict(self.notes))
            except (TypeError, ValueError) as error:
                raise TypeError(f"notes must be a mapping of JSON values: {error}") from error
        if self.deadline is not None:
            check.real_number(self.deadline, "deadline")


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Options that every run has, whether its clients run on this machine or on other machines.

    Pass these options as keywords to `fl.simulate` or `fl.deploy.flower.serve`. They are recorded in config.json.

    Args:
        rounds: number of rounds. When you resume a run, you may give more rounds than before.
        test: global test set, on which the global models are evaluated after every round; a `StoredImages` is read in
            parts.
        task: label task, which defines the loss and the form of labels: `Classification` or `MultiLabel`. Default:
            `Classification` with the first client's number of classes.
        server_data: sets that only the server has, by name.
        participation: how many clients are drawn in each round, without replacement. A float is the share of all
            clients, in (0, 1]; an int is the number of clients. Do not set `participation` or `min_replies` for a
            method that draws its clients itself and in secret (such as `ClientDP`).
        min_replies: minimum number of usable replies in a round, that is, of replies that arrive and are valid. If
            there are fewer, the run ends with `NoUsableReply`, and the last completed round is kept.
        evaluate: clients that are evaluated on their own test images after each round: "drawn" (the clients drawn in
            that round), "all", "none", or a list of client indices. Default: "none" for private methods and secure
            sums, because evaluation results contain no noise; "drawn" for all other methods. Epsilon does not cover
            evaluation results. If you set this option for a private method, the ledger and every row of the history
            state this limitation.
        seed: seed of all randomness except the noise of a private method.
        ledger: privacy ledger of a private method, with its delta and budget. Default: a ledger in `out`/ledger.jsonl
            (in memory without `out`) with delta 1e-5 and no budget. A ledger is never rolled back: a repeated round is
            charged again.
        secret: seed for the noise of a private method, if you want to repeat a run exactly. Such a run has no privacy
            guarantee, and its files say so. None draws the noise from the operating system.
        server_threads: number of intra-op threads of the server. This number affects rounding, so it is recorded.
        device: device on which clients and server compute.
        out: folder for config.json, history.jsonl and checkpoint/, or a `RunFolder`. If None, no files are written.
        resume: whether to continue the run in `out` after its last completed round. If the run is already finished, it
            is returned without changes.
        on_round: function that is called after each round with a copy of the round's row of the history.
    """

    rounds: int
    test: Images | StoredImages | None = None
    task: LabelTask | None = None
    server_data: Mapping[str, Images] | None = None
    participation: float | int = 1.0
    min_replies: int = 1
    evaluate: Literal["drawn", "all", "none"] | Sequence[int] | None = None
    seed: int = 0
    ledger: Ledger | None = None
    secret: int | None = None
    server_threads: int = 1
    device: torch.device | str = "cpu"
    out: str | Path | RunFolder | None = None
    resume: bool = False
    on_round: Callable[[dict[str, Any]], None] | None = None

    @property
    def folder(self) -> RunFolder | None:
        """The option `out` as a `RunFolder`; None if the run writes no files."""
        return self.out if isinstance(self.out, RunFolder | None) else RunFolder(self.out)


@dataclass(frozen=True, kw_only=True)
class SimulationConfig(RunConfig):
    """Options of `fl.simulate`: the options of any run, and the options for clients on this machine.

    Args:
        workers: number of clients that run in parallel, each in a thread with one intra-op thread.
        progress: whether to show a progress bar of the rounds, on a terminal or in a notebook.
    """

    workers: int = 1
    progress: bool = True


class options(Generic[P, C]):
    """Decorator that lets callers pass the fields of a config object as keywords, instead of the object itself.

    The config must be the last argument of the decorated function. In the function's signature and in the `Args`
    section of its docstring, the config's fields replace this argument.

    Args:
        config: class of the config: a dataclass with keyword-only fields.
    """

    def __init__(self, config: Callable[P, C]) -> None:
        self.config = config

    @overload
    def __call__(self, function: Callable[[A, B, C], R]) -> Callable[Concatenate[A, B, P], R]: ...
    @overload
    def __call__(self, function: Callable[[A, B, D, E, C], R]) -> Callable[Concatenate[A, B, D, E, P], R]: ...
    @overload
    def __call__(self, function: Callable[[A, C], R]) -> Callable[Concatenate[A, P], R]: ...
    def __call__(self, function: Callable[..., R]) -> Callable[..., R]:
        """Return a wrapper of `function` that takes keywords in place of a config object.

        The config object is the last argument of `function`. Callers of the wrapper pass the fields of this object as
        keywords. The wrapper creates the object and calls `function` with it.
        """
        config, name = self.config, getattr(function, "__name__", "")
        *first, last = inspect.signature(function).parameters.values()
        fields = inspect.signature(config).parameters
        signature = inspect.Signature(
            [*first, *fields.values()], return_annotation=inspect.signature(function).return_annotation
        )

        @functools.wraps(function)
        def call(*args: Any, **keywords: Any) -> R:
            try:
                given = signature.bind(*args, **keywords).arguments
            except TypeError as error:
                raise TypeError(f"{name}() {error}") from None
            return function(*(given.pop(p.name) for p in first), config(**given))  # type: ignore[call-arg]

        call.__signature__ = signature  # type: ignore[attr-defined]
        call.__annotations__ = {**function.__annotations__, **{n: f.annotation for n, f in fields.items()}}
        call.__annotations__.pop(last.name)
        call.__doc__ = re.sub(rf"\n +{last.name}: .*", "\n" + _descriptions(config), function.__doc__ or "", count=1)
        return call


def _descriptions(config: Any) -> str:
    """Return the text of the `Args` sections of a dataclass and of its base classes, base classes first."""
    bases = [base for base in reversed(config.__mro__) if "__dataclass_fields__" in vars(base)]
    found = [re.search(r"    Args:\n(.*?)\n *(?:\n|$)", base.__doc__ or "", re.S) for base in bases]
    return "\n".join(match[1] for match in found if match)
