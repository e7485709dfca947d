"""Check of the rows of a run's history."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any

__all__ = ["require_rows"]


def require_rows(rows: Sequence[Mapping[str, Any]], *columns: str, name: str = "rows") -> Sequence[Mapping[str, Any]]:
    """Check that `rows` is a sequence of mappings that have these columns, and return it.

    Args:
        rows: the value to check.
        columns: names that every row must have.
        name: name of the argument in error messages.

    Raises:
        TypeError, ValueError: the value is not such a sequence.
    """
    if not isinstance(rows, Sequence) or isinstance(rows, str) or not all(isinstance(row, Mapping) for row in rows):
        raise TypeError(f"{name} must be the rows of a history, such as run.rows, got {type(rows).__name__}")
    for index, row in enumerate(rows):
        if missing := [column for column in columns if column not in row]:
            raise ValueError(f"{name}[{index}] must be a row of a history, but has no {missing[0]!r}")
        accuracy = row.get("accuracy")
        if isinstance(accuracy, bool) or not isinstance(accuracy, Real | None):
            raise TypeError(f"{name}[{index}]['accuracy'] must be a number or None, got {accuracy!r:.40}")
    return rows
