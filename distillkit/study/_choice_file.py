"""The file `choice.json`, with the scores of all configurations and the chosen ones."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from distillkit._utils.files import write_atomically
from distillkit.study._design import StudyDesign
from distillkit.study._record_files import FORMATS, read_json, read_record
from distillkit.study._records import Records
from distillkit.study._tuning import best_configuration, score_configuration

__all__ = ["write_choice"]


def write_choice(out: Path, design: StudyDesign, rule: str, late_rounds: int | None) -> dict[tuple[str, str], int]:
    """Choose the best configurations, and write the choice with all scores to `choice.json`.

    Args:
        out: the study's folder, with all tuning runs.
        design: tasks, candidates and seeds.
        rule, late_rounds: arguments of `Study`.

    Returns:
        The index of the best configuration, by task and candidate.

    Raises:
        ValueError: no configuration of a candidate has a score.
    """

    def summary(folder: str, own: str) -> Mapping[str, Any]:
        path = out / folder / "summary.json"
        return Records([read_record(path)]).late(late_rounds)[0].line if own == "late" else read_json(path)

    chosen: dict[tuple[str, str], int] = {}
    content: dict[str, dict[str, Any]] = {task: {} for task in design.tuned_tasks}
    for (task, method), search in design.tuning_runs().items():
        own = design.candidates[method].rule or rule
        scores = [score_configuration([summary(spec.folder, own) for spec in specs], own) for specs in search]
        best = chosen[task, method] = best_configuration(scores, f"candidates[{method!r}] on {task}")
        content[task][method] = {"tries": scores, "chosen": best, "like": None, "rule": own}
    for task in content:
        for method, candidate in design.candidates.items():
            if design.has(task, method):
                index = None if candidate.like else 0
                content[task].setdefault(method, {"tries": [], "chosen": index, "like": candidate.like})
    path = out / "choice.json"
    before = read_json(path)["tasks"] if path.exists() else {}
    content = {task: {**before.get(task, {}), **content.get(task, {})} for task in {**before, **content}}
    late = {} if late_rounds is None else {"late_rounds": late_rounds}
    facts = {"format": FORMATS["choice"], "rule": rule, "seeds": list(design.tune_seeds), **late}
    write_atomically(path, json.dumps({**facts, "tasks": content}, indent=1) + "\n")
    return chosen
