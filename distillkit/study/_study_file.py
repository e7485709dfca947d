"""The file `study.json`, which describes a study and is checked when the study is continued."""

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
from distillkit.study.candidate import Candidate

__all__ = ["write_study"]


def write_study(out: Path, design: StudyDesign, facts: Mapping[str, Any]) -> None:
    """Write `study.json`, after checking that no task or candidate of the same name has changed.

    Args:
        out: the study's folder.
        design: tasks, candidates and seeds.
        facts: further arguments of the study, by name, which must not change.

    Raises:
        ValueError: the folder contains another study.
    """
    store, path = out / "data", out / "study.json"
    fixed = {
        **facts,
        "tune_seeds": list(design.tune_seeds),
        "tune_on": None if design.tune_on is None else to_config(design.tune_on, store=store, name="tune_on"),
    }
    content: dict[str, Any] = {
        "format": FORMATS["study"],
        **fixed,
        "tasks": {n: to_config(task, store=store, name=f"tasks[{n!r}]") for n, task in design.tasks.items()},
        "ways": {name: _candidate_config(out, name, c) for name, c in design.candidates.items()},
        "seeds": list(design.seeds),
        "parts": design.parts,
    }
    before = read_json(path, FORMATS["study"]) if path.exists() else content
    for key in fixed:
        if before.get(key) != content[key]:  # older studies lack some facts, which are None today
            raise ValueError(f"{path} has {key}={before.get(key)}, got {content[key]}; use another folder")
    for key, what in (("tasks", "tasks"), ("ways", "candidates")):
        both = [name for name in content[key] if name in before[key]]
        if changed := [name for name in both if before[key][name] != content[key][name]]:
            raise ValueError(
                f"{path} has different {what} with the names {', '.join(changed)}; use another name or another folder"
            )
        content[key] = {**before[key], **content[key]}
    others = {name: part for name, part in before.get("parts", {}).items() if name not in design.candidates}
    content["parts"] = {**others, **content["parts"]}
    write_atomically(path, json.dumps({**content, "versions": versions()}, indent=1) + "\n")


def _candidate_config(out: Path, name: str, candidate: Candidate) -> dict[str, Any]:
    parts = {
        "way": candidate.for_record(),
        "settings": dict(candidate.settings),
        "tries": [dict(settings) for settings in candidate.search],
    }
    store, where = out / "arguments", f"candidates[{name!r}]"
    config = {key: to_config(part, store=store, name=f"{where}.{key}") for key, part in parts.items()}
    options = config["way"]["with"]  # under the first records' names, so that older studies can be continued
    config["way"]["with"] = {candidate.old_options.get(key, key): value for key, value in options.items()}
    return {**config, "like": candidate.like, "rule": candidate.rule}
