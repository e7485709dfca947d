"""The records of a study's runs, read back from their folder: what every table and picture is made from."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from distillkit import check
from distillkit.study.history import RecordError, Row, read_rows

__all__ = ["STUDY", "Given", "Group", "Record", "RecordError", "Records", "as_records", "groups", "read_records"]

STUDY = "distillkit.study/1"
"""The format of `study.json`."""


@dataclass(frozen=True)
class Record:
    """One finished run: its line of the summary and its history.

    Args:
        line: the run's `summary.json`. It names the `task`, the `method` and the `seed`, and has `accuracy_last`, a
            fraction, or None for a run without a test set.
        rows: its `history.jsonl`, one mapping a round; empty for a way that makes a set.
        folder: of the run, where its other files are; None for a record that was not read from files.

    Raises:
        RecordError: the line lacks one of these, or the accuracy is no fraction.
    """

    line: Mapping[str, Any]
    rows: Sequence[Row] = ()
    folder: Path | None = None

    def __post_init__(self) -> None:
        where = f"{self.folder / 'summary.json'}" if self.folder else "a record"
        check.mapping(self.line, "line")
        if not all(isinstance(row, Mapping) for row in check.several(self.rows, "rows", "mappings, one a round")):
            raise TypeError("rows must be a list of mappings, one a round")
        missing = [name for name in ("task", "method", "seed", "accuracy_last") if name not in self.line]
        if missing:
            raise RecordError(
                f"{where} cannot be read: it lacks {', '.join(missing)}; it has {', '.join(self.line) or 'nothing'}. "
                "A line of a study's summary names its task, method and seed and has an accuracy_last: lines of older "
                "scripts do not. Run the study again, or read this file as JSON"
            )
        for name, kind in (("task", str), ("method", str), ("seed", int)):
            if not isinstance(self.line[name], kind) or isinstance(self.line[name], bool):
                raise RecordError(f"{where}: {name} must be of type {kind.__name__}, got {self.line[name]!r}")
        if not _fraction(self.line["accuracy_last"]):
            raise RecordError(
                f"{where}: accuracy_last must be a fraction in [0, 1] or null, got {self.line['accuracy_last']!r}"
            )

    @property
    def task(self) -> str:
        """The name of what was learned, on which data."""
        return self.line["task"]

    @property
    def method(self) -> str:
        """The name of the way that was run."""
        return self.line["method"]

    @property
    def seed(self) -> int:
        """What the run's draws were made from."""
        return self.line["seed"]

    @property
    def failed(self) -> bool:
        """Whether the run ended with an error, which its line says; then it has no accuracy."""
        return self.line.get("error") is not None

    def last(self, column: str) -> Any:
        """A value of the run: of its line, or else of its last round; None if neither has it.

        Args:
            column: the name; a dot goes into a mapping ("accuracy_clients.worst10").
        """
        for place in (self.line, self.rows[-1] if self.rows else {}):
            found: Any = place
            for name in (column,) if column in place else column.split("."):
                found = found.get(name) if isinstance(found, Mapping) else None
            if found is not None:
                return found
        return None


class Records(list[Record]):
    """The finished runs of a study, and which of its runs are missing. It is a list: filter it as one.

    A list that was filtered no longer says what is missing: tables then hold each way against the seeds of the others.

    Args:
        records: of finished runs.
        missing: (task, method, seed) of every run that the study has and that is not finished.
    """

    def __init__(self, records: Iterable[Record], missing: Iterable[tuple[str, str, int]] = ()) -> None:
        super().__init__(records)
        self.missing = tuple(missing)

    def __repr__(self) -> str:
        ways = {(r.task, r.method) for r in self}
        tasks = {r.task for r in self}
        said = f"{len(self)} finished runs: {len(tasks)} tasks, {len(ways)} ways on them"
        return f"<{said}; {len(self.missing)} runs are missing>"


Given = str | os.PathLike[str] | Sequence[Record]
"""Records, or the folder where they are."""


def read_records(folder: str | os.PathLike[str]) -> Records:
    """Read the records of every finished run of a study, to make tables and pictures of them.

    Args:
        folder: of the study; each of its folders with a `summary.json` is a run.

    Returns:
        A list, in the order of the study (`study.json`: its tasks, its ways, its seeds), or of the runs' names where
        there is none. It says too which runs of the study are not finished.

    Raises:
        FileNotFoundError: no such folder, or no finished run in it.
        RecordError: a file is damaged, or of another make; it is named.
    """
    where = as_path(folder)
    if not where.is_dir():
        raise FileNotFoundError(f"folder {where} does not exist; it should hold the runs of a study")
    records = [_read(path) for path in sorted(where.glob("*/summary.json"))]
    if not records:
        raise FileNotFoundError(_nothing(where))
    plan = _plan(where / "study.json")
    if plan is None:
        return Records(_once(records))
    place = {key: index for index, key in enumerate(plan)}
    done = {(r.task, r.method, r.seed): r for r in _once(records)}
    ordered = sorted(done.values(), key=lambda r: place.get((r.task, r.method, r.seed), len(place)))
    return Records(ordered, [key for key in plan if key not in done])


def as_path(folder: str | os.PathLike[str]) -> Path:
    """The path of a folder that was named.

    Args:
        folder: its name or path.

    Raises:
        TypeError: neither.
    """
    if not isinstance(folder, str | os.PathLike):
        raise TypeError(f"folder must be the path of a study's folder, got {type(folder).__name__}")
    return Path(folder)


def as_records(records: Given) -> Records:
    """Records as a table takes them: a folder is read, a list is looked through.

    Args:
        records: of a study, or its folder.

    Raises:
        TypeError: something else.
        ValueError: none, or two of the same task, method and seed.
    """
    if isinstance(records, str | os.PathLike):
        return read_records(records)
    several = check.several(records, "records", "`Record`s, or the folder of a study")
    wrong = [r for r in several if not isinstance(r, Record)]
    if wrong:
        raise TypeError(f"records must be a list of `Record`s, or the folder of a study, got {type(wrong[0]).__name__}")
    if not several:
        raise ValueError("records must hold at least one run, got none")
    return Records(_once(several), getattr(records, "missing", ()))


@dataclass(frozen=True)
class Group:
    """The runs of one way on one task, a seed each.

    Attributes:
        task: the task's name.
        method: the way's name.
        records: its finished runs, by seed; there may be none.
        wanted: the seeds that it should have: its study's, and those that another way has on this task.
    """

    task: str
    method: str
    records: tuple[Record, ...]
    wanted: tuple[int, ...]

    @property
    def seeds(self) -> str:
        """How many runs are finished, and of how many if some are not: "3", "2 of 3"."""
        have, want = len(self.records), len(self.wanted)
        return str(have) if have == want else f"{have} of {want}"

    def values(self, column: str) -> list[Any]:
        """What the runs have under a name, see `Record.last`.

        Args:
            column: the name.
        """
        return [r.last(column) for r in self.records]


def groups(records: Given) -> list[Group]:
    """The ways of each task with their runs, in the order in which they stand in the records.

    Args:
        records: of a study, or its folder.
    """
    known = as_records(records)
    keys = [(r.task, r.method, r.seed) for r in known] + list(known.missing)
    wanted = {task: tuple(sorted({s for t, _, s in keys if t == task})) for task, _, _ in keys}
    ways = {method: None for _, method, _ in keys}
    pairs = {(t, m): None for t in wanted for m in ways if any(k[:2] == (t, m) for k in keys)}

    def own(task: str, method: str) -> tuple[Record, ...]:
        return tuple(sorted((r for r in known if (r.task, r.method) == (task, method)), key=lambda r: r.seed))

    return [Group(task, method, own(task, method), wanted[task]) for task, method in pairs]


def _read(path: Path) -> Record:
    try:
        line = json.loads(path.read_text())
    except ValueError as error:
        raise RecordError(f"{path} is damaged: {error}") from error
    if not isinstance(line, Mapping):
        raise RecordError(f"{path} is damaged: a run's line must be an object, got {type(line).__name__}")
    rows = read_rows(path.with_name("history.jsonl"))
    if line.get("rounds") is not None and line["rounds"] != len(rows):
        raise RecordError(f"{path} says {line['rounds']} rounds, and {path.with_name('history.jsonl')} has {len(rows)}")
    return Record(line, rows, path.parent)


def _once(records: Iterable[Record]) -> list[Record]:
    """The same, if no two are of one task, method and seed."""
    found: dict[tuple[str, str, int], Record] = {}
    for record in records:
        key = (record.task, record.method, record.seed)
        other = found.setdefault(key, record)
        if other is not record:
            apart = [k for k in record.line if record.line[k] != other.line.get(k)]
            names = " and ".join(str(r.folder or r.line.get("run", "a record")) for r in (other, record))
            raise RecordError(
                f"records must hold one run a task, method and seed: {names} are both of {key}; they differ in "
                f"{', '.join(apart) or 'nothing'}. A study gives what differs another task or way; read them apart"
            )
    return list(found.values())


def _plan(path: Path) -> list[tuple[str, str, int]] | None:
    """Every run of the study in its order: (task, method, seed); None if no file says."""
    if not path.exists():
        return None
    try:
        said = json.loads(path.read_text())
    except ValueError as error:
        raise RecordError(f"{path} is damaged: {error}") from error
    kind = said.get("format") if isinstance(said, Mapping) else None
    if kind != STUDY:
        raise RecordError(f"{path} is of the format {kind!r}, this version reads {STUDY!r}: run the study again")
    return [(task, way, seed) for task in said["tasks"] for way in said["ways"] for seed in said["seeds"]]


def _nothing(folder: Path) -> str:
    """Why a folder has no records."""
    begun = len(list(folder.glob("*/history.jsonl")))
    said = f"folder {folder} has no finished run: none of its folders holds a summary.json"
    if begun:
        return f"{said}; {begun} runs are begun: go on with the study"
    if (folder / "summary.json").exists():
        return f"{said}. Its own summary.json is of an older script, or of one run: read it as JSON"
    return said


def _fraction(value: Any) -> bool:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return value is None or (number and math.isfinite(value) and 0 <= value <= 1)
