"""Contents of the file `study.json`, which describes a study and is checked when the study is continued."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from distillkit._utils.files import write_atomically
from distillkit._utils.provenance import versions
from distillkit.serialization import to_config
from distillkit.study._design import StudyDesign
from distillkit.study._record_files import FORMATS, read_json
from distillkit.study._records import decode_settings
from distillkit.study.candidate import Candidate
from distillkit.study.task import Task

__all__ = ["write_study"]


def write_study(out: Path, design: StudyDesign, facts: Mapping[str, Any]) -> None:
    """Write `study.json`. If the file exists, first check that its tasks, candidates and `facts` have not changed.

    Raises:
        ValueError: something has changed. A search may have got further configurations at its end.
    """
    path = out / "study.json"
    tune_on = None if design.tune_on is None else _task_config(out, design.tune_on, "tune_on")
    fixed = {**facts, "tune_seeds": list(design.tune_seeds), "tune_on": tune_on}
    content: dict[str, Any] = {
        "format": FORMATS["study"],
        **fixed,
        "tasks": {name: _task_config(out, task, f"tasks[{name!r}]") for name, task in design.tasks.items()},
        "ways": {name: _candidate_config(out, name, c) for name, c in design.candidates.items()},
        "seeds": list(design.seeds),
        "parts": design.parts,
    }
    before = read_json(path, FORMATS["study"]) if path.exists() else content
    for key in fixed:
        if before[key] != content[key]:
            raise ValueError(f"{path} has {key}={before[key]}, got {content[key]}; use another folder")
    for name in {*content["ways"]} & {*before["ways"]}:  # a search may be continued, and keeps its longer form
        old, new = before["ways"][name]["tries"], content["ways"][name]["tries"]
        if old[: len(new)] == new[: len(old)]:
            before["ways"][name]["tries"] = content["ways"][name]["tries"] = max(old, new, key=len)
    for key, what in (("tasks", "tasks"), ("ways", "candidates")):
        both = [name for name in content[key] if name in before[key]]
        changed = {name: _changes(before[key][name], content[key][name]) for name in both}
        if listed := [f"{name} ({'; '.join(options)})" for name, options in changed.items() if options]:
            raise ValueError(
                f"{path} has different {what} with the names {', '.join(listed)}; use another name or another folder"
            )
        content[key] = {**before[key], **content[key]}
    others = {name: part for name, part in before["parts"].items() if name not in design.candidates}
    content["parts"] = {**others, **content["parts"]}
    write_atomically(path, json.dumps({**content, "versions": versions()}, indent=1) + "\n")


def _changes(before: Any, now: Any, name: str = "") -> list[str]:
    """Return a text for each option whose value differs between two configs."""
    if before == now:
        return []
    one, other = decode_settings(before), decode_settings(now)
    if not (isinstance(one, Mapping) and isinstance(other, Mapping)):
        return [f"{name}: was {json.dumps(one)}, now {json.dumps(other)}"]
    inner = f"{name}." if name not in ("", "with") else ""
    found = [text for key in {**one, **other} for text in _changes(one.get(key), other.get(key), f"{inner}{key}")]
    return found or [f"{name}: another form"]


def _task_config(out: Path, task: Task, name: str) -> Any:
    return to_config(task, store=out / "data", name=name)


def _candidate_config(out: Path, name: str, candidate: Candidate) -> dict[str, Any]:
    parts = {
        "way": candidate.for_record(),
        "settings": dict(candidate.settings),
        "tries": [dict(settings) for settings in candidate.search],
    }
    store, where = out / "arguments", f"candidates[{name!r}]"
    config = {key: to_config(part, store=store, name=f"{where}.{key}") for key, part in parts.items()}
    options = config["way"]["with"]  # use the old names of renamed options, so that older studies can be continued
    config["way"]["with"] = {candidate.old_options.get(key, key): value for key, value in options.items()}
    return {**config, "like": candidate.like, "rule": candidate.rule}
