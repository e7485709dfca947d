"""Reading and writing of a study's records, in the study's folder or in one file."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from distillkit._utils import check
from distillkit._utils.files import parse_json, read_bytes, write_atomically
from distillkit.study._records import Record, RecordError, Records, require_unique

__all__ = [
    "FORMATS",
    "RecordsLike",
    "as_path",
    "as_records",
    "read_json",
    "read_record",
    "read_records",
    "read_rows",
    "write_records",
]

FORMATS = {name: f"distillkit.{name}/1" for name in ("study", "choice", "records", "design")}
"""Formats of `study.json`, `choice.json`, the files of `write_records`, and registered designs."""

RecordsLike = str | os.PathLike[str] | Sequence[Record]
"""Records, or the path of a folder or file that holds records."""

_COLUMNS = (
    *(
        "round",
        "accuracy",
        "loss",
        "accuracy_by",
        "accuracy_clients",
        "accuracy_locals",
        "accuracy_personal",
        "client_drift",
        "set_quality",
    ),
    *("bytes_up", "bytes_down", "client_seconds", "seconds", "epsilon"),
)
"""Columns of a history that a file of records keeps."""


def read_records(folder: str | os.PathLike[str]) -> Records:
    """Read the records of all finished runs of a study.

    Args:
        folder: the study's folder, or a file written by `write_records`. Each subfolder with a `summary.json` is a run.

    Returns:
        The records, one per finished run. The `Records` also list the study's unfinished runs and the chosen
        configurations. The records are ordered by task, candidate and seed as in `study.json`, or by the runs' names if
        there is no `study.json`.

    Raises:
        FileNotFoundError: there is no such folder, or it contains no finished run.
        TypeError: `folder` is not a path.
        RecordError: a file is damaged or of another format; the message names the file.
    """
    path = as_path(folder)
    if path.is_file():
        return _read_records_file(path)
    if not path.is_dir():
        raise FileNotFoundError(f"folder {path} does not exist; it should hold the runs of a study")
    records = require_unique([read_record(summary) for summary in sorted(path.glob("*/summary.json"))])
    if not records:
        raise FileNotFoundError(_no_records_message(path))
    planned, choice = _planned_runs(path / "study.json"), path / "choice.json"
    choices = [read_json(choice)] if choice.is_file() else []
    if planned is None:
        return Records(records, choices=choices)
    place = {key: index for index, key in enumerate(planned)}
    done = {(r.task, r.method, r.seed): r for r in records}
    ordered = [done[key] for key in sorted(done, key=lambda key: place.get(key, len(place)))]
    found = Records(ordered, [key for key in planned if key not in done], choices)
    rounds = read_json(path / "study.json").get("late_rounds")
    return found if rounds is None else found.late(rounds)


def as_records(records: RecordsLike, name: str = "records") -> Records:
    """Check records and return them. If a path is given, read the records from the folder or file.

    Args:
        records: records, or the path of a folder or file that holds records.
        name: name of the argument, used in the error message.

    Raises:
        TypeError: `records` has another type.
        ValueError: there are no records, or two records have the same task, method and seed.
    """
    if isinstance(records, str | os.PathLike):
        return read_records(records)
    several = check.sequence(records, name, "`Record`s, or the folder of a study")
    wrong = [r for r in several if not isinstance(r, Record)]
    if wrong:
        raise TypeError(f"{name} must be a list of `Record`s, or the folder of a study, got {type(wrong[0]).__name__}")
    if not several:
        raise ValueError(f"{name} must hold at least one run, got none")
    unique = require_unique(several)
    return records if isinstance(records, Records) else Records(unique)


def write_records(records: RecordsLike, path: str | os.PathLike[str]) -> Path:
    """Write the records of a study to one file, which `read_records` reads.

    The file holds the data for tables and curves: summaries, accuracies and costs of rounds, missing runs, and the
    choice of configurations. It contains no images, no weights, and no values of single clients.

    Args:
        records: records of a study's finished runs, or the study's folder. To write the records of several studies,
            pass `read_records(a) + read_records(b)`.
        path: path of the file, usually `.jsonl`. The file has one line of JSON per run.

    Returns:
        The path.

    Raises:
        TypeError: `records` are neither records nor a path.
        RecordError: two runs have the same task, method and seed.
        OSError: the file cannot be written.
    """
    known = as_records(records)
    missing, choices = [list(key) for key in known.missing], list(known.choices)
    head = {"format": FORMATS["records"], "missing": missing, "choices": choices}
    lines = [
        {"line": dict(r.line), "rows": [{name: row[name] for name in _COLUMNS if name in row} for row in r.rows]}
        for r in known
    ]
    write_atomically(as_path(path, "path"), "".join(f"{json.dumps(one)}\n" for one in (head, *lines)))
    return Path(path)


def read_rows(path: Path, *, torn: bool = False) -> list[dict[str, Any]]:
    """Read the rows of a run's `history.jsonl`, one row per round. The rounds must be 1, 2, 3 and so on.

    Args:
        path: path of the file. A file that does not exist has no rows.
        torn: whether the last line may be incomplete; an incomplete line is then ignored.

    Raises:
        RecordError: a line is damaged, or the rounds are not consecutive (for example because two processes wrote the
            file).
    """
    lines = read_bytes(path, RecordError).splitlines() if path.exists() else []
    rows: list[dict[str, Any]] = []
    for number, line in enumerate(lines, 1):
        try:
            row = parse_json(line, path, RecordError, number)
        except RecordError:
            if torn and number == len(lines):
                break
            raise
        found = row.get("round") if isinstance(row, dict) else None
        if found != number:
            raise RecordError(
                f"{path} is damaged: line {number} is of round {found}, want {number}. It is not the history of one "
                "run; repeat the run in another folder"
            )
        rows.append(row)
    return rows


def as_path(given: str | os.PathLike[str], name: str = "folder") -> Path:
    """Return the path of a file or folder.

    Args:
        given: path as a string or a path object.
        name: name of the argument, used in the error message.

    Raises:
        TypeError: `given` is not a path.
    """
    if not isinstance(given, str | os.PathLike):
        raise TypeError(f"{name} must be a path, got {type(given).__name__}")
    return Path(given)


def read_json(path: Path, kind: str | None = None) -> Any:
    """Return the value in a JSON file.

    Args:
        path: path of the file.
        kind: name of the format that the file must have; None accepts any format.

    Raises:
        RecordError: the file is damaged, or has another format.
    """
    try:
        value = json.loads(path.read_bytes())
    except ValueError as error:
        raise RecordError(f"{path} is damaged: {error}; restore or delete it") from error
    found = value.get("format") if isinstance(value, Mapping) else None
    if kind not in (None, found):
        raise RecordError(f"{path} has the format {found!r}, this version reads {kind!r}; use another folder")
    return value


def read_record(path: Path) -> Record:
    """Read the record of one run.

    Args:
        path: path of the run's `summary.json`.

    Raises:
        RecordError: the summary or the history is damaged, or they differ in the number of rounds.
    """
    line = read_json(path)
    if not isinstance(line, Mapping):
        raise RecordError(f"{path} is damaged: a summary must be an object, got {type(line).__name__}")
    rows = read_rows(path.with_name("history.jsonl"))
    if line.get("rounds") is not None and line["rounds"] != len(rows):
        raise RecordError(f"{path} has {line['rounds']} rounds, but {path.with_name('history.jsonl')} has {len(rows)}")
    return Record(line, rows, path.parent)


def _read_records_file(path: Path) -> Records:
    """Read a file written by `write_records`."""
    try:
        head, *lines = map(json.loads, path.read_bytes().splitlines())
    except ValueError as error:
        raise RecordError(f"{path} is damaged, or not a file of records: {error}") from error
    kind = head.get("format") if isinstance(head, Mapping) else None
    if kind != FORMATS["records"]:
        raise RecordError(f"{path} has the format {kind!r}, this version reads {FORMATS['records']!r}")
    try:
        records = require_unique([Record(one["line"], one["rows"]) for one in lines])
        return Records(records, [(task, method, seed) for task, method, seed in head["missing"]], head["choices"])
    except (KeyError, TypeError) as error:
        raise RecordError(f"{path} is damaged: {error}") from error


def _planned_runs(path: Path) -> list[tuple[str, str, int]] | None:
    """Return (task, method, seed) of every run in a `study.json`, in the file's order; None if there is no file."""
    if not path.exists():
        return None
    study = read_json(path, FORMATS["study"])
    parts = study.get("parts", {})

    def includes(method: str, part: str, one: Any) -> bool:
        given = parts.get(method, {}).get(part)
        return given is None or one in given

    every = [(task, method, seed) for task in study["tasks"] for method in study["ways"] for seed in study["seeds"]]
    return [key for key in every if includes(key[1], "tasks", key[0]) and includes(key[1], "seeds", key[2])]


def _no_records_message(folder: Path) -> str:
    begun = len(list(folder.glob("*/history.jsonl")))
    message = f"folder {folder} has no finished run: no subfolder holds a summary.json"
    if begun:
        return f"{message}; {begun} runs have begun, so run the study again"
    if (folder / "summary.json").exists():
        return f"{message}. Its own summary.json is of one run or of another program; read it as JSON"
    return message
