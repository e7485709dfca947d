"""The result of a run, and its display in notebooks."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from torch import nn

from distillkit._utils.display import embedded_picture
from distillkit._utils.tables import data_frame, html_table
from fl.engine import history
from fl.participants import Server

_SHOWN = 5
"""Number of rows in a notebook's table."""


@dataclass(frozen=True, repr=False)
class Run:
    """A finished run, as `simulate` returns it. A notebook shows its accuracy curve and its last rows.

    Attributes:
        rows: rows of the history, one for each round, with the columns round, accuracy, loss, bytes_up and others.
        server: the server with its state after the last round.
        models: the global models by name ("" if there is only one), in eval mode.
        method: short description of the method: the class name and the names of the add-ons.
    """

    rows: list[dict[str, Any]]
    server: Server
    models: dict[str, nn.Module]
    method: str

    @property
    def accuracy_last(self) -> float | None:
        """Accuracy after the last round, as a fraction in [0, 1]; None if the run was not evaluated."""
        return history.accuracy_last(self.rows)

    @property
    def accuracy_best(self) -> float | None:
        """Best accuracy after any round, as a fraction in [0, 1]; None if the run was not evaluated.

        The best round is chosen on the test set, so this accuracy is optimistic.
        """
        return history.accuracy_best(self.rows)

    def table(self) -> list[dict[str, Any]]:
        """Return the history as flat dictionaries, one per round. See `fl.history.table`."""
        return history.table(self.rows)

    def frame(self) -> Any:
        """Return the history as a `pandas.DataFrame`, with a row per round and the columns of `table`.

        Raises:
            ImportError: pandas is not installed.
        """
        return data_frame(self.table(), ["round"])

    def __repr__(self) -> str:
        """Return one line with the method, the number of rounds and the results."""
        found = [f"{len(self.rows)} rounds of {self.method}", f"{self.server.clients} clients"]
        if self.accuracy_last is not None and self.accuracy_best is not None:
            found.append(f"accuracy {100 * self.accuracy_last:.1f} % (best {100 * self.accuracy_best:.1f} %)")
        failed = sum(len(row["failed"]) for row in self.rows)
        if failed:
            found.append(f"{failed} replies left out")
        last = self.rows[-1] if self.rows else {}
        if "privacy" in last:
            epsilon = last["epsilon"]
            found.append("no guarantee" if epsilon is None else f"epsilon {epsilon:.3g}")
        return f"Run({', '.join(found)})"

    def _repr_html_(self) -> str:
        """Return HTML for a notebook: the line of `__repr__`, the accuracy curve, and a table of the last rounds."""
        return f"<div><p><b>{escape(repr(self))}</b></p>{_curve(self.rows)}{_rows(self.rows)}</div>"


def _curve(rows: Sequence[dict[str, Any]]) -> str:
    known = [row for row in rows if row["accuracy"] is not None]
    if len(known) < 2:
        return ""
    from distillkit.plot import curves

    file = io.BytesIO()
    curves(known).savefig(file, format="png")
    accuracies = [100 * row["accuracy"] for row in known]
    span = f"{min(accuracies):.1f} to {max(accuracies):.1f} %, rounds {known[0]['round']} to {known[-1]['round']}"
    return embedded_picture(file.getvalue(), f"accuracy, {span}", width="360")


def _rows(rows: Sequence[dict[str, Any]]) -> str:
    def shown(row: dict[str, Any]) -> dict[str, str]:
        cells = {"round": str(row["round"])}
        for name, text in (("accuracy", "{:.1%}"), ("loss", "{:.3f}"), ("epsilon", "{:.3g}")):
            if any(r.get(name) is not None for r in rows):
                cells[name] = "" if row.get(name) is None else text.format(row[name])
        cells |= {"MB up": f"{row['bytes_up'] / 1e6:.2f}", "MB down": f"{row['bytes_down'] / 1e6:.2f}"}
        drawn = row["drawn"]
        cells |= {"clients": "" if drawn is None else str(len(drawn)), "failed": str(len(row["failed"]))}
        return cells | {"seconds": f"{row['seconds']:.1f}"}

    lines = [shown(row) for row in rows[-_SHOWN:]]
    return html_table([*lines[0]], [[*line.values()] for line in lines], left=0) if lines else ""
