"""How numbers are said: mean and deviation over seeds, curves as one line, tables in Markdown and for notebooks."""

from __future__ import annotations

import html
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from distillkit._utils import check

__all__ = ["NONE", "Table", "Unit", "mean_std", "show", "spark", "unit_of"]

NONE = "–"
"""What stands in a table where there is no number."""


def mean_std(values: Sequence[float], scale: float = 1.0, digits: int = 1) -> str:
    """Mean and standard deviation over seeds (n - 1), as text "91.2 ± 0.4"; one value has no deviation.

    Args:
        values: one a seed.
        scale: factor for all of them: 100 for fractions in per cent.
        digits: behind the point.

    Raises:
        TypeError, ValueError: no values, or what is no number.
    """
    check.real_number(scale, "scale")
    check.positive_int(digits, "digits", least=0)
    scaled = [scale * v for v in _numbers(values, "values")]
    if not scaled:
        raise ValueError("values must hold at least one number, got none")
    spread = f" ± {statistics.stdev(scaled):.{digits}f}" if len(scaled) > 1 else ""
    return f"{statistics.mean(scaled):.{digits}f}{spread}"


def spark(accuracies: Sequence[float]) -> str:
    """A curve of `accuracies` in [0, 1] as one line of blocks, for a terminal."""
    known = _numbers(accuracies, "accuracies")
    return "".join("▁▂▃▄▅▆▇█"[min(7, max(0, int(8 * a)))] for a in known)


def show(header: Sequence[str], rows: Sequence[Sequence[str]], *, left: int = 1) -> str:
    """A Markdown table whose columns line up in a terminal too.

    Args:
        header: the columns' names.
        rows: the cells, as many in each row as there are names; a "|" in one is escaped, a line break becomes a space.
        left: how many of the first columns are text, which stands left; numbers stand right.

    Raises:
        TypeError, ValueError: no names, cells that are no words, or another number of them than of names.
    """
    check.positive_int(left, "left", least=0)
    if not _words(header, "header"):
        raise ValueError("header must hold at least one name, got none")
    for i, row in enumerate(check.sequence(rows, "rows", "rows of words")):
        if len(_words(row, f"rows[{i}]")) != len(header):
            raise ValueError(f"rows[{i}] must have {len(header)} cells, one a name of the header, got {len(row)}")
    lines = [[" ".join(c.split()).replace("|", r"\|") for c in row] for row in (header, *rows)]
    widths = [max(3, *(len(line[i]) for line in lines)) for i in range(len(header))]

    def line(cells: Sequence[str]) -> str:
        said = (c.ljust(w) if i < left else c.rjust(w) for i, (c, w) in enumerate(zip(cells, widths)))
        return f"| {' | '.join(said)} |"

    rule = ["-" * w if i < left else "-" * (w - 1) + ":" for i, w in enumerate(widths)]
    return "\n".join([line(lines[0]), line(rule), *map(line, lines[1:])])


def _numbers(values: Sequence[float], name: str) -> list[float]:
    return [check.real_number(v, f"{name}[{i}]") for i, v in enumerate(check.sequence(values, name, "numbers"))]


def _words(values: Sequence[str], name: str) -> Sequence[str]:
    wrong = [v for v in check.sequence(values, name, "words") if not isinstance(v, str)]
    if wrong:
        raise TypeError(f"{name} must hold words, got {type(wrong[0]).__name__}")
    return values


@dataclass(frozen=True, repr=False)
class Table:
    """A table: printed it is Markdown, in a notebook HTML, and `pandas.DataFrame(table.rows)` has its numbers.

    Attributes:
        header: the columns' names as they are printed.
        cells: the printed rows; accuracies are per cent, traffic is in MB of 10^6 bytes.
        rows: the numbers of each printed row by their name in the records, unrounded and in the records' units:
            accuracies are fractions, traffic is in bytes. What is not there is None. All rows have the same names.
        notes: what a reader must know of the columns and of what is missing, printed below.
        left: how many of the first columns are text.
    """

    header: tuple[str, ...]
    cells: tuple[tuple[str, ...], ...]
    rows: list[dict[str, Any]]
    notes: tuple[str, ...] = ()
    left: int = 2

    def with_column(self, name: str, cell: Callable[[Mapping[str, Any]], str]) -> Table:
        """The same table with one more printed column, on the right: published numbers beside ours, say.

        Args:
            name: of the column.
            cell: what it says for a row of `rows`; "" becomes "–".
        """
        cells = tuple((*line, cell(row) or NONE) for line, row in zip(self.cells, self.rows))
        return replace(self, header=(*self.header, name), cells=cells)

    def without(self, *names: str) -> Table:
        """The same table without some of its printed columns; `rows` keeps them; "*" is explained where one is.

        Args:
            names: of the columns, as the header says them.

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
        return "\n\n".join([show(self.header, self.cells, left=self.left), *self.notes])

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
    """How a column of the records is printed.

    Attributes:
        name: behind the column's words, "%" say; empty for a plain number.
        scale: factor from the records' unit.
        digits: behind the point.
    """

    name: str
    scale: float
    digits: int


def unit_of(column: str, values: Sequence[float]) -> Unit:
    """The unit that a column is printed in: fractions of accuracy in per cent, bytes in MB, others as they are.

    Args:
        column: its name in the records.
        values: the numbers in it, which say how many digits are worth printing.
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
