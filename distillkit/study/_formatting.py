"""Text for numbers, curves and tables."""

from __future__ import annotations

import html
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from distillkit._utils import check

__all__ = [
    "MIN_SEEDS",
    "NONE",
    "Table",
    "Unit",
    "markdown_table",
    "mean_std",
    "signed",
    "sparkline",
    "unit_of",
]

NONE = "–"
"""Text of a table cell that has no value."""
MIN_SEEDS = 3
"""Smallest number of seeds whose confidence interval is shown without a caution."""


def mean_std(values: Sequence[float], scale: float = 1.0, digits: int = 1) -> str:
    """Return mean and sample standard deviation (n - 1) as text: "91.2 ± 0.4". For a single value, only the value is
    shown.

    Args:
        values: numbers, one per seed.
        scale: factor by which the values are multiplied, for example 100 to print fractions in per cent.
        digits: number of decimals.

    Raises:
        TypeError, ValueError: `values` is empty, or a value is not a number.
    """
    check.real_number(scale, "scale")
    check.positive_int(digits, "digits", least=0)
    scaled = [scale * v for v in _numbers(values, "values")]
    if not scaled:
        raise ValueError("values must hold at least one number, got none")
    spread = f" ± {statistics.stdev(scaled):.{digits}f}" if len(scaled) > 1 else ""
    return f"{statistics.mean(scaled):.{digits}f}{spread}"


def sparkline(accuracies: Sequence[float]) -> str:
    """Return a curve of `accuracies` in [0, 1] as one line of block characters, for a terminal."""
    known = _numbers(accuracies, "accuracies")
    return "".join("▁▂▃▄▅▆▇█"[min(7, max(0, int(8 * a)))] for a in known)


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]], *, left: int = 1) -> str:
    """Return a Markdown table whose columns are also aligned in a terminal.

    Args:
        header: names of the columns.
        rows: cells of each row, one per column. "|" is escaped, and a line break becomes a space.
        left: number of leading columns that are aligned left; the other columns are aligned right.

    Raises:
        TypeError, ValueError: there are no columns, a cell is not a string, or a row has too few or too many cells.
    """
    check.positive_int(left, "left", least=0)
    if not _strings(header, "header"):
        raise ValueError("header must hold at least one name, got none")
    for i, row in enumerate(check.sequence(rows, "rows", "rows of strings")):
        if len(_strings(row, f"rows[{i}]")) != len(header):
            raise ValueError(f"rows[{i}] must have {len(header)} cells, one per name in header, got {len(row)}")
    lines = [[" ".join(c.split()).replace("|", r"\|") for c in row] for row in (header, *rows)]
    widths = [max(3, *(len(line[i]) for line in lines)) for i in range(len(header))]

    def line(cells: Sequence[str]) -> str:
        aligned = (c.ljust(w) if i < left else c.rjust(w) for i, (c, w) in enumerate(zip(cells, widths)))
        return f"| {' | '.join(aligned)} |"

    rule = ["-" * w if i < left else "-" * (w - 1) + ":" for i, w in enumerate(widths)]
    return "\n".join([line(lines[0]), line(rule), *map(line, lines[1:])])


def _numbers(values: Sequence[float], name: str) -> list[float]:
    return [check.real_number(v, f"{name}[{i}]") for i, v in enumerate(check.sequence(values, name, "numbers"))]


def _strings(values: Sequence[str], name: str) -> Sequence[str]:
    wrong = [v for v in check.sequence(values, name, "strings") if not isinstance(v, str)]
    if wrong:
        raise TypeError(f"{name} must hold strings, got {type(wrong[0]).__name__}")
    return values


@dataclass(frozen=True, repr=False)
class Table:
    """Table that prints as Markdown, and as HTML in a notebook. `pandas.DataFrame(table.rows)` holds its values.

    Attributes:
        header: printed names of the columns.
        cells: printed rows; accuracies in per cent, traffic in MB of 10^6 bytes.
        rows: for each row, its values by column name, not rounded. Names and units are those in a study's records:
            accuracies are fractions, and traffic is in bytes. A missing value is None. All rows have the same keys.
        notes: explanations, printed below the table.
        left: number of leading columns that are aligned left.
    """

    header: tuple[str, ...]
    cells: tuple[tuple[str, ...], ...]
    rows: list[dict[str, Any]]
    notes: tuple[str, ...] = ()
    left: int = 2

    def with_column(self, name: str, cell: Callable[[Mapping[str, Any]], str]) -> Table:
        """Return the table with another printed column on the right, for example published numbers.

        Args:
            name: name of the column.
            cell: function that maps a row's values (an element of this table's `rows`) to the cell's text; "" is
                printed as "–".
        """
        cells = tuple((*line, cell(row) or NONE) for line, row in zip(self.cells, self.rows))
        return replace(self, header=(*self.header, name), cells=cells)

    def without(self, *names: str) -> Table:
        """Return the table without some printed columns. `rows` still contains their values.

        A note that explains the sign "*" in column names is removed if no remaining column name has this sign.

        Args:
            names: printed names of the columns to remove.

        Raises:
            ValueError: the table has no such column.
        """
        if unknown := [name for name in names if name not in self.header]:
            raise ValueError(f"names must be columns of the table, {', '.join(self.header)}; got {unknown[0]!r}")
        kept = [i for i, name in enumerate(self.header) if name not in names]
        cells = tuple(tuple(line[i] for i in kept) for line in self.cells)
        left = sum(i < self.left for i in kept)
        header = tuple(self.header[i] for i in kept)
        starred = any("*" in name for name in header)
        notes = [note for note in self.notes if starred or not note.startswith("*:")]
        return replace(self, header=header, cells=cells, notes=tuple(notes), left=left)

    def __str__(self) -> str:
        return "\n\n".join([markdown_table(self.header, self.cells, left=self.left), *self.notes])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        def line(cells: Sequence[str], tag: str) -> str:
            styles = ("left" if i < self.left else "right" for i in range(len(cells)))
            inner = (f'<{tag} style="text-align: {s}">{html.escape(c)}</{tag}>' for s, c in zip(styles, cells))
            return f"<tr>{''.join(inner)}</tr>"

        body = "".join(line(cells, "td") for cells in self.cells)
        notes = "".join(f"<p>{html.escape(note)}</p>" for note in self.notes)
        return f"<table><thead>{line(self.header, 'th')}</thead><tbody>{body}</tbody></table>{notes}"


@dataclass(frozen=True)
class Unit:
    """Printed unit of a column.

    Attributes:
        name: name of the unit, for example "%"; empty for a plain number.
        scale: factor that converts a value from the records' unit to this unit.
        digits: number of decimals.
    """

    name: str
    scale: float
    digits: int


def unit_of(column: str, values: Sequence[float]) -> Unit:
    """Return the unit in which a column is printed, such as per cent for accuracies, and its number of decimals.

    Args:
        column: name of the column in the records.
        values: values in the column, which determine the number of decimals if the column has no unit.
    """
    last = column.rsplit(".", 1)[-1]
    if column.startswith("accuracy"):
        return Unit("%", 100.0, 1)
    if "bytes" in column:
        return Unit("MB", 1e-6, 2)
    if "seconds" in last:
        return Unit("s", 1.0, 1)
    largest = max((abs(v) for v in values), default=0.0)
    if all(float(v).is_integer() for v in values):
        return Unit("", 1.0, 0 if len(set(values)) <= 1 else 1)
    return Unit("", 1.0, 1 if largest >= 100 else 3)


def signed(value: float, unit: Unit) -> str:
    """Format a difference `value` with its sign, in a `unit`."""
    return f"{unit.scale * value:+.{unit.digits}f}"
