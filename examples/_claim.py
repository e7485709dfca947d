"""Claim of a paper that `claims.py` tests."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from distillkit.study import Candidate, Records, Task

__all__ = ["Claim"]


@dataclass(frozen=True)
class Claim:
    """Comparison of two candidates.

    Attributes:
        text: the claim as a sentence.
        tasks: tasks of the runs. The claim is tested on the first; the others are described.
        candidates: baseline and candidate; the claim is that the candidate is more accurate.
        rounds: number of last rounds over which the accuracy is averaged.
        effect: difference in accuracy that the runs should find: that of the paper, as a fraction.
        pilot: settings of the pilot's runs, by candidate, which are not searched.
        describe: function of the records that returns a further table.
        measured: the candidates with additional measurements in the history, for `--inside`.
        measured_task: task of the measurements; None: the first task.
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

    def inside(self) -> Claim:
        """Return this claim with the candidates that measure more, on the task for the measurements."""
        task = self.measured_task or self.tasks[0]
        return replace(self, candidates=dict(self.measured or {}), tasks=(task,), describe=None)
