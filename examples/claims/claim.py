"""Claim of a paper, and the description of the study that tests it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from distillkit.serialization import to_config
from distillkit.study import Candidate, Study, Task


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
    measured: Mapping[str, Candidate] | None = None
    measured_task: Task | None = None
    least: int = 5

    def inside(self) -> Claim:
        """Return this claim with the candidates that measure more, on the task for the measurements."""
        task = self.measured_task or self.tasks[0]
        return replace(self, candidates=dict(self.measured or {}), tasks=(task,))


def described(study: Study, task: str, methods: Sequence[str], extend: Mapping[str, int]) -> dict[str, Any]:
    """Return a JSON value with everything on which the runs of some candidates on a task depend.

    Args:
        study: the study. The code of the candidates' functions is not described: the commit fixes it.
        task, methods: names of the task and of the candidates.
        extend: largest number of extensions of the searches, by setting.
    """
    design = study.design
    named = {name: design.candidates[name] for name in methods}
    candidates = {
        name: {
            "candidate": to_config(one.for_record()),
            "settings": {key: to_config(value) for key, value in one.settings.items()},
            "search": [{key: to_config(value) for key, value in settings.items()} for settings in one.search],
            "like": one.like,
            "rule": one.rule,
        }
        for name, one in named.items()
    }
    content = {
        "rule": study.rule, "late_rounds": study.late_rounds, "extend": dict(extend),
        "tune_seeds": list(design.tune_seeds), "task": to_config(design.tasks[task]), "candidates": candidates,
        "seeds": list(design.seeds),
    }  # fmt: skip
    return dict(json.loads(json.dumps(content)))
