"""Contents of the file `study.json`, which describes a study and is checked when the study is continued."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from distillkit._utils import check
from distillkit._utils.files import write_atomically
from distillkit._utils.provenance import versions
from distillkit.serialization import to_config
from distillkit.study._design import StudyDesign
from distillkit.study._raised_rounds import has_more_rounds
from distillkit.study._record_files import FORMATS, read_json
from distillkit.study._records import decode_settings
from distillkit.study.candidate import Candidate
from distillkit.study.task import Task

__all__ = ["design_config", "write_study"]


def write_study(
    out: Path, design: StudyDesign, facts: Mapping[str, Any], reopen: Callable[[Collection[str]], object]
) -> None:
    """Write `study.json`. If the file exists, first check that its tasks and candidates have not changed.

    One change of a task is allowed: its number of rounds may become larger.

    Args:
        out: the study's folder.
        design: tasks, candidates and seeds.
        facts: other arguments of the study that must not change, by name.
        reopen: function that is called with the names of the tasks that now have more rounds, before the file is
            written. It is not called if there are no such tasks.

    Raises:
        ValueError: a task or candidate in the file differs from the task or candidate with this name in `design`, or
            one of the `facts` has changed.
    """
    path, fixed = out / "study.json", _fixed_config(out, design, facts)
    content: dict[str, Any] = {
        "format": FORMATS["study"],
        **fixed,
        "tasks": {name: _task_config(out, task, f"tasks[{name!r}]") for name, task in design.tasks.items()},
        "ways": {name: _candidate_config(out, name, c) for name, c in design.candidates.items()},
        "seeds": list(design.seeds),
        "parts": design.parts,
    }
    before = read_json(path, FORMATS["study"]) if path.exists() else content
    raised = {n for n, one in content["tasks"].items() if has_more_rounds(before["tasks"].get(n), one)}
    if has_more_rounds(before.get("tune_on"), fixed["tune_on"]):
        raised.add(str(design.tune_on and design.tune_on.name))
        before["tune_on"] = fixed["tune_on"]
    for key in fixed:
        if before.get(key) != content[key]:  # files of older studies lack some keys, for which None is compared
            raise ValueError(f"{path} has {key}={before.get(key)}, got {content[key]}; use another folder")
    for key, what in (("tasks", "tasks"), ("ways", "candidates")):
        both = [name for name in content[key] if name in before[key] and (key != "tasks" or name not in raised)]
        changed = {name: _changes(before[key][name], content[key][name]) for name in both}
        if listed := [f"{name} ({'; '.join(options)})" for name, options in changed.items() if options]:
            raise ValueError(
                f"{path} has different {what} with the names {', '.join(listed)}; use another name or another folder"
            )
        content[key] = {**before[key], **content[key]}
    if raised:
        reopen(sorted(raised))
    others = {name: part for name, part in before.get("parts", {}).items() if name not in design.candidates}
    content["parts"] = {**others, **content["parts"]}
    write_atomically(path, json.dumps({**content, "versions": versions()}, indent=1) + "\n")


def design_config(
    out: Path, design: StudyDesign, facts: Mapping[str, Any], task: str, methods: Sequence[str]
) -> dict[str, Any]:
    """Return a JSON value that describes everything on which the runs of some candidates on a task depend.

    The value contains the task, the candidates, the seeds, and the rule that chooses the best configuration.

    Args:
        out, design, facts: arguments of `write_study`.
        task: name of the task.
        methods: names of the candidates. If a candidate uses the settings of another candidate (`like`), the other
            candidate is included.

    Raises:
        ValueError: the study has no such task or candidate, or one of the candidates does not run on the task.
    """
    check.one_of(task, "task", tuple(design.tasks))
    candidates = {check.one_of(name, "a candidate", tuple(design.candidates)): None for name in methods}
    if lacking := [name for name in candidates if task not in (design.candidates[name].tasks or design.tasks)]:
        raise ValueError(f"candidates must run on the task {task!r}, but {lacking[0]!r} does not")
    sources = {like: None for name in candidates if (like := design.candidates[name].like) is not None}
    both = [s for s in design.seeds if all(s in (design.candidates[n].seeds or design.seeds) for n in candidates)]
    content = {
        **_fixed_config(out, design, facts),
        "task": _task_config(out, design.tasks[task], f"tasks[{task!r}]"),
        "candidates": {n: _candidate_config(out, n, design.candidates[n]) for n in {**candidates, **sources}},
        "seeds": both,
    }
    return json.loads(json.dumps(content))


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


def _fixed_config(out: Path, design: StudyDesign, facts: Mapping[str, Any]) -> dict[str, Any]:
    tune_on = None if design.tune_on is None else _task_config(out, design.tune_on, "tune_on")
    return {**facts, "tune_seeds": list(design.tune_seeds), "tune_on": tune_on}


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
