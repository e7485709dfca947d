"""What a study asks for, checked, and the runs that it comes to."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from distillkit._utils import check
from distillkit.study._execution import Order
from distillkit.study.candidate import Candidate
from distillkit.study.task import Task

__all__ = ["Plan", "planned"]


@dataclass(frozen=True)
class Plan:
    """Tasks x candidates x seeds, and which runs these make.

    Attributes:
        tasks, candidates: by name.
        seeds: of the runs of the tables.
        tune_seeds: of the tries.
        tune_on: the task on which settings are tried for all; None: each task for itself.
    """

    tasks: Mapping[str, Task]
    candidates: Mapping[str, Candidate]
    seeds: tuple[int, ...]
    tune_seeds: tuple[int, ...]
    tune_on: Task | None

    @property
    def num_configurations(self) -> int:
        """How many settings each way tries; 1: nothing is tuned."""
        return max(len(way.search) for way in self.candidates.values())

    @property
    def tuned_tasks(self) -> Mapping[str, Task]:
        """The tasks on which settings are tried, by name."""
        return self.tasks if self.tune_on is None else {self.tune_on.name: self.tune_on}

    def task(self, name: str) -> Task:
        """The task of this `name`: of the tables, or the one on which settings are tried."""
        return {**self.tuned_tasks, **self.tasks}[name]

    def has(self, task: str, method: str) -> bool:
        """Whether the way called `method` is tried and run on the `task`."""
        tasks = self.candidates[method].tasks
        return tasks is None or task in tasks or (self.tune_on is not None and task == self.tune_on.name)

    @property
    def parts(self) -> dict[str, dict[str, Any]]:
        """The candidates that are not run everywhere: their `tasks` and `seeds`, None for all."""
        given = {name: {"tasks": way.tasks, "seeds": way.seeds} for name, way in self.candidates.items()}
        return {
            name: {key: None if part is None else list(part) for key, part in parts.items()}
            for name, parts in given.items()
            if any(part is not None for part in parts.values())
        }

    def tuning_runs(self) -> dict[tuple[str, str], list[list[Order]]]:
        """By task and way, for each try its runs; nothing for candidates that take another's settings."""
        if self.num_configurations == 1:
            return {}

        def order(task: str, method: str, number: int, seed: int, settings: dict[str, Any]) -> Order:
            name = f"{task}-{_slug(method)}-{number}-{seed}"
            return Order(name, f"tries/{name}", task, method, seed, settings, validation=True)

        return {
            (task, method): [
                [order(task, method, number, seed, settings) for seed in self.tune_seeds]
                for number, settings in enumerate(_all_settings(way))
            ]
            for task in self.tuned_tasks
            for method, way in self.candidates.items()
            if way.like is None and self.has(task, method)
        }

    def final_runs(self, chosen: Mapping[tuple[str, str], int]) -> list[Order]:
        """The runs of the tables, a seed of everything before the next seed.

        Args:
            chosen: by task and way, the number of the try whose settings a run has.
        """
        orders = []
        for seed in self.seeds:
            for task in self.tasks:
                tuned = task if self.tune_on is None else self.tune_on.name
                for method, way in self.candidates.items():
                    source = way.like or method
                    if seed not in (way.seeds or self.seeds) or task not in (way.tasks or self.tasks):
                        continue
                    settings = _all_settings(self.candidates[source])[chosen.get((tuned, source), 0)] | dict(
                        way.settings
                    )
                    name = f"{task}-{_slug(method)}-{seed}"
                    orders.append(Order(name, name, task, method, seed, settings))
        return orders


def planned(
    tasks: Task | Sequence[Task],
    candidates: Mapping[str, Candidate],
    seeds: Sequence[int],
    tune_seeds: Sequence[int],
    tune_on: Task | None,
) -> Plan:
    """What a study asks for, once it is checked.

    Args:
        tasks, candidates, seeds, tune_seeds, tune_on: as of `Study`.

    Raises:
        TypeError, ValueError: see `Study`.
    """
    plan = Plan(_tasks(tasks), _ways(candidates), _seeds(seeds, "seeds"), _seeds(tune_seeds, "tune_seeds"), tune_on)
    _require_parts(plan)
    if both := sorted(set(plan.seeds) & set(plan.tune_seeds)):
        raise ValueError(f"tune_seeds must be none of seeds, but {both} are in both")
    if tune_on is not None and not isinstance(tune_on, Task):
        raise TypeError(f"tune_on must be a Task, got {type(tune_on).__name__}")
    if tune_on is not None and plan.tasks.get(tune_on.name, tune_on) is not tune_on:
        raise ValueError(f"tune_on must have a name of its own, or be one of tasks, got another {tune_on.name!r}")
    return plan


def _all_settings(way: Candidate) -> list[dict[str, Any]]:
    """The settings of each try of a way, with those that all of them have."""
    return [{**way.settings, **settings} for settings in way.search]


def _slug(name: str) -> str:
    """A way's name as part of a folder's."""
    return re.sub(r"[^a-z0-9.]+", "-", name.lower()).strip("-")


def _tasks(given: Task | Sequence[Task]) -> dict[str, Task]:
    tasks = [given] if isinstance(given, Task) else list(check.sequence(given, "tasks", "tasks"))
    for number, task in enumerate(tasks):
        if not isinstance(task, Task):
            raise TypeError(f"tasks[{number}] must be a Task, got {type(task).__name__}")
    names = [task.name for task in tasks]
    if not names or len(set(names)) != len(names):
        raise ValueError(f"tasks must be at least one, of different names, got {names}")
    return dict(zip(names, tasks))


def _ways(given: Mapping[str, Candidate]) -> dict[str, Candidate]:
    candidates = dict(check.mapping(given, "candidates"))
    if not candidates:
        raise ValueError("candidates must name at least one, as {'FedAvg': Federated(FedAvg)}")
    for name, way in candidates.items():
        if not isinstance(way, Candidate):
            raise TypeError(
                f"candidates[{name!r}] must be a Candidate, Federated(...) or Condense(...); got {type(way).__name__}"
            )
        if way.make is None:
            raise ValueError(f"candidates[{name!r}] was read from a record and has no make: give the way itself")
        source = candidates.get(way.like) if way.like is not None else way
        if source is None or source.like is not None:
            raise ValueError(f"candidates[{name!r}].like must name a way with tries of its own, got {way.like!r}")
    slugs = [_slug(name) for name in candidates]
    if "" in slugs or len(set(slugs)) != len(slugs):
        raise ValueError(f"candidates must have names that differ in their letters and digits, got {list(candidates)}")
    counts = {name: len(way.search) for name, way in candidates.items() if way.like is None}
    if len(set(counts.values())) > 1:
        said = ", ".join(f"{name} {count}" for name, count in counts.items())
        raise ValueError(
            f"all candidates must have as many tries, for a fair comparison, got {said}; like= takes another's"
        )
    return candidates


def _require_parts(plan: Plan) -> None:
    """Refuse a way that is to be run on a task or with a seed that the study has not, or its model has not."""
    for name, way in plan.candidates.items():
        for part, have in (("tasks", tuple(plan.tasks)), ("seeds", plan.seeds)):
            given = getattr(way, part) or ()
            if unknown := [one for one in given if one not in have]:
                raise ValueError(f"candidates[{name!r}].{part} must be among the study's {list(have)}, got {unknown}")
        lacking = [t for t in way.tasks or plan.tasks if way.like is not None and not plan.has(t, way.like)]
        if lacking and plan.tune_on is None:
            raise ValueError(
                f"candidates[{name!r}].like={way.like!r} must be tried where it is run, but not on {lacking}"
            )


def _seeds(given: Sequence[int], name: str) -> tuple[int, ...]:
    seeds = tuple(
        check.positive_int(s, f"{name}[{i}]", least=0) for i, s in enumerate(check.sequence(given, name, "seeds"))
    )
    if not seeds or len(set(seeds)) != len(seeds):
        raise ValueError(f"{name} must be at least one, each once, got {list(seeds)}")
    return seeds
