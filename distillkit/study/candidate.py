"""Base class of the candidates in a study, and the description of one run for a candidate."""

from __future__ import annotations

import inspect
import itertools
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeVar

from torch import Tensor

from distillkit._utils import check
from distillkit._utils.options import Options, check_options
from distillkit.data import Split
from distillkit.study.task import Task

Self = TypeVar("Self", bound="Candidate")

RULES = {"last": "accuracy_last", "late": "accuracy_late", "own": "accuracy_own"}
"""Column of the summaries from which each rule chooses the best configuration, measured on validation data."""


def grid(**options: Sequence[Any]) -> list[dict[str, Any]]:
    """Return all combinations of settings, for the argument `search` of a candidate.

    `grid(lr=[0.03, 0.1], mu=[0.01, 0.1])` returns four configurations.

    Args:
        options: values of each setting. The last setting varies fastest.

    Raises:
        TypeError, ValueError: a setting has no values.
    """
    for name, values in options.items():
        if not check.sequence(values, name, f"the values of {name}"):
            raise ValueError(f"{name} must have at least one value, got none")
    return [dict(zip(options, values)) for values in itertools.product(*options.values())]


@dataclass(frozen=True)
class Job:
    """Description of one run, which `Candidate.run` executes.

    Attributes:
        run: name of the run and of its folder.
        folder: folder for the run's files.
        task: task of the run.
        split: training, test and validation images of the task.
        seed: seed of all random draws.
        settings: settings of this run, in addition to the candidate's own settings.
        validation: whether this is a tuning run. A tuning run is tested on the validation data, on which no client
            trains.
        keep: indices of the training records to keep; None for all.
        partition_seed: seed of the partition into clients; None for `seed`. It differs from `seed` if the run repeats
            another run with a new seed but the same partition.
        notes: JSON values to store in `config.json`, which are needed to repeat the run.
        workers: number of threads that run clients.
        device: the device to compute on.
        progress: whether to show progress bars.
        cache: folder of intermediate results that the study's runs share; None: nothing is shared.
        deadline: time (`time.time()`) after which the run stops as soon as it has saved its state; None: no limit.
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
    deadline: float | None = None
    cache: Path | None = None

    @property
    def late(self) -> bool:
        """True if the deadline of the run has passed."""
        return self.deadline is not None and time.time() >= self.deadline

    def check_deadline(self) -> None:
        """End an unfinished run after its deadline. Call this method when the run's state has just been saved.

        Raises:
            OutOfTime: the deadline has passed.
        """
        if self.late:
            raise OutOfTime(f"{self.run} stopped at its deadline; its state is saved in {self.folder}")


class OutOfTime(Exception):
    """Exception for a run that was stopped at its deadline. Its state is saved, so the run can be resumed."""


@dataclass(frozen=True)
class Cost:
    """Expected cost of one run, extrapolated from a short trial run.

    Attributes:
        seconds: wall time in seconds.
        bytes_up, bytes_down: size of all messages to and from the server; None for a run without communication.
    """

    seconds: float
    bytes_up: int | None = None
    bytes_down: int | None = None


@dataclass(frozen=True)
class Candidate(ABC):
    """One method in a study, with its settings and the configurations to search.

    `fl.study.Federated` runs a federated method. `distillkit.study.Condense` makes a small set and trains networks on
    it. For another kind of candidate, derive a frozen dataclass from this class, at the top level of a module.

    Args:
        make: function that builds the object to run. It is called with `factory`, the task's network factory, and with
            the settings by name: `lambda factory, lr, mu: FedAvg(FedProx(mu), factory=factory, lr=lr)`. If it has an
            argument `task`, it also receives the `Task`. It may be a lambda: the study's files describe the built
            object instead of `make`.
        search: configurations to compare, each a mapping of settings; see `grid`. All searches in a study must have
            the same number of configurations.
        settings: settings that all configurations of this candidate share.
        like: name of another candidate whose chosen settings this candidate uses instead of a search. Use it for a
            control, a variant that must differ from that candidate in only one respect.
        rule: rule to choose the best configuration, "last", "late" or "own" (see `Study`); default: the study's rule.
            Use "own" for a personalized method and its baseline, and "last" for a candidate without rounds, such as
            `Condense`.
        tasks: names of the study's tasks on which the candidate runs; default: all tasks.
        seeds: seeds of the study with which the candidate runs; default: all seeds.

    Attributes:
        failures: exceptions that unsuitable settings may raise. A configuration whose run raises one of them is never
            chosen.
        rules: rules whose column the candidate's summary has.
        needs_own_tests: whether the rule "own" needs the option `own_tests` of the task. False for a candidate that
            finds the column `accuracy_own` in another way.
    """

    make: Callable[..., Any] | None
    search: Sequence[Mapping[str, Any]] = ({},)
    settings: Options = field(default_factory=dict)
    like: str | None = None
    rule: Literal["last", "late", "own"] | None = None
    tasks: Sequence[str] | None = field(default=None, kw_only=True)
    seeds: Sequence[int] | None = field(default=None, kw_only=True)

    failures: ClassVar[tuple[type[Exception], ...]] = (FloatingPointError,)
    rules: ClassVar[tuple[str, ...]] = tuple(RULES)
    needs_own_tests: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_options(self)
        if self.make is not None and not callable(self.make):
            raise TypeError(
                "make must be a function of factory and the settings, such as `lambda factory, lr: "
                f"FedAvg(factory=factory, lr=lr)`, got {type(self.make).__name__}"
            )
        if self.make is not None:
            try:
                inspect.signature(self.make)
            except ValueError:
                raise TypeError(
                    f"make must state its arguments, which {self.make!r} does not; wrap it: `lambda factory: ...`"
                ) from None
        for number, settings in enumerate(check.sequence(self.search, "search", "mappings of settings, as from grid")):
            check.mapping(settings, f"search[{number}]")
        if not self.search:
            raise ValueError("search must hold at least one mapping of settings; pass search=[{}] for the defaults")
        if self.rule is not None:
            check.one_of(self.rule, "rule", self.rules)
        for part, what in (("tasks", "names of tasks"), ("seeds", "seeds")):
            if getattr(self, part) is not None and not check.sequence(getattr(self, part), part, what):
                raise ValueError(f"{part} must hold at least one of the study's {part}, or be None for all; got none")
        if self.like is not None and self.rule is not None:
            raise ValueError(f"like={self.like!r} uses that candidate's choice, so rule must be None")
        if self.like is not None and (len(self.search), dict(self.search[0])) != (1, {}):
            raise ValueError(f"like={self.like!r} uses that candidate's settings, so search must be left out")

    def configurations(self) -> list[dict[str, Any]]:
        """Return the settings of each configuration, combined with the shared `settings`."""
        return [{**self.settings, **settings} for settings in self.search]

    def build(self, task: Task, split: Split, settings: Mapping[str, Any]) -> Any:
        """Call the candidate's function `make`, and return its result: the object to run, such as a federated method.

        Args:
            task: task of the run. It is passed to `make` if `make` has an argument `task`.
            split: training, test and validation images of the task. The shape of the images may determine the network.
            settings: settings of one configuration, in addition to the candidate's own settings.

        Raises:
            TypeError: `make` does not accept a setting, or is None, as in a candidate read from a study's files.
        """
        if self.make is None:
            raise TypeError("a candidate read from a record has no make; the record holds what it built")
        given = {**self.settings, **settings, "factory": self.factory(task, split)}
        extra = {"task": task} if "task" in inspect.signature(self.make).parameters else {}
        return self.make(**{name: value for name, value in given.items() if self.passes_to_make(name)}, **extra)

    def factory(self, task: Task, split: Split) -> Callable[..., Any]:
        """Return a function that maps a number of outputs to a network.

        The method `build` passes it as `factory` to `make`, the candidate's function that returns the object to run.

        Args:
            task: task of the run, which determines the network.
            split: training, test and validation images of the task. The shape of the images may determine the network.
        """
        return task.network(split)

    def passes_to_make(self, name: str) -> bool:
        """Return whether the setting with this `name` is passed to `make`, the function that builds the object to run.

        A subclass returns False for the settings that it uses itself.
        """
        return True

    def for_record(self: Self) -> Self:
        """Return a copy for the records, without the options that only choose or build the object to run.

        These options, `make`, `search`, `settings`, `like`, `rule`, `tasks` and `seeds`, are None or empty in the copy.
        """
        return replace(self, make=None, search=({},), settings={}, like=None, rule=None, tasks=None, seeds=None)

    @abstractmethod
    def run(self, built: Any, job: Job) -> dict[str, Any]:
        """Execute or resume a run, and write its records to the job's folder.

        Args:
            built: the object that `build` returned.
            job: the run.

        Returns:
            The columns of the run's summary, including `accuracy_last`, which is a fraction or None.
        """

    @abstractmethod
    def trial(self, built: Any, job: Job) -> Cost:
        """Execute a part of a run that is just long enough to estimate the run's cost.

        Args:
            built: the object that `build` returned.
            job: the run; its folder is temporary.
        """
