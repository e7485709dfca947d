"""What a study will take, before it begins: from a moment of every way."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from distillkit.study.text import show
from distillkit.study.way import Cost

__all__ = ["Estimate", "Expected"]


@dataclass(frozen=True)
class Expected:
    """What one way takes on one task.

    Attributes:
        task, method: their names.
        runs: how many are not done yet, tries and seeds together.
        cost: of one of them.
        memory: the most that the process held in the trial, in bytes; None where the system does not say.
    """

    task: str
    method: str
    runs: int
    cost: Cost
    memory: int | None


@dataclass(frozen=True)
class Estimate:
    """What the runs of a study that are not done yet will take, one after the other; `print` it for a table.

    It is worked out from the first two rounds, or some steps, of the first try of each way: a way that does something
    else later, or whose tries differ in cost, will take another time.

    Attributes:
        rows: by task and way.
        processes: runs done at a time.
    """

    rows: Sequence[Expected]
    processes: int = 1

    @property
    def seconds(self) -> float:
        """All of them together, in seconds, as if `processes` runs at a time did not slow each other."""
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
        total = f"{sum(row.runs for row in self.rows)} runs, about {_span(self.seconds)}"
        return f"{show(header, lines)}\n{total}{f' in {self.processes} processes' * (self.processes > 1)}."


def _span(seconds: float) -> str:
    for size, unit in ((86400, "days"), (3600, "hours"), (60, "minutes")):
        if seconds >= 1.5 * size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.0f} seconds"
