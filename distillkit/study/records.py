"""The records of a study's runs, read back from their folder or from one file: what tables and pictures are made of."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from distillkit._utils import check
from distillkit._utils.files import write_atomically
from distillkit.study.history import RecordError, read_rows
from distillkit.study.record import Record, Records, once

__all__ = [
    "RECORDS",
    "STUDY",
    "Record",
    "RecordError",
    "Records",
    "as_path",
    "read_file",
    "read_json",
    "read_records",
    "write_records",
]

STUDY = "distillkit.study/1"
"""The format of `study.json`."""

RECORDS = "distillkit.records/1"
"""The format of a file that `write_records` writes."""

Given = str | os.PathLike[str] | Sequence[Record]
"""Records, or the folder where they are."""

COLUMNS = (
    *("round", "accuracy", "loss", "accuracy_by", "accuracy_clients", "accuracy_locals", "accuracy_personal"),
    *("bytes_up", "bytes_down", "client_seconds", "seconds", "epsilon"),
)
"""The columns of a history that a file of records keeps."""


def read_records(folder: str | os.PathLike[str]) -> Records:
    """Read the records of every finished run of a study, to make tables and pictures of them.

    Args:
        folder: of the study; each of its folders with a `summary.json` is a run. Or a file of `write_records`.

    Returns:
        A list, in the order of the study (`study.json`: its tasks, its ways, its seeds), or of the runs' names where
        there is none. It knows too which runs of the study are not finished, and what it chose.

    Raises:
        FileNotFoundError: no such folder, or no finished run in it.
        TypeError: no path.
        RecordError: a file is damaged, or of another make; it is named.
    """
    where = as_path(folder)
    if where.is_file():
        return _read_file(where)
    if not where.is_dir():
        raise FileNotFoundError(f"folder {where} does not exist; it should hold the runs of a study")
    records = [_read(path) for path in sorted(where.glob("*/summary.json"))]
    if not records:
        raise FileNotFoundError(_nothing(where))
    plan, choice = _plan(where / "study.json"), where / "choice.json"
    choices = [read_json(choice)] if choice.is_file() else []
    if plan is None:
        return Records(once(records), choices=choices)
    place = {key: index for index, key in enumerate(plan)}
    done = {(r.task, r.method, r.seed): r for r in once(records)}
    ordered = sorted(done.values(), key=lambda r: place.get((r.task, r.method, r.seed), len(place)))
    return Records(ordered, [key for key in plan if key not in done], choices)


def as_records(records: Given, name: str = "records") -> Records:
    """Records as a table takes them: a folder is read, a list is looked through.

    Args:
        records: of a study, or its folder.
        name: of the argument, for the message.

    Raises:
        TypeError: something else.
        ValueError: none, or two of the same task, method and seed.
    """
    if isinstance(records, str | os.PathLike):
        return read_records(records)
    several = check.sequence(records, name, "`Record`s, or the folder of a study")
    wrong = [r for r in several if not isinstance(r, Record)]
    if wrong:
        raise TypeError(f"{name} must be a list of `Record`s, or the folder of a study, got {type(wrong[0]).__name__}")
    if not several:
        raise ValueError(f"{name} must hold at least one run, got none")
    known = once(several)
    return records if isinstance(records, Records) else Records(known)


def write_records(records: Given, path: str | os.PathLike[str]) -> Path:
    """Write the records of a study to one file, to be kept beside a paper or sent; `read_records` reads it again.

    It holds what tables and curves are made of: the runs' lines, of their rounds the accuracies and the costs, which
    runs are missing, and what was tried and chosen. It holds no images, no weights, and no client by number.

    Args:
        records: of a study, or its folder; of several: `read_records(a) + read_records(b)`.
        path: the file, a line of JSON a run; `.jsonl` by custom.

    Returns:
        The file.

    Raises:
        TypeError: something else than records.
        RecordError: two runs are of one task, method and seed.
        OSError: the file cannot be written.
    """
    known = as_records(records)
    head = {"format": RECORDS, "missing": [list(key) for key in known.missing], "choices": list(known.choices)}
    lines = [
        {"line": dict(r.line), "rows": [{name: row[name] for name in COLUMNS if name in row} for row in r.rows]}
        for r in known
    ]
    write_atomically(as_path(path, "path"), "".join(f"{json.dumps(one)}\n" for one in (head, *lines)))
    return Path(path)


def read_file(path: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """What `write_records` wrote: its head, and an object a run.

    Args:
        path: the file.

    Raises:
        RecordError: it is damaged or of another format.
    """
    try:
        head, *lines = map(json.loads, path.read_bytes().splitlines())
    except ValueError as error:
        raise RecordError(f"{path} is damaged, or no file of records: {error}") from error
    kind = head.get("format") if isinstance(head, Mapping) else None
    if kind != RECORDS:
        raise RecordError(f"{path} is of the format {kind!r}, this version reads {RECORDS!r}")
    return dict(head), lines


def as_path(given: str | os.PathLike[str], name: str = "folder") -> Path:
    """The path of a file or a folder that was named.

    Args:
        given: its name or path.
        name: of the argument, for the message.

    Raises:
        TypeError: neither.
    """
    if not isinstance(given, str | os.PathLike):
        raise TypeError(f"{name} must be a path, got {type(given).__name__}")
    return Path(given)


def read_json(path: Path) -> Any:
    """The value in a file of JSON.

    Args:
        path: the file.

    Raises:
        RecordError: it is damaged; it is named.
    """
    try:
        return json.loads(path.read_bytes())
    except ValueError as error:
        raise RecordError(f"{path} is damaged: {error}") from error


def _read(path: Path) -> Record:
    line = read_json(path)
    if not isinstance(line, Mapping):
        raise RecordError(f"{path} is damaged: a run's line must be an object, got {type(line).__name__}")
    rows = read_rows(path.with_name("history.jsonl"))
    if line.get("rounds") is not None and line["rounds"] != len(rows):
        raise RecordError(f"{path} says {line['rounds']} rounds, and {path.with_name('history.jsonl')} has {len(rows)}")
    return Record(line, rows, path.parent)


def _read_file(path: Path) -> Records:
    """What `write_records` wrote."""
    head, lines = read_file(path)
    try:
        records = [Record(one["line"], one["rows"]) for one in lines]
        return Records(once(records), [(task, way, seed) for task, way, seed in head["missing"]], head["choices"])
    except (KeyError, TypeError) as error:
        raise RecordError(f"{path} is damaged: {error}") from error


def _plan(path: Path) -> list[tuple[str, str, int]] | None:
    """Every run of the study in its order: (task, method, seed); None if no file says."""
    if not path.exists():
        return None
    said = read_json(path)
    kind = said.get("format") if isinstance(said, Mapping) else None
    if kind != STUDY:
        raise RecordError(f"{path} is of the format {kind!r}, this version reads {STUDY!r}: run the study again")
    parts = said.get("parts", {})

    def has(way: str, part: str, one: Any) -> bool:
        among = parts.get(way, {}).get(part)
        return among is None or one in among

    every = [(task, way, seed) for task in said["tasks"] for way in said["ways"] for seed in said["seeds"]]
    return [(task, way, seed) for task, way, seed in every if has(way, "tasks", task) and has(way, "seeds", seed)]


def _nothing(folder: Path) -> str:
    """Why a folder has no records."""
    begun = len(list(folder.glob("*/history.jsonl")))
    said = f"folder {folder} has no finished run: none of its folders holds a summary.json"
    if begun:
        return f"{said}; {begun} runs are begun: go on with the study"
    if (folder / "summary.json").exists():
        return f"{said}. Its own summary.json is of an older script, or of one run: read it as JSON"
    return said
