"""Design of a study: its checked arguments, the runs that follow from them, and the estimate of their cost."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from distillkit._utils import check
from distillkit._utils.tables import markdown_table
from distillkit.serialization import to_config
from distillkit.study._execution import RunSpec
from distillkit.study.candidate import RULES, Candidate, Cost
from distillkit.study.task import Task


@dataclass(frozen=True)
class StudyDesign:
    """Tasks, candidates and seeds of a study.

    Attributes:
        tasks, candidates: tasks, and candidates (methods to compare), by name.
        seeds: seeds of the final runs.
        tune_seeds: seeds of the tuning runs.
        tune_on: the task on which the configurations (settings of a candidate that tuning tries) are compared; None to
            compare them on each task separately.
    """

    tasks: Mapping[str, Task]
    candidates: Mapping[str, Candidate]
    seeds: tuple[int, ...]
    tune_seeds: tuple[int, ...]
    tune_on: Task | None

    @property
    def num_configurations(self) -> int:
        """Number of configurations that are compared for each candidate; 1 if nothing is tuned."""
        return max(len(candidate.search) for candidate in self.candidates.values())

    @property
    def tuned_tasks(self) -> Mapping[str, Task]:
        """The tasks on which tuning compares the configurations (settings) of a candidate, by name."""
        return self.tasks if self.tune_on is None else {self.tune_on.name: self.tune_on}

    @property
    def every_task(self) -> Mapping[str, Task]:
        """The tasks of `tuned_tasks` and `tasks`, by name."""
        return {**self.tuned_tasks, **self.tasks}

    def has(self, task: str, method: str) -> bool:
        """Return whether the candidate called `method` is tuned and run on the `task`."""
        tasks = self.candidates[method].tasks
        return tasks is None or task in tasks or (self.tune_on is not None and task == self.tune_on.name)

    def require_rules(self, study_rule: str) -> None:
        """Refuse a rule, of the study or of a candidate, whose column a candidate's tuning runs would lack."""
        for name, candidate in self.candidates.items():
            rule = candidate.rule or study_rule
            if candidate.like is not None or self.num_configurations == 1:
                continue
            if rule not in candidate.rules:
                raise ValueError(
                    f"rule={rule!r} cannot choose for candidates[{name!r}], because a {type(candidate).__name__} has "
                    f"no {RULES[rule]}: pass rule={candidate.rules[0]!r} to this candidate"
                )
            lacking = [t.name for t in self.tuned_tasks.values() if self.has(t.name, name) and not t.own_tests]
            if rule == "own" and candidate.needs_own_tests and lacking:
                raise ValueError(
                    f"rule='own' chooses by the clients' own test sets, but the task {lacking[0]!r} has none: set "
                    f"Task(own_tests=0.2), or choose candidates[{name!r}] by another rule"
                )

    def config(self, out: Path) -> dict[str, Any]:
        """Return the design as a JSON value, whose tensors are written to the study's folder `out`."""
        data, store = out / "data", out / "arguments"
        candidates = {
            name: {
                "candidate": to_config(one.for_record(), store=store, name=f"candidates[{name!r}]"),
                "settings": to_config(dict(one.settings), store=store, name=f"candidates[{name!r}].settings"),
                "search": [to_config(dict(s), store=store, name=f"candidates[{name!r}].search") for s in one.search],
                "like": one.like,
                "rule": one.rule,
            }
            for name, one in self.candidates.items()
        }
        tasks = {name: to_config(task, store=data, name=f"tasks[{name!r}]") for name, task in self.tasks.items()}
        runs = [[spec.task, spec.method, spec.seed] for spec in self.final_runs({})]
        return {"tasks": tasks, "candidates": candidates, "runs": runs}

    def tuning_runs(self) -> dict[tuple[str, str], list[list[RunSpec]]]:
        """Return the tuning runs of each configuration, by task and candidate.

        Candidates with `like` are left out, because they use the settings of another candidate.
        """
        runs: dict[tuple[str, str], list[list[RunSpec]]] = {}
        for task, (method, candidate) in itertools.product(self.tuned_tasks, self.candidates.items()):
            if self.num_configurations > 1 and candidate.like is None and self.has(task, method):
                start = f"{task}-{_slug(method)}"
                runs[task, method] = [
                    [
                        RunSpec(f"{start}-{i}-{seed}", f"tuning/{start}-{i}-{seed}", task, method, seed, settings, True)
                        for seed in self.tune_seeds
                    ]
                    for i, settings in enumerate(candidate.configurations())
                ]
        return runs

    def final_runs(self, chosen: Mapping[tuple[str, str], Mapping[str, Any]]) -> list[RunSpec]:
        """Return the runs that are compared after tuning, ordered by seed."""
        specs = []
        for seed, task, (method, candidate) in itertools.product(self.seeds, self.tasks, self.candidates.items()):
            if seed in (candidate.seeds or self.seeds) and task in (candidate.tasks or self.tasks):
                source = candidate.like or method
                tuned = task if self.tune_on is None else self.tune_on.name
                settings = chosen.get((tuned, source), self.candidates[source].configurations()[0])
                name = f"{task}-{_slug(method)}-{seed}"
                specs.append(RunSpec(name, name, task, method, seed, {**settings, **candidate.settings}))
        return specs


def make_design(
    tasks: Task | Sequence[Task],
    candidates: Mapping[str, Candidate],
    seeds: Sequence[int],
    tune_seeds: Sequence[int],
    tune_on: Task | None,
) -> StudyDesign:
    """Check these arguments of `Study`, and return the design."""
    design = StudyDesign(
        _tasks(tasks), _candidates(candidates), _seeds(seeds, "seeds"), _seeds(tune_seeds, "tune_seeds"), tune_on
    )
    _check_parts(design)
    if both := sorted(set(design.seeds) & set(design.tune_seeds)):
        raise ValueError(f"tune_seeds and seeds must be disjoint, but both contain {both}")
    if tune_on is not None:
        name = check.instance(tune_on, Task, "tune_on", "a Task").name
        if design.tasks.get(name, tune_on) is not tune_on:
            raise ValueError(f"tune_on must have a name of its own or be one of tasks; got another {name!r}")
    return design


def _slug(name: str) -> str:
    """Convert a candidate's name to a form that can be used in a folder name."""
    return re.sub(r"[^a-z0-9.]+", "-", name.lower()).strip("-")


def _tasks(given: Task | Sequence[Task]) -> dict[str, Task]:
    tasks = [given] if isinstance(given, Task) else list(check.sequence(given, "tasks", "tasks"))
    names = [check.instance(task, Task, f"tasks[{number}]", "a Task").name for number, task in enumerate(tasks)]
    if not names or len(set(names)) != len(names):
        raise ValueError(f"tasks must hold at least one task, with different names; got {names}")
    return dict(zip(names, tasks))


def _candidates(given: Mapping[str, Candidate]) -> dict[str, Candidate]:
    candidates = dict(check.mapping(given, "candidates"))
    if not candidates:
        raise ValueError("candidates must hold at least one candidate, such as {'FedAvg': Federated(FedAvg)}")
    for name, candidate in candidates.items():
        where = f"candidates[{name!r}]"
        check.instance(candidate, Candidate, where, "a Candidate, such as Federated(...) or Condense(...)")
        if candidate.make is None:
            raise ValueError(f"{where} was read from a record and has no make; pass the original candidate")
        source = candidates.get(candidate.like) if candidate.like is not None else candidate
        if source is None or source.like is not None:
            raise ValueError(f"{where}.like must name a candidate without like, got {candidate.like!r}")
    slugs = [_slug(name) for name in candidates]
    if "" in slugs or len(set(slugs)) != len(slugs):
        raise ValueError(f"candidates must have names that differ in their letters and digits, got {list(candidates)}")
    counts = {name: len(candidate.search) for name, candidate in candidates.items() if candidate.like is None}
    if len(set(counts.values())) > 1:
        listed = ", ".join(f"{name} {count}" for name, count in counts.items())
        raise ValueError(
            f"all candidates must have equally many configurations, for a fair comparison; got {listed}. Use like= for "
            "a control that takes another candidate's choice"
        )
    return candidates


def _check_parts(design: StudyDesign) -> None:
    """Check that the tasks and seeds of each candidate are the study's, and that its `like` is tuned on its tasks."""
    for name, candidate in design.candidates.items():
        for part, have in (("tasks", tuple(design.tasks)), ("seeds", design.seeds)):
            given = getattr(candidate, part) or ()
            if unknown := [one for one in given if one not in have]:
                raise ValueError(f"candidates[{name!r}].{part} must be among the study's {list(have)}, got {unknown}")
        if candidate.like is None or design.tune_on is not None:
            continue
        if lacking := [t for t in candidate.tasks or design.tasks if not design.has(t, candidate.like)]:
            raise ValueError(
                f"candidates[{name!r}].like={candidate.like!r} must run on all tasks of {name!r}, but not on {lacking}"
            )


def _seeds(given: Sequence[int], name: str) -> tuple[int, ...]:
    numbered = enumerate(check.sequence(given, name, "seeds"))
    seeds = tuple(check.positive_int(seed, f"{name}[{i}]", least=0) for i, seed in numbered)
    if not seeds or len(set(seeds)) != len(seeds):
        raise ValueError(f"{name} must hold at least one seed, without duplicates; got {list(seeds)}")
    return seeds


@dataclass(frozen=True)
class EstimateRow:
    """Estimated cost of one candidate on one task.

    Attributes:
        task, method: names of the task and the candidate.
        runs: number of runs that are not finished yet, including tuning runs.
        cost: expected duration of one run, and the size of its messages.
        memory: peak memory of the process during the trial run (a short part of one run), in bytes; None if unknown.
    """

    task: str
    method: str
    runs: int
    cost: Cost
    memory: int | None


@dataclass(frozen=True)
class Estimate:
    """Estimated cost of the unfinished runs of a study. Print it to see a table.

    The estimate extrapolates from a trial run of each candidate's first configuration, with two rounds or some steps.
    It is inaccurate for a candidate whose later rounds or other configurations differ in cost.

    Attributes:
        rows: one row per task and candidate.
        processes: number of concurrent runs.
    """

    rows: Sequence[EstimateRow]
    processes: int = 1

    @property
    def seconds(self) -> float:
        """Estimated seconds for all runs, if `processes` of them run at a time and do not slow each other down."""
        return sum(row.runs * row.cost.seconds for row in self.rows) / self.processes

    def __str__(self) -> str:
        header = ["task, method", "runs", "seconds a run", "MB up", "MB down", "memory, MB"]
        lines = [
            [
                f"{row.task}, {row.method}",
                str(row.runs),
                f"{row.cost.seconds:.1f}",
                *("–" if n is None else f"{n / 1e6:.2f}" for n in (row.cost.bytes_up, row.cost.bytes_down)),
                "–" if row.memory is None else f"{row.memory / 1e6:.0f}",
            ]
            for row in self.rows
        ]
        total = f"{sum(row.runs for row in self.rows)} runs, about {_duration(self.seconds)}"
        in_processes = f" in {self.processes} processes" * (self.processes > 1)
        return f"{markdown_table(header, lines)}\n{total}{in_processes}."


def estimate_rows(
    design: StudyDesign, out: Path, trial: Callable[[RunSpec], tuple[Cost, int | None]]
) -> tuple[EstimateRow, ...]:
    """Estimate the cost of the runs that are unfinished in a study's folder, with one row per task and candidate."""
    specs = [spec for search in design.tuning_runs().values() for runs in search for spec in runs]
    missing: dict[tuple[str, str], list[RunSpec]] = {}
    for spec in [*specs, *design.final_runs({})]:
        if not (out / spec.folder / "summary.json").exists():
            missing.setdefault((spec.task, spec.method), []).append(spec)
    return tuple(EstimateRow(*key, len(own), *trial(own[0])) for key, own in missing.items())


def _duration(seconds: float) -> str:
    for size, unit in ((86400, "days"), (3600, "hours"), (60, "minutes")):
        if seconds >= 1.5 * size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.0f} seconds"
