"""Tables as aligned Markdown, which a terminal also shows well, and as HTML."""

from __future__ import annotations

import html
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from distillkit._utils import check
from distillkit._utils.extras import optional

NONE = "–"
"""Text of a table cell that has no value."""


def flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return a mapping in which inner mappings have become several entries, named as "outer.inner"."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        found |= flat(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {f"{prefix}{name}": value}
    return found


def data_frame(rows: Sequence[Mapping[str, Any]], index: Sequence[str]) -> Any:
    """Return a `pandas.DataFrame` of flat rows, indexed by some of their columns.

    Raises:
        ImportError: pandas is not installed.
    """
    pandas = optional("pandas", "pandas", "frame()")
    columns = dict.fromkeys([*index, *(name for row in rows for name in row)])
    return pandas.DataFrame([dict(row) for row in rows], columns=list(columns)).set_index(list(index))


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


def html_table(header: Sequence[str], rows: Sequence[Sequence[str]], *, left: int = 1) -> str:
    """Return an HTML table, whose cells are escaped.

    Args:
        header, rows, left: as for `markdown_table`.
    """

    def line(cells: Sequence[str], tag: str) -> str:
        sides = ("left" if i < left else "right" for i in range(len(cells)))
        inner = (f'<{tag} style="text-align: {s}">{html.escape(c)}</{tag}>' for s, c in zip(sides, cells))
        return f"<tr>{''.join(inner)}</tr>"

    body = "".join(line(cells, "td") for cells in rows)
    return f"<table><thead>{line(header, 'th')}</thead><tbody>{body}</tbody></table>"


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
            Empty if the table has only printed cells.
        notes: explanations, printed below the table.
        left: number of leading columns that are aligned left.
    """

    header: Sequence[str]
    cells: Sequence[Sequence[str]]
    rows: list[dict[str, Any]] = field(default_factory=list)
    notes: Sequence[str] = ()
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
        header, left = tuple(self.header[i] for i in kept), sum(i < self.left for i in kept)
        starred = any("*" in name for name in header)
        notes = tuple(note for note in self.notes if starred or not note.startswith("*:"))
        return replace(self, header=header, cells=cells, notes=notes, left=left)

    def __str__(self) -> str:
        return "\n\n".join([markdown_table(self.header, self.cells, left=self.left), *self.notes])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        notes = "".join(f"<p>{html.escape(note)}</p>" for note in self.notes)
        return html_table(self.header, self.cells, left=self.left) + notes
