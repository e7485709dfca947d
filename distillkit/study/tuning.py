"""How settings were chosen: the tries of every way, read back from a study's `choice.json`."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from distillkit.study.formatting import NONE, Table
from distillkit.study.record import plain
from distillkit.study.records import RECORDS, RecordError, as_path, read_json

__all__ = ["FORMAT", "TuningResult", "equal_search_sizes", "read_choice", "tuning_table"]

FORMAT = "distillkit.choice/1"
"""Of `choice.json`."""


@dataclass(frozen=True)
class TuningResult:
    """What was tried of one way on one task, and what was chosen.

    Attributes:
        task: on which settings were tried.
        method: the way's name.
        tries: an object a try: its `settings`, its `score` (the mean over the seeds of the tries; None if a run failed)
            and the `scores` by seed. Empty for a way that had one setting to begin with, or takes another's.
        chosen: the number of the chosen try; None for a way that takes another's settings.
        like: the way whose settings it takes.
        rule: by what was chosen; None where nothing was.
    """

    task: str
    method: str
    tries: tuple[Mapping[str, Any], ...]
    chosen: int | None
    like: str | None
    rule: str | None = None


def read_choice(folder: str | os.PathLike[str]) -> tuple[list[TuningResult], Mapping[str, Any]]:
    """Read what a study tried and chose, and by which rule.

    Args:
        folder: of the study, its `choice.json`, or a file of `write_records`.

    Returns:
        What was tried, by task and way in the order of the file; and by which `rule`, under which `seeds`.

    Raises:
        FileNotFoundError: nothing was chosen there.
        RecordError: the file is damaged, of another format, or does not choose the best of its tries.
    """
    path = as_path(folder)
    path = path / "choice.json" if path.is_dir() else path
    if not path.is_file():
        raise FileNotFoundError(f"folder has no choice: {path} does not exist; a study writes it after its last try")
    found = _choices(path)
    for choice in found:
        said = choice.get("format") if isinstance(choice, Mapping) else None
        if said != FORMAT:
            raise RecordError(f"{path} is of the format {said!r}, this version reads {FORMAT!r}: choose again")
    tuned = []
    for study_rule, task, ways in ((one["rule"], *pair) for one in found for pair in one["tasks"].items()):
        for method, way in ways.items():
            tries = tuple({**t, "settings": plain(t["settings"])} for t in way["tries"])
            rule = way.get("rule", study_rule) if tries else None
            one = TuningResult(task, method, tries, way["chosen"], way["like"], rule)
            scores = [t["score"] for t in one.tries if t["score"] is not None]
            if one.tries and (one.chosen is None or one.tries[one.chosen]["score"] != max(scores, default=None)):
                raise RecordError(f"{path} is damaged: of {method} on {task}, try {one.chosen} is not the best")
            tuned.append(one)
    rules, seeds = (dict.fromkeys(v) for v in ([c["rule"] for c in found], [s for c in found for s in c["seeds"]]))
    return tuned, {"rule": ", ".join(rules), "seeds": list(seeds)}


def equal_search_sizes(folder: str | os.PathLike[str]) -> dict[str, int]:
    """How many settings were tried of every way, by task; refuses a study where one way had more than another.

    The better tuned way wins: a comparison is fair only if all had as many tries. Ways that take another's settings
    have that one's tries; a way with one setting has one.

    Args:
        folder: of the study, its `choice.json`, or a file of `write_records`.

    Raises:
        FileNotFoundError, RecordError: see `read_choice`.
        ValueError: the numbers of tries differ, or there are no ways; they are listed.
    """
    tuned, _ = read_choice(folder)
    counts: dict[str, dict[str, int]] = {}
    for t in tuned:
        if t.like is None:
            counts.setdefault(t.task, {})[t.method] = max(1, len(t.tries))
    for task, ways in counts.items():
        if len(set(ways.values())) > 1:
            said = ", ".join(f"{name} {count}" for name, count in ways.items())
            raise ValueError(f"folder must hold a study with as many tries of every way, on {task} they are {said}")
    if not counts:
        raise ValueError("folder must hold a study that chose something, this one has no ways")
    return {task: next(iter(ways.values())) for task, ways in counts.items()}


def tuning_table(folder: str | os.PathLike[str], *, task: str | None = None) -> Table:
    """What was tried, what it came to, and what was chosen: to be printed under a table of results.

    Args:
        folder: of the study, its `choice.json`, or a file of `write_records`.
        task: only this one; default all.

    Returns:
        A row a task and way: how many settings were tried, those chosen (of several tries what they differ in), their
        score on the validation part, the worst try's score, and which chosen numbers lie at the edge of what was tried
        (of three values or more): a better one may lie beyond.

    Raises:
        FileNotFoundError, RecordError: see `read_choice`.
        ValueError: no such task.
    """
    every, facts = read_choice(folder)
    tuned = [t for t in every if task in (None, t.task)]
    if task is not None and not tuned:
        raise ValueError(f"task must be one of {', '.join(dict.fromkeys(repr(t.task) for t in every))}, got {task!r}")
    printed, rows = [], []
    for t in tuned:
        scores = [one["score"] for one in t.tries]
        known = [score for score in scores if score is not None]
        chosen = t.tries[t.chosen] if t.tries and t.chosen is not None else None
        edge = ", ".join(_edges(t.tries, chosen["settings"])) if chosen is not None else ""
        settings = f"as {t.like}" if t.like else NONE if chosen is None else _said(_varied(t.tries, chosen["settings"]))
        failed = len(scores) - len(known)
        tries = f"{len(scores)} ({failed} failed)" if failed else str(len(scores) or NONE)
        best, worst = max(known, default=None), min(known, default=None)
        shares = (NONE if score is None else f"{100 * score:.1f}" for score in (best, worst))
        printed.append((t.task, t.method, settings, tries, *shares, edge or NONE))
        numbers = {"task": t.task, "method": t.method, "tries": len(scores), "failed": failed, "like": t.like}
        rows.append({**numbers, "settings": settings, "score": best, "worst": worst, "edge": edge or None})
    header = ("task", "method", "chosen", "tries", "validation %", "worst try %", "at the edge")
    seeds = ", ".join(map(str, facts.get("seeds", ())))
    own: dict[str, list[str]] = {}
    for t in tuned:
        if t.rule not in (None, facts.get("rule")):
            own.setdefault(str(t.rule), []).append(t.method)
    rules = "; ".join([str(facts.get("rule")), *(f"{r} for {', '.join(dict.fromkeys(m))}" for r, m in own.items())])
    note = f"Tried on the validation part, never on the test set; rule: {rules}; seeds of the tries: {seeds}."
    return Table(header, tuple(printed), rows, (note,), left=3)


def _choices(path: Path) -> list[Any]:
    """Of a study's `choice.json`, or of a file of records, which may hold several studies' or none."""
    try:
        head = json.loads(path.read_bytes().split(b"\n", 1)[0])
    except ValueError:  # a `choice.json` is not of one line
        head = None
    if isinstance(head, Mapping) and head.get("format") == RECORDS:
        return list(head["choices"])
    return [read_json(path)]


def _varied(tries: Sequence[Mapping[str, Any]], chosen: Mapping[str, Any]) -> Mapping[str, Any]:
    """The chosen settings without those that every try had."""
    varied = {k: v for k, v in chosen.items() if any(one["settings"].get(k) != v for one in tries)}
    return varied or chosen


def _edges(tries: Sequence[Mapping[str, Any]], chosen: Mapping[str, Any]) -> list[str]:
    """The settings whose chosen number is the least or the largest of at least three."""
    found = []
    for name, value in chosen.items():
        values = {t["settings"].get(name) for t in tries if _is_number(t["settings"].get(name))}
        if len(values) > 2 and value in (min(values), max(values)):
            found.append(name)
    return found


def _said(settings: Mapping[str, Any]) -> str:
    words = (v if isinstance(v, str) else json.dumps(v) for v in settings.values())
    return ", ".join(f"{name}={value}" for name, value in zip(settings, words)) or NONE


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
