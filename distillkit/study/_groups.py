"""Records of a study, grouped by task and candidate."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from distillkit._utils import check
from distillkit.study._record_files import RecordsLike, as_records
from distillkit.study._records import Record

__all__ = ["Group", "RecordsLike", "differences_by_seed", "group_records", "number_of", "sole_task", "values_by_seed"]


@dataclass(frozen=True)
class Group:
    """Runs of one candidate on one task, one per seed.

    Attributes:
        task: name of the task.
        method: name of the candidate.
        records: records of the candidate's finished runs, by seed; may be empty.
        expected_seeds: seeds with which at least one candidate has a finished or unfinished run on this task.
    """

    task: str
    method: str
    records: tuple[Record, ...]
    expected_seeds: tuple[int, ...]

    @property
    def seeds(self) -> str:
        """Number of finished runs in the group, as text: "3" if no run is missing, "2 of 3" if one is missing."""
        have, want = len(self.records), len(self.expected_seeds)
        return str(have) if have == want else f"{have} of {want}"

    def values(self, column: str) -> list[Any]:
        """Return each run's value of `column`, from its summary or, if the summary lacks it, from its last round."""
        return [r.last(column) for r in self.records]


def group_records(records: RecordsLike, name: str = "records") -> list[Group]:
    """Group the runs by task and candidate, in the order of the records.

    Args:
        records: records of a study's finished runs, or the study's folder.
        name: name of the argument, used in the error message.
    """
    known = as_records(records, name)
    keys = [(r.task, r.method, r.seed) for r in known] + list(known.missing)
    wanted = {task: tuple(sorted({s for t, _, s in keys if t == task})) for task, _, _ in keys}
    methods = {method: None for _, method, _ in keys}
    pairs = {(t, m): None for t in wanted for m in methods if any(k[:2] == (t, m) for k in keys)}

    def own(task: str, method: str) -> tuple[Record, ...]:
        return tuple(sorted((r for r in known if (r.task, r.method) == (task, method)), key=lambda r: r.seed))

    return [Group(task, method, own(task, method), wanted[task]) for task, method in pairs]


def sole_task(task: str | None, tasks: Sequence[str]) -> str:
    """Return the given task, or the only task if none is given.

    Args:
        task: name of a task, or None if there is only one.
        tasks: names of the existing tasks.

    Raises:
        ValueError: there is no such task, or there are several tasks and none is given.
    """
    if task is None and len(tasks) > 1:
        raise ValueError(f"task must be one of {', '.join(map(repr, tasks))}, because there are several; got None")
    return tasks[0] if task is None else check.one_of(task, "task", tuple(tasks))


def differences_by_seed(group: Group, base: Group, column: str) -> dict[int, float]:
    """Return the candidate's value of a column minus the baseline's value, by seed.

    Seeds for which the candidate or the baseline has no number are left out.

    Args:
        group, base: runs of the candidate and of the baseline.
        column: name of the column to compare.
    """
    own, other = values_by_seed(group, column), values_by_seed(base, column)
    return {seed: value - other[seed] for seed, value in own.items() if seed in other}


def values_by_seed(group: Group | None, column: str) -> dict[int, float]:
    """Return the number that each run has in a column, by seed. Runs without a number in this column are left out.

    Args:
        group: runs of a candidate; None for no runs.
        column: name of the column.
    """
    records = group.records if group is not None else ()
    return {r.seed: number_of(r.last(column), column) for r in records if r.last(column) is not None}


def number_of(value: Any, column: str) -> float:
    """Return a value of a column as a float.

    Args:
        value: the value.
        column: name of the column, used in the error message.

    Raises:
        ValueError: the value is not a number.
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"column must hold numbers; {column!r} holds {value!r}")
    return float(value)
