"""Estimate of a study's cost, from a short trial run of each candidate."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from distillkit._utils.tables import markdown_table
from distillkit.study._design import StudyDesign
from distillkit.study._execution import RunSpec
from distillkit.study.candidate import Candidate, Cost

__all__ = ["MAX_TRIAL_SHARE", "Estimate", "EstimateRow", "estimate_rows"]

MAX_TRIAL_SHARE = 0.05
"""Largest share of a candidate's total time that its trial run may take, if the candidate has a `like`.

Above this share, the cost is taken from the trial of the candidate named in `like`.
"""


@dataclass(frozen=True)
class EstimateRow:
    """Estimated cost of one candidate on one task.

    Attributes:
        task, method: names of the task and the candidate.
        runs: number of runs that are not finished yet, including tuning runs.
        cost: expected duration of one run, and the size of its messages.
        memory: peak memory of the process during the trial run (a short part of one run), in bytes; None if unknown.
        like: name of another candidate, whose cost was copied; None if the cost was estimated from a trial run of this
            candidate. The cost is copied if a trial run would take more than the share `MAX_TRIAL_SHARE` of the
            candidate's total time.
    """

    task: str
    method: str
    runs: int
    cost: Cost
    memory: int | None
    like: str | None = None


@dataclass(frozen=True)
class Estimate:
    """Estimated cost of the unfinished runs of a study. Print it to see a table.

    The estimate extrapolates from a trial run of each candidate's first configuration, with two rounds or some steps.
    It is inaccurate for a candidate whose later rounds or other configurations differ in cost. If a candidate had no
    trial run, its cost was copied from another candidate, which the table names.

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
                f"{row.task}, {row.method}{'' if row.like is None else f' (as {row.like})'}",
                str(row.runs),
                f"{row.cost.seconds:.1f}",
                *("–" if n is None else f"{n / 1e6:.2f}" for n in (row.cost.bytes_up, row.cost.bytes_down)),
                "–" if row.memory is None else f"{row.memory / 1e6:.0f}",
            ]
            for row in self.rows
        ]
        total = f"{sum(row.runs for row in self.rows)} runs, about {_duration(self.seconds)}"
        copied = sum(row.like is not None for row in self.rows)
        note = (
            f"\nCandidates without a trial, which would take over {MAX_TRIAL_SHARE:.0%} of their time: {copied}. "
            "Their cost is that of the candidate in parentheses."
        )
        in_processes = f" in {self.processes} processes" * (self.processes > 1)
        return f"{markdown_table(header, lines)}\n{total}{in_processes}.{note * (copied > 0)}"


def estimate_rows(
    design: StudyDesign, out: Path, trial: Callable[[RunSpec], tuple[Cost, int | None]]
) -> tuple[EstimateRow, ...]:
    """Estimate the cost of the unfinished runs, with one row per task and candidate.

    Args:
        design: the study's design.
        out: the study's folder.
        trial: function that executes a short part of a run, and returns the estimated cost of the whole run and the
            peak memory in bytes.
    """
    specs = [spec for search in design.tuning_runs().values() for runs in search for spec in runs]
    specs += design.final_runs({})
    missing: dict[tuple[str, str], list[RunSpec]] = {(spec.task, spec.method): [] for spec in specs}
    for spec in specs:
        if not (out / spec.folder / "summary.json").exists():
            missing[spec.task, spec.method].append(spec)
    rows, trials = dict[tuple[str, str], EstimateRow](), dict[tuple[str, str], float]()
    for (task, method), own in sorted(missing.items(), key=lambda item: design.candidates[item[0][1]].like is not None):
        candidate, like = design.candidates[method], design.candidates[method].like
        if own and like is not None and (task, like) in trials and _same_program(candidate, design.candidates[like]):
            known = rows[task, like]
            if trials[task, like] > MAX_TRIAL_SHARE * len(own) * known.cost.seconds:
                rows[task, method] = EstimateRow(task, method, len(own), known.cost, known.memory, like)
                continue
        if own:
            began = time.perf_counter()
            rows[task, method] = EstimateRow(task, method, len(own), *trial(own[0]))
            trials[task, method] = time.perf_counter() - began
    return tuple(rows[key] for key in missing if key in rows)


def _same_program(one: Candidate, other: Candidate) -> bool:
    """Return whether two candidates have the same function `make`, and differ at most in settings passed to it."""
    outside = [name for each in (one, other) for name in each.settings if not each.passes_to_make(name)]
    return one.make is other.make and one.for_record() == other.for_record() and not outside


def _duration(seconds: float) -> str:
    for size, unit in ((86400, "days"), (3600, "hours"), (60, "minutes")):
        if seconds >= 1.5 * size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.0f} seconds"
