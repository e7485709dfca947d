"""Claim of a paper that `claims.py` tests."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from distillkit.study import Candidate, Records, Task

__all__ = ["Claim"]


@dataclass(frozen=True)
class Claim:
    """Claim of a paper, tested by a comparison of two candidates.

    Attributes:
        text: the claim as a sentence.
        tasks: tasks of the runs. The claim is tested on the first task; results on the other tasks are only described.
        candidates: baseline and candidate. The claim is that the candidate is more accurate than the baseline.
        rounds: number of last rounds over which the accuracy is averaged.
        effect: difference in accuracy that the test should detect: the difference in the paper, as a fraction.
        pilot: settings of each candidate in the pilot runs, which have no search.
        describe: function of the records that returns a further table.
        measured: the same candidates with additional measurements in the history, for the option `--inside`.
        measured_task: task of the runs with measurements; None for the first task.
        least: smallest number of seeds of the registered runs.
    """

    text: str
    tasks: tuple[Task, ...]
    candidates: dict[str, Candidate]
    rounds: int
    effect: float
    pilot: Mapping[str, Mapping[str, Any]]
    describe: Callable[[Records], object] | None = None
    measured: Mapping[str, Candidate] | None = None
    measured_task: Task | None = None
    least: int = 5

    def inside(self) -> Claim:
        """Return this claim with the candidates that measure more, on the task for the measurements."""
        task = self.measured_task or self.tasks[0]
        return replace(self, candidates=dict(self.measured or {}), tasks=(task,), describe=None)
