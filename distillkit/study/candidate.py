"""What a study compares: one method with its settings and its tries, and how a run of it is done."""

from __future__ import annotations

import inspect
import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeVar

from torch import Tensor

from distillkit._utils import check
from distillkit.data import Split
from distillkit.privacy import Ledger
from distillkit.study._selection import RULES
from distillkit.study.task import Task

__all__ = ["Candidate", "Cost", "Job", "accepted", "grid", "privacy_columns"]

Self = TypeVar("Self", bound="Candidate")


def grid(**options: Sequence[Any]) -> list[dict[str, Any]]:
    """Return all combinations of settings, for `search=`: `grid(lr=[0.03, 0.1], mu=[0.01, 0.1])` is four of them.

    Args:
        options: for each setting the values to try; the last one changes fastest.

    Raises:
        TypeError, ValueError: no values for a setting.
    """
    for name, values in options.items():
        if not check.sequence(values, name, f"the values of {name} to try"):
            raise ValueError(f"{name} must have at least one value to try, got none")
    return [dict(zip(options, values)) for values in itertools.product(*options.values())]


@dataclass(frozen=True)
class Job:
    """One run that a study asks of a way.

    Attributes:
        run: its name, and that of its folder.
        folder: where everything of it is written.
        task, split: what it runs on, and its images.
        seed: everything random follows from it.
        settings: what was chosen for this run, beside the way's own.
        validation: whether this is a try: tested on the validation part, which nobody trains on.
        keep: numbers of the training records that clients have of theirs; None for all.
        partition_seed: the seed that says who holds what, if it is another one: of a run that is repeated under `seed`.
        notes: what `config.json` must say for the run to be repeated.
        workers: threads that run clients.
        device: where to compute.
        progress: whether long work shows a bar.
    """

    run: str
    folder: Path
    task: Task
    split: Split
    seed: int
    settings: Mapping[str, Any] = field(default_factory=dict)
    validation: bool = False
    keep: Tensor | None = None
    partition_seed: int | None = None
    notes: Mapping[str, Any] = field(default_factory=dict)
    workers: int = 1
    device: str = "cpu"
    progress: bool = False


@dataclass(frozen=True)
class Cost:
    """What one run is expected to take, from a short trial of it.

    Attributes:
        seconds: of wall time.
        bytes_up, bytes_down: what travels; None where nothing does.
    """

    seconds: float
    bytes_up: int | None = None
    bytes_down: int | None = None


@dataclass(frozen=True)
class Candidate(ABC):
    """One thing that a study compares with others: how it is made from settings, and which settings are tried.

    `fl.study.Federated` runs a federated method, `distillkit.study.Condense` makes a small set and trains networks on
    it. For a way of another kind, write a frozen dataclass that has this one as its base, at the top level of a module.

    Args:
        make: builds what is run; called with `factory`, the task's network, and the settings by name:
            `lambda factory, lr, mu: FedAvg(FedProx(mu), factory=factory, lr=lr)`. One that has an argument `task` gets
            the `Task` too. It may be a lambda: the record of a run holds what was built, not how.
        search: configurations to try, one mapping each; see `grid`. All candidates of a study have equally many.
        settings: settings that every try has.
        like: another way of the study, whose chosen settings this one takes instead of having tries: for a control that
            must differ in one thing only.
        rule: by what its best try is chosen, "last" or "own", in place of the study's rule: a personal method is for
            the clients' own tests. Whom it is held against there should be chosen by them too.
        tasks, seeds: the study's tasks that it is tried and run on, by name, and the study's seeds that it is run
            with, where an ablation needs no more than one; default all.

    Attributes:
        failures: what a run may raise because its settings are bad; such a try counts as the worst.
    """

    make: Callable[..., Any] | None
    search: Sequence[Mapping[str, Any]] = ({},)
    settings: Mapping[str, Any] = field(default_factory=dict)
    like: str | None = None
    rule: Literal["last", "own"] | None = None
    tasks: Sequence[str] | None = field(default=None, kw_only=True)
    seeds: Sequence[int] | None = field(default=None, kw_only=True)

    failures: ClassVar[tuple[type[Exception], ...]] = (FloatingPointError,)
    old_options: ClassVar[Mapping[str, str]] = {"search": "tries"}
    """Names that records have for options, by their present names."""

    def __post_init__(self) -> None:
        if self.make is not None and not callable(self.make):
            raise TypeError(
                "make must be a function of factory and the settings, as `lambda factory, lr: FedAvg(factory=factory, "
                f"lr=lr)`, got {type(self.make).__name__}"
            )
        check.mapping(self.settings, "settings")
        for number, settings in enumerate(check.sequence(self.search, "search", "mappings of settings, as grid gives")):
            check.mapping(settings, f"search[{number}]")
        if not self.search:
            raise ValueError("search must hold at least one mapping of settings; search=[{}] for the defaults")
        if self.rule is not None:
            check.one_of(self.rule, "rule", tuple(RULES))
        for part, what in (("tasks", "names of tasks"), ("seeds", "seeds")):
            if getattr(self, part) is not None and not check.sequence(getattr(self, part), part, what):
                raise ValueError(f"{part} must hold at least one of the study's, or be None for all, got none")
        if self.like is not None and self.rule is not None:
            raise ValueError(f"like={self.like!r} takes that way's choice, so there can be no rule of its own")
        if self.like is not None and (len(self.search), dict(self.search[0])) != (1, {}):
            raise ValueError(f"like={self.like!r} takes that way's settings, so there can be no tries of its own")

    def build(self, task: Task, split: Split, settings: Mapping[str, Any]) -> Any:
        """Build what is run.

        Args:
            task, split: what it is for, and its images.
            settings: of one try; the way's own go beside them.

        Raises:
            TypeError: a setting that `make` does not take; a way that was read from a record cannot make anything.
        """
        if self.make is None:
            raise TypeError("a way that was read from a record has no make: what it made is in the record")
        given = {**self.settings, **settings, "factory": self.factory(task, split)}
        asked = {"task": task} if "task" in inspect.signature(self.make).parameters else {}
        return self.make(**{name: value for name, value in given.items() if self.passes_to_make(name)}, **asked)

    def factory(self, task: Task, split: Split) -> Callable[..., Any]:
        """What `make` gets as `factory`: called with the number of outputs, gives a network of the task.

        Args:
            task, split: the task and its images.
        """
        return task.network(split)

    def passes_to_make(self, name: str) -> bool:
        """Whether the setting of this `name` is handed to `make`; a kind of way may keep some to itself."""
        return True

    def for_record(self: Self) -> Self:
        """The way as a record holds it: how it runs, without how it was made and tried."""
        return replace(self, make=None, search=({},), settings={}, like=None, rule=None, tasks=None, seeds=None)

    @abstractmethod
    def run(self, made: Any, job: Job) -> dict[str, Any]:
        """Do one run, or go on with it, and write its records into the job's folder.

        Args:
            made: what `made` built.
            job: see there.

        Returns:
            The columns of its line in `summary.json`; `accuracy_last`, a fraction or None, is always among them.
        """

    @abstractmethod
    def trial(self, made: Any, job: Job) -> Cost:
        """Do as little of a run as tells what all of it will take. What is written goes into the job's folder.

        Args:
            made: what `made` built.
            job: see there.
        """


def accepted(function: Callable[..., Any], **offered: Any) -> dict[str, Any]:
    """Those of the `offered` arguments that a `function` takes by name and was not given by `partial`."""
    parameters = inspect.signature(function).parameters
    bound = getattr(function, "keywords", {})
    return {name: value for name, value in offered.items() if name in parameters and name not in bound}


def privacy_columns(ledger: Ledger | None) -> dict[str, Any]:
    """What a run's line says of privacy: what its ledger promises, to whom, and what the reader must know besides.

    Args:
        ledger: that the run charged; None for one that promises nothing.

    Returns:
        `epsilon`, None where none holds. With a ledger also `delta`; `relation`, which data sets count as neighbours;
        `noise`, where it came from: "operating system", or "seeded", which promises nothing; `epsilon_reason` if none
        holds, and `epsilon_remarks` if there are some.
    """
    if ledger is None:
        return {"epsilon": None}
    found = ledger.guarantee()
    seeded = any(event.seeded for event in ledger.events)
    said = {"epsilon": found.epsilon, "delta": found.delta, "relation": found.relation}
    said["noise"] = "seeded" if seeded else "operating system"
    notes = {"epsilon_reason": found.reason, "epsilon_remarks": list(found.remarks)}
    return said | {name: note for name, note in notes.items() if note}
