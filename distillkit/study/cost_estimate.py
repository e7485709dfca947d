"""What a study will take, before it begins: from a moment of every way."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from distillkit.study._execution import Order
from distillkit.study._plan import Plan
from distillkit.study.candidate import Candidate, Cost
from distillkit.study.formatting import show

__all__ = ["SHARE", "Estimate", "Expected", "expected"]

SHARE = 0.05
"""Of the time that a way's runs take: the most that a trial of it may cost where another way's trial tells as much."""


@dataclass(frozen=True)
class Expected:
    """What one way takes on one task.

    Attributes:
        task, method: their names.
        runs: how many are not done yet, tries and seeds together.
        cost: of one of them.
        memory: the most that the process held in the trial, in bytes; None where the system does not say.
        like: the way whose trial this is, because one of its own would take more than `SHARE` of its runs.
    """

    task: str
    method: str
    runs: int
    cost: Cost
    memory: int | None
    like: str | None = None


@dataclass(frozen=True)
class Estimate:
    """What the runs of a study that are not done yet will take, one after the other; `print` it for a table.

    It is worked out from the first two rounds, or some steps, of the first try of each way: a way that does something
    else later, or whose tries differ in cost, will take another time. A control that is made as the way that it is
    `like`, and whose own trial would be no small part of its runs, is taken to cost as that one, and the table says so.

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
                f"{row.task}, {row.method}{'' if row.like is None else f' (as {row.like})'}",
                str(row.runs),
                f"{row.cost.seconds:.1f}",
                *("–" if n is None else f"{n / 1e6:.2f}" for n in (row.cost.bytes_up, row.cost.bytes_down)),
                "–" if row.memory is None else f"{row.memory / 1e6:.0f}",
            ]
            for row in self.rows
        ]
        total = f"{sum(row.runs for row in self.rows)} runs, about {_span(self.seconds)}"
        taken = sum(row.like is not None for row in self.rows)
        note = (
            f"\nNot tried, as that would take over {SHARE:.0%} of their runs: {taken}, put down as what they are like."
        )
        in_processes = f" in {self.processes} processes" * (self.processes > 1)
        return f"{show(header, lines)}\n{total}{in_processes}.{note * (taken > 0)}"


def expected(plan: Plan, out: Path, attempt: Callable[[Order], tuple[Cost, int | None]]) -> tuple[Expected, ...]:
    """What the runs that are not done yet will take, by task and way: each is tried, but for the dear controls.

    Args:
        plan: what the study asks for.
        out: its folder.
        attempt: does a moment of a run: what all of it will take, and the most memory meanwhile.
    """
    orders = [order for runs in plan.tuning_runs().values() for one in runs for order in one] + plan.final_runs({})
    left: dict[tuple[str, str], list[Order]] = {(order.task, order.method): [] for order in orders}
    for order in orders:
        if not (out / order.folder / "summary.json").exists():
            left[order.task, order.method].append(order)
    rows, trials = dict[tuple[str, str], Expected](), dict[tuple[str, str], float]()
    for (task, method), own in sorted(left.items(), key=lambda item: plan.candidates[item[0][1]].like is not None):
        way, like = plan.candidates[method], plan.candidates[method].like
        if own and like is not None and (task, like) in trials and _alike(way, plan.candidates[like]):
            known = rows[task, like]
            if trials[task, like] > SHARE * len(own) * known.cost.seconds:
                rows[task, method] = Expected(task, method, len(own), known.cost, known.memory, like)
                continue
        if own:
            began = time.perf_counter()
            rows[task, method] = Expected(task, method, len(own), *attempt(own[0]))
            trials[task, method] = time.perf_counter() - began
    return tuple(rows[key] for key in left if key in rows)


def _alike(way: Candidate, other: Candidate) -> bool:
    """Whether two ways are made and run in the same way, so that they differ in settings of `make` alone."""
    outside = [name for one in (way, other) for name in one.settings if not one.passes_to_make(name)]
    return way.make is other.make and way.for_record() == other.for_record() and not outside


def _span(seconds: float) -> str:
    for size, unit in ((86400, "days"), (3600, "hours"), (60, "minutes")):
        if seconds >= 1.5 * size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.0f} seconds"
