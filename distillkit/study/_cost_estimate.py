"""Estimate of a study's cost, from a short trial run of each candidate."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from distillkit._utils.tables import markdown_table
from distillkit.study._design import StudyDesign
from distillkit.study._execution import RunSpec
from distillkit.study.candidate import Cost

__all__ = ["Estimate", "EstimateRow", "estimate_rows"]


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
    """Estimate the cost of the runs that are unfinished in a study's folder, with one row per task and candidate.

    Args:
        design: the study's design.
        out: the study's folder.
        trial: function that executes a short part of a run, and returns the estimated cost of the whole run and the
            peak memory in bytes.
    """
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
