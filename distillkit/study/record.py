"""What is known of one run of a study, and of all of them."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from distillkit._utils import check
from distillkit.study.history import RecordError, Row

__all__ = ["Record", "RecordError", "Records", "once", "plain"]


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
        if not all(isinstance(row, Mapping) for row in check.sequence(self.rows, "rows", "mappings, one a round")):
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
            column: the name; a dot goes into a mapping ("accuracy_clients.worst10", "settings.lr").
        """
        for place in (self.line, self.rows[-1] if self.rows else {}):
            found: Any = place
            for name in (column,) if column in place else column.split("."):
                found = found.get(name) if isinstance(found := plain(found), Mapping) else None
            if found is not None:
                return plain(found)
        return None


class Records(list[Record]):
    """The finished runs of a study, which of its runs are missing, and what it chose. It is a list: filter it as one.

    A list that was filtered knows its runs alone: tables then hold each way against the seeds of the others. Two of
    them, added, are those of both studies.

    Args:
        records: of finished runs.
        missing: (task, method, seed) of every run that the study has and that is not finished.
        choices: what was tried and chosen, as `choice.json` says it; one a study.
    """

    def __init__(
        self,
        records: Iterable[Record],
        missing: Iterable[tuple[str, str, int]] = (),
        choices: Iterable[Mapping[str, Any]] = (),
    ) -> None:
        super().__init__(records)
        self.missing, self.choices = tuple(missing), tuple(choices)

    def __add__(self, other: list[Any]) -> Records:  # type: ignore[override]
        every = [*self, *other]
        done = {(r.task, r.method, r.seed) for r in every}
        missing = dict.fromkeys([*self.missing, *getattr(other, "missing", ())])
        choices = [*self.choices, *getattr(other, "choices", ())]
        return Records(every, [key for key in missing if key not in done], choices)

    def late(self, rounds: int) -> Records:
        """The same with a column `accuracy_late`: the mean of a run's accuracies in its last rounds.

        One round's accuracy jumps, and the best round is chosen on the test set; a mean over rounds that were named
        before the run does neither. Tables and `paired` take the column.

        Args:
            rounds: how many of the last; those without a test do not count. A run without rounds has None.

        Raises:
            ValueError, TypeError: no positive integer.
        """
        check.positive_int(rounds, "rounds")

        def late(record: Record) -> Record:
            tested = [row["accuracy"] for row in record.rows[-rounds:] if row.get("accuracy") is not None]
            return replace(record, line={**record.line, "accuracy_late": statistics.fmean(tested) if tested else None})

        return Records(map(late, self), self.missing, self.choices)

    def __repr__(self) -> str:
        ways = {(r.task, r.method) for r in self}
        tasks = {r.task for r in self}
        said = f"{len(self)} finished runs: {len(tasks)} tasks, {len(ways)} ways on them"
        return f"<{said}; {len(self.missing)} runs are missing>"


def plain(said: Any) -> Any:
    """Settings to be shown: what `distillkit.serialization` says of mappings and tuples as mappings and lists again.

    Args:
        said: JSON; what is neither stays as it is.
    """
    if isinstance(said, list):
        return [plain(item) for item in said]
    if not isinstance(said, Mapping):
        return said
    [(kind, items)] = said.items() if len(said) == 1 else [("", None)]
    if kind == "dict" and isinstance(items, list):
        return {str(plain(name)): plain(value) for name, value in items}
    if kind == "tuple" and isinstance(items, list):
        return plain(items)
    return {name: plain(value) for name, value in said.items()}


def once(records: Iterable[Record]) -> list[Record]:
    """The same, if no two are of one task, method and seed: a mean would take them for two seeds.

    Args:
        records: of finished runs.

    Raises:
        RecordError: two are; they are named, and how they differ.
    """
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


def _fraction(value: Any) -> bool:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return value is None or (number and math.isfinite(value) and 0 <= value <= 1)
