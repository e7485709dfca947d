"""Records as tables take them: the runs of one way on one task together."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from distillkit.study.record import Record
from distillkit.study.records import Given, as_records

__all__ = ["Given", "Group", "groups"]


@dataclass(frozen=True)
class Group:
    """The runs of one way on one task, a seed each.

    Attributes:
        task: the task's name.
        method: the way's name.
        records: its finished runs, by seed; there may be none.
        wanted: the seeds that it should have: its study's, and those that another way has on this task.
    """

    task: str
    method: str
    records: tuple[Record, ...]
    wanted: tuple[int, ...]

    @property
    def seeds(self) -> str:
        """How many runs are finished, and of how many if some are not: "3", "2 of 3"."""
        have, want = len(self.records), len(self.wanted)
        return str(have) if have == want else f"{have} of {want}"

    def values(self, column: str) -> list[Any]:
        """What the runs have under a name, see `Record.last`.

        Args:
            column: the name.
        """
        return [r.last(column) for r in self.records]


def groups(records: Given, name: str = "records") -> list[Group]:
    """The ways of each task with their runs, in the order in which they stand in the records.

    Args:
        records: of a study, or its folder.
        name: of the argument, for the message.
    """
    known = as_records(records, name)
    keys = [(r.task, r.method, r.seed) for r in known] + list(known.missing)
    wanted = {task: tuple(sorted({s for t, _, s in keys if t == task})) for task, _, _ in keys}
    ways = {method: None for _, method, _ in keys}
    pairs = {(t, m): None for t in wanted for m in ways if any(k[:2] == (t, m) for k in keys)}

    def own(task: str, method: str) -> tuple[Record, ...]:
        return tuple(sorted((r for r in known if (r.task, r.method) == (task, method)), key=lambda r: r.seed))

    return [Group(task, method, own(task, method), wanted[task]) for task, method in pairs]
