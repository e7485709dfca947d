"""Records of the finished runs of a study."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from distillkit._utils import check
from distillkit.study.history import Row, accuracy_late

__all__ = ["Record", "RecordError", "Records", "Row", "decode_settings", "require_unique"]


class RecordError(ValueError):
    """Error for a file of a run that is missing, damaged, or of another format. The message names the file."""


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
        missing = [name for name in ("task", "method", "seed", "accuracy_last") if name not in self.line]
        if missing:
            raise RecordError(
                f"{where}: line lacks {', '.join(missing)}; it has {', '.join(self.line) or 'nothing'}. Run the study "
                "again, or read the file as JSON if another program wrote it"
            )
        for name, kind in (("task", str), ("method", str), ("seed", int)):
            if not isinstance(self.line[name], kind) or isinstance(self.line[name], bool):
                raise RecordError(f"{where}: {name} must be of type {kind.__name__}, got {self.line[name]!r}")
        if not _is_fraction(self.line["accuracy_last"]):
            raise RecordError(
                f"{where}: accuracy_last must be a fraction in [0, 1] or null, got {self.line['accuracy_last']!r}"
            )

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
                value = value.get(name) if isinstance(value := decode_settings(value), Mapping) else None
            if value is not None:
                return decode_settings(value)
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

        def late(record: Record) -> Record:
            mean = accuracy_late(record.rows, rounds)
            return replace(record, line={**record.line, "accuracy_late": None if record.failed else mean})

        return Records(map(late, self), self.missing, self.choices)

    def __repr__(self) -> str:
        tasks, pairs = {r.task for r in self}, {(r.task, r.method) for r in self}
        size = f"{len(self)} finished runs of {len(pairs)} candidates on {len(tasks)} tasks"
        return f"<{size}; {len(self.missing)} missing>"


def decode_settings(config: Any) -> Any:
    """Convert mappings and tuples serialized by `distillkit.serialization` to plain mappings and lists.

    Args:
        config: settings as a JSON value. All other values in the settings are returned unchanged.
    """
    if isinstance(config, list):
        return [decode_settings(item) for item in config]
    if not isinstance(config, Mapping):
        return config
    [(kind, items)] = config.items() if len(config) == 1 else [("", None)]
    if kind == "dict" and isinstance(items, list):
        return {str(decode_settings(name)): decode_settings(value) for name, value in items}
    if kind == "tuple" and isinstance(items, list):
        return decode_settings(items)
    return {name: decode_settings(value) for name, value in config.items()}


def require_unique(records: Iterable[Record]) -> list[Record]:
    """Return the records, after checking that no two have the same task, method and seed.

    Args:
        records: records of finished runs.

    Raises:
        RecordError: two records have the same task, method and seed; the message names them and the columns that
            differ.
    """
    found: dict[tuple[str, str, int], Record] = {}
    for record in records:
        key = (record.task, record.method, record.seed)
        other = found.setdefault(key, record)
        if other is not record:
            different = [k for k in record.line if record.line[k] != other.line.get(k)]
            names = " and ".join(str(r.folder or r.line.get("run", "a record")) for r in (other, record))
            raise RecordError(
                f"records must have different tasks, methods or seeds: {names} both have {key}, and differ in "
                f"{', '.join(different) or 'nothing'}. Read them separately"
            )
    return list(found.values())


def _is_fraction(value: Any) -> bool:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return value is None or (number and math.isfinite(value) and 0 <= value <= 1)
