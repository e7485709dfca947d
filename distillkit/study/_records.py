"""Records of the finished runs of a study, and reading and writing of a study's files."""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from distillkit._utils import check
from distillkit._utils.files import parse_json, read_bytes, write_atomically
from distillkit._utils.plain_values import plain_values
from distillkit._utils.provenance import versions
from distillkit._utils.tables import data_frame, flat
from distillkit.study.history import RecordError, Row, accuracy_late, read_rows

FORMATS = {name: f"distillkit.{name}/1" for name in ("study", "choice", "records")}
"""Formats of `study.json`, `choice.json` and the files of `write_records`."""

_COLUMNS = (
    "round", "accuracy", "loss", "accuracy_by", "accuracy_clients", "accuracy_locals", "accuracy_personal",
    "client_drift", "set_quality", "bytes_up", "bytes_down", "client_seconds", "seconds", "epsilon",
)  # fmt: skip
"""Columns of a history that a file of records keeps."""

_REQUIRED: dict[str, Any] = {"task": str, "method": str, "seed": int, "accuracy_last": object}


@dataclass(frozen=True)
class Record:
    """Summary and history of one finished run.

    Args:
        line: content of `summary.json`. It has `task`, `method`, `seed` and `accuracy_last`, which is a fraction, or
            None for a run without a test set.
        rows: content of `history.jsonl`, one mapping per round; empty for a candidate without rounds.
        folder: folder of the run; None if the record was not read from files.

    Raises:
        RecordError: `line` lacks one of these four keys, or the accuracy is not a fraction.
    """

    line: Mapping[str, Any]
    rows: Sequence[Row] = ()
    folder: Path | None = None

    def __post_init__(self) -> None:
        where = f"{self.folder / 'summary.json'}" if self.folder else "a record"
        check.mapping(self.line, "line")
        if not all(isinstance(row, Mapping) for row in check.sequence(self.rows, "rows", "mappings, one per round")):
            raise TypeError("rows must be a list of mappings, one per round")
        if missing := [name for name in _REQUIRED if name not in self.line]:
            raise RecordError(
                f"{where}: line lacks {', '.join(missing)}; it has {', '.join(self.line) or 'nothing'}. Run the study "
                "again, or read the file as JSON if another program wrote it"
            )
        for name, kind in _REQUIRED.items():
            value = self.line[name]
            if kind is not object and (not isinstance(value, kind) or isinstance(value, bool)):
                raise RecordError(f"{where}: {name} must be of type {kind.__name__}, got {value!r}")
        last = self.line["accuracy_last"]
        number = isinstance(last, int | float) and not isinstance(last, bool)
        if last is not None and not (number and math.isfinite(last) and 0 <= last <= 1):
            raise RecordError(f"{where}: accuracy_last must be a fraction in [0, 1] or null, got {last!r}")

    @property
    def task(self) -> str:
        """Name of the task."""
        return self.line["task"]

    @property
    def method(self) -> str:
        """Name of the candidate: the name that the compared method has in the study."""
        return self.line["method"]

    @property
    def seed(self) -> int:
        """Seed of the run."""
        return self.line["seed"]

    @property
    def failed(self) -> bool:
        """True if the run ended with an error. A failed run has no accuracy."""
        return self.line.get("error") is not None

    def last(self, column: str) -> Any:
        """Return a value from the summary, or from the last round if the summary lacks it; None if both lack it.

        Args:
            column: name of the value. A dot selects an entry of a mapping ("accuracy_clients.worst10", "settings.lr").
                "accuracy_late" is the mean accuracy over the second half of the rounds, unless the summary has this
                column; see `Records.late`.
        """
        if column == "accuracy_late" and column not in self.line:
            return None if self.failed else accuracy_late(self.rows)
        for source in (self.line, self.rows[-1] if self.rows else {}):
            value: Any = source
            for name in (column,) if column in source else column.split("."):
                value = value.get(name) if isinstance(value := plain_values(value), Mapping) else None
            if value is not None:
                return plain_values(value)
        return None


class Records(list[Record]):
    """List of the finished runs of a study, with the study's unfinished runs and its chosen configurations.

    Filtering with a list comprehension returns a plain list, which does not contain the unfinished runs. The sum of two
    `Records` contains the records of both studies.

    A table that is made from a plain list assumes that all methods on a task have the same seeds. If a method lacks a
    run with one of these seeds, the table counts this run as unfinished.

    Args:
        records: the finished runs.
        missing: (task, method, seed) of each unfinished run.
        choices: contents of the `choice.json` files, one per study.

    Raises:
        TypeError: an element of `records` is not a `Record`.
    """

    def __init__(
        self,
        records: Iterable[Record],
        missing: Iterable[tuple[str, str, int]] = (),
        choices: Iterable[Mapping[str, Any]] = (),
    ) -> None:
        super().__init__(records)
        for record in self:
            check.instance(record, Record, "records", "Records, as from read_records")
        self.missing, self.choices = tuple(missing), tuple(choices)

    def __add__(self, other: list[Any]) -> Records:  # type: ignore[override]
        every = [*self, *other]
        done = {(r.task, r.method, r.seed) for r in every}
        missing = dict.fromkeys([*self.missing, *getattr(other, "missing", ())])
        choices = [*self.choices, *getattr(other, "choices", ())]
        return Records(every, [key for key in missing if key not in done], choices)

    def frame(self) -> Any:
        """Return the summaries as a `pandas.DataFrame`, with a row per finished run and columns such as "settings.lr".

        Raises:
            ImportError: pandas is not installed.
        """
        return data_frame([flat(plain_values(r.line)) for r in self], ["task", "method", "seed"])

    def late(self, rounds: int | None = None) -> Records:
        """Return the records with a column `accuracy_late`, the mean accuracy of the last rounds.

        The mean is less noisy than the accuracy of a single round. The accuracy of the best round is biased upwards,
        because this round is chosen on the test set. Choose `rounds` before the run. If a study has the option
        `late_rounds`, its records already have this column.

        Args:
            rounds: number of last rounds to average over; default: the second half of the rounds. Rounds without a test
                are skipped. `accuracy_late` is None for a failed run, and for a run in which none of the last rounds
                was tested.

        Raises:
            ValueError, TypeError: `rounds` is not a positive integer.
        """
        means = ((r, accuracy_late(r.rows, rounds)) for r in self)
        found = [replace(r, line={**r.line, "accuracy_late": None if r.failed else mean}) for r, mean in means]
        return Records(found, self.missing, self.choices)

    def __repr__(self) -> str:
        tasks, pairs = {r.task for r in self}, {(r.task, r.method) for r in self}
        size = f"{len(self)} finished runs of {len(pairs)} candidates on {len(tasks)} tasks"
        return f"<{size}; {len(self.missing)} missing>"


RecordsLike = str | os.PathLike[str] | Sequence[Record]
"""Records, or the path of a folder or file that holds records."""


@dataclass(frozen=True)
class Group:
    """Runs of one candidate on one task, one per seed.

    Attributes:
        task, method: names of the task and the candidate.
        records: records of the candidate's finished runs, by seed; may be empty.
        expected_seeds: seeds with which at least one candidate has a finished or unfinished run on this task.
    """

    task: str
    method: str
    records: tuple[Record, ...]
    expected_seeds: tuple[int, ...]

    @property
    def seeds(self) -> str:
        """Number of finished runs in the group, as text: "3" if no run is missing, "2 of 3" if one is missing."""
        have, want = len(self.records), len(self.expected_seeds)
        return str(have) if have == want else f"{have} of {want}"

    def values(self, column: str) -> list[Any]:
        """Return each run's value of `column`, see `Record.last`."""
        return [r.last(column) for r in self.records]

    def by_seed(self, column: str) -> dict[int, float]:
        """Return the number that each run has in a column, by seed, without the runs that have none."""
        found = {r.seed: value for r in self.records if (value := r.last(column)) is not None}
        for value in found.values():
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise ValueError(f"column must hold numbers; {column!r} holds {value!r}")
        return {seed: float(value) for seed, value in found.items()}


def group_records(records: RecordsLike, *, columns: Sequence[str] = ()) -> list[Group]:
    """Group the runs by task and candidate, in the order of the records.

    Args:
        records: records of a study's finished runs, or the study's folder.
        columns: names of columns, each of which at least one run must have.
    """
    known = _as_records(records)
    require_columns(known, columns)
    keys = [(r.task, r.method, r.seed) for r in known] + list(known.missing)
    wanted = {task: tuple(sorted({s for t, _, s in keys if t == task})) for task, _, _ in keys}
    methods = dict.fromkeys(method for _, method, _ in keys)
    pairs = [(t, m) for t in wanted for m in methods if any(key[:2] == (t, m) for key in keys)]
    own = {pair: sorted((r for r in known if (r.task, r.method) == pair), key=lambda r: r.seed) for pair in pairs}
    return [Group(task, method, tuple(own[task, method]), wanted[task]) for task, method in pairs]


def require_columns(records: Iterable[Record], columns: Sequence[str]) -> None:
    """Check that each of the columns occurs in at least one run."""
    known = list(records)
    for column in check.sequence(columns, "columns", "names in the summaries or last rounds"):
        if not isinstance(column, str):
            raise TypeError(f"columns must be names, got {type(column).__name__}")
        if not any(column in r.line or r.last(column) is not None for r in known):
            have = sorted({name for r in known for name in (*r.line, *(r.rows[-1] if r.rows else ()))})
            raise ValueError(f"columns must be among those of the runs ({', '.join(have)}), got {column!r}")


def differences(group: Group, base: Group, column: str) -> dict[int, float]:
    """Return the candidate's value of a column minus the baseline's, by seed, for the seeds that both have."""
    other = base.by_seed(column)
    return {seed: value - other[seed] for seed, value in group.by_seed(column).items() if seed in other}


def _as_records(records: RecordsLike) -> Records:
    """Check the argument `records`, and return the records, which are read if it is a path."""
    if isinstance(records, str | os.PathLike):
        return read_records(records)
    several = check.sequence(records, "records", "`Record`s, or the folder of a study")
    if wrong := [r for r in several if not isinstance(r, Record)]:
        raise TypeError(f"records must be a list of `Record`s, or the folder of a study, got {type(wrong[0]).__name__}")
    if not several:
        raise ValueError("records must hold at least one run, got none")
    _require_unique(several)
    return records if isinstance(records, Records) else Records(several)


def _require_unique(records: Iterable[Record]) -> None:
    """Check that no two records have the same task, method and seed."""
    found: dict[tuple[str, str, int], Record] = {}
    for record in records:
        key = (record.task, record.method, record.seed)
        if (other := found.setdefault(key, record)) is not record:
            different = [k for k in record.line if record.line[k] != other.line.get(k)]
            names = " and ".join(str(r.folder or r.line.get("run", "a record")) for r in (other, record))
            raise RecordError(
                f"records must have different tasks, methods or seeds: {names} both have {key}, and differ in "
                f"{', '.join(different) or 'nothing'}. Read them separately"
            )


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
    path = check.path(folder, "folder")
    if path.is_file():
        return _read_records_file(path)
    if not path.is_dir():
        raise FileNotFoundError(f"folder {path} does not exist; it should hold the runs of a study")
    records = [read_record(summary) for summary in sorted(path.glob("*/summary.json"))]
    if not records:
        begun = len(list(path.glob("*/history.jsonl")))
        hint = f"; {begun} runs have begun, so run the study again" if begun else ""
        if not begun and (path / "summary.json").exists():
            hint = ". Its own summary.json is of one run or of another program; read it as JSON"
        raise FileNotFoundError(f"folder {path} has no finished run: no subfolder holds a summary.json{hint}")
    _require_unique(records)
    choices = [read_json(choice)] if (choice := path / "choice.json").is_file() else []
    if not (path / "study.json").exists():
        return Records(records, choices=choices)
    study = read_json(path / "study.json", "study")
    planned = [(task, method, seed) for task, method, seed in study["runs"]]
    done = {(r.task, r.method, r.seed): r for r in records}
    ordered = [done[key] for key in dict.fromkeys([*planned, *done]) if key in done]
    found = Records(ordered, [key for key in planned if key not in done], choices)
    return found if study.get("late_rounds") is None else found.late(study["late_rounds"])


def read_record(path: Path) -> Record:
    """Read the record of one run, from the path of its `summary.json`."""
    line, history = read_json(path), path.with_name("history.jsonl")
    rows = read_rows(history)
    if line.get("rounds") is not None and line["rounds"] != len(rows):
        raise RecordError(f"{path} has {line['rounds']} rounds, but {history} has {len(rows)}")
    return Record(line, rows, path.parent)


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
    known, path = _as_records(records), check.path(path, "path")
    head = {"format": FORMATS["records"], "missing": known.missing, "choices": known.choices}
    lines = [
        {"line": dict(r.line), "rows": [{name: row[name] for name in _COLUMNS if name in row} for row in r.rows]}
        for r in known
    ]
    text = "".join(f"{json.dumps(one)}\n" for one in lines)
    write_atomically(path, f"{json.dumps({**head, 'checksum': _checksum(head, text)})}\n{text}")
    return path


def _read_records_file(path: Path) -> Records:
    """Read a file written by `write_records`."""
    content = read_bytes(path, RecordError).splitlines(keepends=True) or [b""]
    head, *lines = (parse_json(line, path, RecordError, number) for number, line in enumerate(content, 1))
    _require_format(head, "records", path)
    _require_checksum(head, path, b"".join(content[1:]).decode())
    try:
        records = [Record(one["line"], one["rows"]) for one in lines]
        _require_unique(records)
        return Records(records, [(task, method, seed) for task, method, seed in head["missing"]], head["choices"])
    except (KeyError, TypeError) as error:
        raise RecordError(f"{path} is damaged: {error}") from error


def choices_in(folder: str | os.PathLike[str]) -> tuple[Path, Sequence[Any]]:
    """Return the path and the contents of a study's `choice.json`, or of all in a file of records."""
    path = check.path(folder, "folder")
    path = path / "choice.json" if path.is_dir() else path
    if not path.is_file():
        raise FileNotFoundError(f"folder has no choice: {path} does not exist; tuning writes it")
    in_records = read_bytes(path, RecordError).startswith(b'{"format": "distillkit.records')
    found = _read_records_file(path).choices if in_records else (read_json(path, "choice"),)
    for choice in found:
        _require_format(choice, "choice", path)
    return path, found


def read_json(path: Path, kind: str | None = None, *, checked: bool = True) -> Any:
    """Return the value in a JSON file.

    Args:
        path: the file.
        kind: the format that the file must have; None for a file without one.
        checked: whether `write_json` wrote the file, with a checksum.
    """
    value = parse_json(read_bytes(path, RecordError), path, RecordError)
    if kind is not None:
        _require_format(value, kind, path)
    if checked:
        _require_checksum(value, path)
    return value


def _checksum(content: Mapping[str, Any], text: str = "") -> str:
    return hashlib.blake2b(f"{json.dumps(content)}{text}".encode(), digest_size=16).hexdigest()


def _require_checksum(content: Any, path: Path, text: str = "") -> None:
    """Remove the checksum from the `content` of a file, and compare it with the rest and the lines in `text`."""
    if not isinstance(content, dict):
        raise RecordError(f"{path} is damaged: it must hold an object, got {type(content).__name__}")
    if (stated := content.pop("checksum", None)) != _checksum(content, text):
        why = "its content does not match its checksum" if stated else "it has no checksum, or another program wrote it"
        raise RecordError(f"{path} is damaged: {why}. Restore it, or run the study again")


def _require_format(value: Any, kind: str, path: Path) -> None:
    found = value.get("format") if isinstance(value, Mapping) else None
    if found != FORMATS[kind]:
        raise RecordError(
            f"{path} has the format {found!r}, this version reads {FORMATS[kind]!r}; use another folder, or run the "
            "study again"
        )


def write_json(path: Path, value: Mapping[str, Any] | Sequence[Any], kind: str | None = None) -> None:
    """Write a JSON file of the format `kind`; an object gets a checksum."""
    head = {} if kind is None else {"format": FORMATS[kind]}
    content: Any = {**head, **value} if isinstance(value, Mapping) else value
    if isinstance(content, dict):
        content["checksum"] = _checksum(content)
    text = json.dumps(content, indent=1) + "\n"
    if not path.is_file() or path.read_bytes() != text.encode():  # an equal file keeps its time
        write_atomically(path, text)


def write_study(out: Path, fixed: Mapping[str, Any], design: Mapping[str, Any]) -> None:
    """Write `study.json`. Once a run was started, first check that tasks, candidates and `fixed` have not changed.

    Args:
        out: the study's folder.
        fixed: values that must not change, by name.
        design: tasks, candidates and runs, from `StudyDesign.config`.

    Raises:
        ValueError: something has changed. A search may have got further configurations at its end.
    """
    path, content = out / "study.json", {**fixed, **design}
    files = [f"{runs}/{name}.json" for runs in ("*", "tuning/*") for name in ("config", "summary")]
    started = path.exists() and any(next(out.glob(file), None) for file in files)
    before = read_json(path, "study") if started else content
    for key in fixed:
        if before[key] != content[key]:
            raise ValueError(f"{path} has {key}={before[key]}, got {content[key]}; use another folder")
    for name in {*content["candidates"]} & {*before["candidates"]}:  # a search may be continued: keep the longer one
        both = [one["candidates"][name] for one in (before, content)]
        short, long = sorted((one["search"] for one in both), key=len)
        if short == long[: len(short)]:
            both[0]["search"] = both[1]["search"] = long
    for key in ("tasks", "candidates"):
        changed = {n: _changes(before[key][n], one) for n, one in content[key].items() if n in before[key]}
        if listed := [f"{name} ({'; '.join(options)})" for name, options in changed.items() if options]:
            raise ValueError(
                f"{path} has different {key} with the names {', '.join(listed)}; use another name or another folder"
            )
        content[key] = {**before[key], **content[key]}
    tasks, methods = [*content["tasks"]], [*content["candidates"]]
    others = [r for r in before["runs"] if r[0] not in design["tasks"] or r[1] not in design["candidates"]]
    runs = sorted([*design["runs"], *others], key=lambda run: (tasks.index(run[0]), methods.index(run[1])))
    write_json(path, {**content, "runs": runs, "versions": versions()}, "study")


def _changes(before: Any, now: Any, name: str = "") -> list[str]:
    """Return a text for each option whose value differs between two configs."""
    if before == now:
        return []
    one, other = plain_values(before), plain_values(now)
    if not (isinstance(one, Mapping) and isinstance(other, Mapping)):
        return [f"{name}: was {json.dumps(one)}, now {json.dumps(other)}"]
    inner = f"{name}." if name else ""
    found = [text for key in {**one, **other} for text in _changes(one.get(key), other.get(key), f"{inner}{key}")]
    return found or ["another form"]  # such as a tuple for a list
