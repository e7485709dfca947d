"""Pictures of columns of the history over rounds, for the results pages."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from matplotlib.figure import Figure

from distillkit import plot
from distillkit.plot.figure import subplots
from distillkit.study import Record, Records

__all__ = ["columns_by_round"]

Row = dict[str, Any]


def columns_by_round(records: Records, *, columns: str, minus: str = "", every: int = 1, last: int = 10**9) -> Figure:
    """Draw one panel for each group of columns, with one line for each method and column.

    Args:
        records: records of one task.
        columns: groups of columns separated by `|`, columns of a group by `+`; `a.b` is the entry `b` of the column
            `a`.
        minus: method whose value at the same seed and round is subtracted; empty: the values themselves.
        every, last: draw rounds 1, 1 + every, 1 + 2 every, ..., up to the round `last`.

    Raises:
        ValueError: no record has one of the columns.
    """
    groups = [group.split("+") for group in columns.split("|")]
    figure, axes = subplots(None, len(groups), 5.2, 3.6, columns=2)
    for ax, group in zip(axes, groups):
        lines: dict[str, list[list[Row]]] = {}
        for name in group:
            rows = {(r.method, r.seed): _rows(r, name, every, last) for r in records if not r.failed}
            rows = {key: own for key, own in rows.items() if own}
            if not rows:
                raise ValueError(f"no record has the column {name}")
            shown = _differences(rows, minus) if minus else rows
            for (method, _), own in shown.items():
                label = method if len(group) == 1 else f"{method}: {_words(name)}"
                lines.setdefault(label, []).append([{"round": row["round"], _title(group, minus): row[name]}
                                                    for row in own])  # fmt: skip
        plot.curves(lines, y=_title(group, minus), ax=ax)
    return figure


def _rows(record: Record, column: str, every: int, last: int) -> list[Row]:
    """Return the rows that have the column, with its value under the column's name."""
    found: list[Row] = []
    for row in record.rows:
        value: Any = row
        for part in column.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        if value is not None and (row["round"] - 1) % every == 0 and row["round"] <= last:
            found.append({"round": row["round"], column: value})
    return found


def _differences(rows: Mapping[tuple[str, int], list[Row]], base: str) -> dict[tuple[str, int], list[Row]]:
    """Return the rows of all other methods, minus the base's value at the same seed and round."""
    found: dict[tuple[str, int], list[Row]] = {}
    for (method, seed), own in rows.items():
        other = {row["round"]: row for row in rows.get((base, seed), [])}
        if method != base and other:
            found[method, seed] = [
                {name: value if name == "round" else value - other[row["round"]][name] for name, value in row.items()}
                for row in own
                if row["round"] in other
            ]
    return found


def _words(column: str) -> str:
    return column.split(".")[-1].replace("_", " - ") if column.startswith("set_quality") else column.split(".")[-1]


def _title(group: list[str], minus: str) -> str:
    title = group[0].replace(".", " ") if len(group) == 1 else "distance between gradients"
    return f"{title}, minus {minus}'s" if minus else title
