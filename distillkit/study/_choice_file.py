"""Contents of the file `choice.json`: scores of all tested configurations, and the chosen configurations."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from distillkit._utils.files import write_atomically
from distillkit.study._design import StudyDesign
from distillkit.study._execution import RunSpec
from distillkit.study._guarantee import EXACT
from distillkit.study._record_files import FORMATS, read_json, read_record
from distillkit.study._records import Records
from distillkit.study._tuning import best_configuration, score_configuration

__all__ = ["score_searches", "write_choice"]


def score_searches(
    out: Path, design: StudyDesign, runs: Mapping[tuple[str, str], Sequence[Sequence[RunSpec]]], rule: str,
    late_rounds: int | None,
) -> dict[tuple[str, str], list[dict[str, Any]]]:  # fmt: skip
    """Apply `score_configuration` to each configuration, and return the results by task and candidate.

    Args:
        out: the study's folder, with all tuning runs.
        design: tasks, candidates and seeds.
        runs: tuning runs of each configuration, by task and candidate.
        rule, late_rounds: arguments of `Study`.
    """

    def summary(spec: RunSpec, own: str) -> Mapping[str, Any]:
        path = out / spec.folder / "summary.json"
        return Records([read_record(path)]).late(late_rounds)[0].line if own == "late" else read_json(path)

    rules = {name: candidate.rule or rule for name, candidate in design.candidates.items()}
    return {
        (task, method): [score_configuration([summary(s, rules[method]) for s in one], rules[method]) for one in search]
        for (task, method), search in runs.items()
    }


def _charged(out: Path, search: Sequence[Sequence[RunSpec]]) -> bool:
    """Return whether a run charged a privacy ledger, so that its accuracies may belong to private records."""
    return any((out / spec.folder / "ledger.jsonl").exists() for one in search for spec in one)


def write_choice(
    out: Path, design: StudyDesign, runs: Mapping[tuple[str, str], Sequence[Sequence[RunSpec]]],
    scores: Mapping[tuple[str, str], Sequence[Mapping[str, Any]]], facts: Mapping[str, Any],
) -> dict[tuple[str, str], Mapping[str, Any]]:  # fmt: skip
    """Choose the best configurations, and write the choice with all scores to `choice.json`.

    If the candidate is private, `not_private` says that its scores are not covered by epsilon.

    Args:
        out: the study's folder.
        design: tasks, candidates and seeds.
        runs: tuning runs of each configuration, by task and candidate.
        scores: results of `score_searches`.
        facts: the options `rule` and `late_rounds` of the `Study`, by name.

    Returns:
        The chosen settings, by task and candidate.

    Raises:
        ValueError: no configuration of a candidate has a score, because every configuration has a tuning run that
            failed or has no validation accuracy.
    """
    chosen: dict[tuple[str, str], Mapping[str, Any]] = {}
    content: dict[str, dict[str, Any]] = {task: {} for task in design.tuned_tasks}
    for (task, method), tries in scores.items():
        candidate = design.candidates[method]
        best = best_configuration(tries, f"candidates[{method!r}] on {task}")
        chosen[task, method] = runs[task, method][best][0].settings
        content[task][method] = {
            "tries": tries, "chosen": best, "like": None, "rule": candidate.rule or facts["rule"],
            **({"not_private": EXACT} if _charged(out, runs[task, method]) else {}),
        }  # fmt: skip
    for task in content:
        for method, candidate in design.candidates.items():
            if design.has(task, method):
                index = None if candidate.like else 0
                content[task].setdefault(method, {"tries": [], "chosen": index, "like": candidate.like})
    path = out / "choice.json"
    before = read_json(path)["tasks"] if path.exists() else {}
    content = {task: {**before.get(task, {}), **content.get(task, {})} for task in {**before, **content}}
    late = {} if facts["late_rounds"] is None else {"late_rounds": facts["late_rounds"]}
    head = {"format": FORMATS["choice"], "rule": facts["rule"], "seeds": list(design.tune_seeds), **late}
    write_atomically(path, json.dumps({**head, "tasks": content}, indent=1) + "\n")
    return chosen
