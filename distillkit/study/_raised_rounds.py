"""Increase of the number of rounds of a study after some of its runs were finished."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from distillkit._utils.files import write_atomically
from distillkit.study._design import StudyDesign
from distillkit.study._execution import PreparedRun, RunSpec, settings_config
from distillkit.study._record_files import read_json
from distillkit.study._records import decode_settings
from distillkit.study._tuning import read_choice

__all__ = ["has_more_rounds", "reopen_runs"]


def has_more_rounds(before: Any, now: Any) -> bool:
    """Return whether the config `now` of a task differs from its config `before` only by a larger number of rounds."""
    if before is None or now is None or before == now:
        return False
    rounds = (one["with"]["rounds"] for one in (before, now))
    return _without_rounds(before) == _without_rounds(now) and next(rounds) < next(rounds)


def _without_rounds(task: Mapping[str, Any]) -> dict[str, Any]:
    return {**task, "with": {**task["with"], "rounds": None}}


def reopen_runs(
    out: Path, design: StudyDesign, tasks: Collection[str], prepare: Callable[[RunSpec], PreparedRun]
) -> None:
    """Mark the finished runs on some tasks as unfinished, because the number of rounds of these tasks is raised.

    The runs then continue from their checkpoints. Their summaries are deleted, and so are the configurations that were
    chosen on these tasks. Runs to which the tasks' number of rounds does not apply stay finished: runs of candidates
    without rounds, and runs whose own settings contain the number of rounds.

    Args:
        out: the study's folder.
        design: tasks, candidates and seeds.
        tasks: names of the tasks whose number of rounds is raised.
        prepare: function that builds the objects of a run.

    Raises:
        ValueError: the design lacks a candidate that has runs on these tasks, or the new number of rounds would change
            another option of a method. The message names the candidate or the option, and no file is changed.
    """
    paths = [*out.glob("*/summary.json"), *out.glob("tries/*/summary.json")]
    lines = {path: line for path in paths if (line := read_json(path))["task"] in tasks and _continues(line)}
    if lacking := sorted({line["method"] for line in lines.values()} - {*design.candidates}):
        raise ValueError(
            f"rounds of {', '.join(tasks)} cannot be raised without {', '.join(lacking)}: pass all candidates of the "
            "study, or use another folder"
        )
    checked = set[tuple[str, str]]()
    for spec in _known_runs(out, design):
        folder, key = out / spec.folder, (spec.task, spec.method)
        line = lines.get(folder / "summary.json")
        if line is None or key in checked or line["settings"] != settings_config(spec, folder / "arguments"):
            continue
        run = prepare(spec)
        run.candidate.require_same(run.built, folder)
        checked.add(key)
    for path in (*lines, out / "summary.json"):
        path.unlink(missing_ok=True)
    _forget_choices(out / "choice.json", tasks)


def _continues(line: Mapping[str, Any]) -> bool:
    """Return whether a run is continued if the number of rounds of its task is raised.

    A run with its own setting `rounds` is not continued.

    Args:
        line: content of the run's `summary.json`.
    """
    own = "rounds" in decode_settings(line["settings"])
    return not own and (isinstance(line.get("rounds"), int) or line.get("error") is not None)


def _known_runs(out: Path, design: StudyDesign) -> list[RunSpec]:
    """Return the tuning runs, and the final runs with the settings that the study's `choice.json` contains."""
    runs = design.tuning_runs()
    found = read_choice(out)[0] if (out / "choice.json").exists() else []
    chosen = {
        (one.task, one.method): runs[one.task, one.method][one.chosen][0].settings
        for one in found
        if one.chosen is not None and one.chosen < len(runs.get((one.task, one.method), ()))
    }
    return [spec for search in runs.values() for specs in search for spec in specs] + design.final_runs(chosen)


def _forget_choices(path: Path, tasks: Collection[str]) -> None:
    if not path.exists():
        return
    content = read_json(path)
    content["tasks"] = {name: choices for name, choices in content["tasks"].items() if name not in tasks}
    write_atomically(path, json.dumps(content, indent=1) + "\n")
