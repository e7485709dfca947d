"""Tables from the records of the attacks; `docs/scripts/tables.py` uses them for the results page."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from distillkit.study import markdown_table
from membership.pipelines import ROWS

NONE = "–"


Line = Mapping[str, Any]
NAMES = {
    "threshold": "global threshold", "LiRA offline": "LiRA offline, pooled", "LiRA online": "LiRA online, pooled"
}  # fmt: skip
"""Names of attacks in the tables."""
WHO = {
    "training": "training records", "held-out": "held-out records",
    "random": "training records, had random ones been sent in place of the images",
}  # fmt: skip
"""Descriptions of the groups of records for which the closest sent image is measured."""


def percent(found: Sequence[float], digits: int = 1) -> str:
    """Format a share and its interval in per cent."""
    value, low, high = (f"{100 * x:.{digits}f}" for x in found)
    return f"{value} ({low} to {high})"


def area(found: Sequence[float]) -> str:
    """Format an area under a curve and its interval."""
    value, low, high = (f"{x:.3f}".removeprefix("0") for x in found)
    return f"{value} ({low} to {high})"


def of_models(lines: Sequence[Line], key: str, text: Callable[[Sequence[float]], str]) -> str:
    """Return a table of one result (`key`) of all attacks on models. Pipelines without runs also have a row."""
    names = list(dict.fromkeys(line["attack"] for line in lines))
    rows = []
    for row, (title, _) in ROWS.items():
        found = {line["attack"]: line for line in lines if line["row"] == row}
        first = next(iter(found.values()), None)
        cells = [text(found[name][key]) if name in found else NONE for name in names]
        known = (str(first["shadows"]), f"{100 * first['accuracy']:.1f}") if first else ("not run yet", NONE)
        rows.append((title, *known, *cells))
    made = markdown_table(("trained on", "shadows", "accuracy %", *(NAMES.get(name, name) for name in names)), rows)
    if key != "tpr":
        return made
    low, high = (100 * f(line["fpr"][0] for line in lines) for f in (min, max))
    few = "; some rest on fewer than ten false positives" if any(line["few"] for line in lines) else ""
    return f"{made}\n\nFalse-positive rates that the thresholds reached: {low:.2f} to {high:.2f} %{few}."


def of_choices(lines: Sequence[Line]) -> str:
    """Return a table that compares variants of LiRA on models of raw data."""
    rows = [(line["attack"], percent(line["tpr"]), percent(line["fpr"], 2), area(line["auc"])) for line in lines]
    return markdown_table(("attack on raw data", "TPR %", "FPR %", "AUC"), rows)


def of_sets(lines: Sequence[Line]) -> str:
    """Return a table of the attacks on sets, with separate results for records that were initial images."""
    rows = []
    for line in lines:
        n, groups = line["numbers"], line["started"]
        single = line["row"] in ("dm", "dm-noise", "class-means")
        ipc, steps = (n["ipc"], n["steps"]) if single else (f"{n['ipc'] // 2} x {n['clients']}", n["round_steps"])
        made_by = NONE if line["row"] in ("class-means", "fedlgd") else f"{ipc}, {n['records'] // 2}, {steps}"
        parts = (percent(groups[name]) for name in ("tpr", "rest")) if groups else (NONE, NONE)
        began = f"{100 * groups['share']:.1f}" if groups else "0.0"
        attacked = (line["attack"], percent(line["tpr"]), percent(line["fpr"], 2), area(line["auc"]))
        rows.append((ROWS[line["row"]][0], made_by, str(line["shadows"]), *attacked, began, *parts))
    header = (
        "set", "ipc, N, T", "runs", "score", "TPR %", "FPR %", "AUC", "initial %", "TPR, initial %", "TPR, rest %"
    )  # fmt: skip
    return markdown_table(header, rows)


def of_transcript(lines: Sequence[Line]) -> str:
    """Return a table of the shares of records that are visible in a run's messages."""
    [line] = lines
    above = line["above"]
    rows = [(said, *(percent(above[level][who]) for level in above)) for who, said in WHO.items()]
    made = markdown_table(("records", *(f"above {level} dB, %" for level in above)), rows)
    few = ", few false positives" if line["few"] else ""
    return (
        f"{made}\n\nAs an attack, by the {line['images']:,} images of all rounds: AUC {line['auc']:.3f}, TPR "
        f"{percent(line['tpr'])} % at FPR {percent(line['fpr'], 2)} %{few}."
    )


TABLES: dict[str, tuple[str, Callable[[Sequence[Line]], str]]] = {
    "tpr": ("model", partial(of_models, key="tpr", text=percent)),
    "auc": ("model", partial(of_models, key="auc", text=area)),
    "choices": ("choice", of_choices),
    "sets": ("set", of_sets),
    "transcript": ("transcript", of_transcript),
}
"""Kind of the records in each table, and the function that makes the table, by the table's name."""


def table(name: str, lines: Sequence[Line]) -> str:
    """Return one table of the records, or an empty text if there are no records for this table.

    Args:
        name: name of the table, one of `TABLES`.
        lines: the records.

    Raises:
        ValueError: `name` is not in `TABLES`.
    """
    if name not in TABLES:
        raise ValueError(f"name must be one of {', '.join(TABLES)}, got {name!r}")
    kind, make = TABLES[name]
    own = [line for line in lines if line["kind"] == kind]
    return make(own) if own else ""
