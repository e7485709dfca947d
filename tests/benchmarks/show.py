"""Formatting of record lines as tables."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from distillkit._utils.tables import Table, markdown_table
from tests.benchmarks import growth, race

Line = dict[str, Any]
_HEADER = (
    "what", "seconds", "ours", "straightforward", "ratio", "range", "target", "convolutions", "memory, MB",
    "faults, thousands",
)  # fmt: skip


def read(path: Path) -> list[Line]:
    """Return the lines of a record; none if the file does not exist."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line] if path.exists() else []


def name(line: Line) -> str:
    """Return the name of a line in the table."""
    return str(line["row"] if "row" in line else line["growth"])


def _seconds(values: Sequence[float]) -> str:
    return f"{sorted(values)[len(values) // 2]:.3g}"


def _pair(both: dict[str, float | None], scale: float = 1.0) -> str:
    return " / ".join("–" if (v := both[side]) is None else f"{v / scale:,.0f}" for side in ("ours", "plain"))


def rows(lines: Sequence[Line]) -> str:
    """Return the table of rows with missed targets in bold."""
    cells, notes = [], list[str]()
    for line in lines:
        by, seconds = line["by"], line["seconds"]
        late = line["target"] is not None and line["ratio"] > line["target"]
        low = line["share_target"] is not None and line["share"] < line["share_target"]
        ratio, share = f"{line['ratio']:.2f}", f"{100 * line['share']:.0f} %"
        cells.append([
            line["row"], {"cpu": "CPU", "wall": "wall"}[by],
            _seconds([s + line["once"] for s in seconds["ours"][by]]), _seconds(seconds["plain"][by]),
            f"**{ratio}, missed**" if late else ratio, f"{line['least']:.2f} to {line['most']:.2f}",
            "–" if line["target"] is None else f"{line['target']:.2f}",
            f"**{share}, missed**" if low else share,
            _pair(line["memory"]), _pair(line["faults"], 1000),
        ])  # fmt: skip
        if line["bounded_by"]:
            ops = ", ".join(f"`{name}` {100 * share:.0f} %" for name, share in line["bounded_by"])
            notes.append(f"{line['row']} misses its target; our step spends most of its time in {ops}.")
        if line["difference"] > line["within"]:
            apart = f"{line['difference']:.1e} apart in float32, more than {line['within']:.0e}"
            notes.append(f"{line['row']}: both sides are {apart}, but {line['difference_float64']:.0e} in float64.")
    return str(Table(_HEADER, cells, notes=notes))


def grown(lines: Sequence[Line]) -> str:
    """Return the table of growth."""
    cells = []
    for line in lines:
        medians = [_seconds(values) for values in line["seconds"]["cpu"]]
        seconds = ", ".join(f"{size:,}: {value}" for size, value in zip(line["sizes"], medians))
        ratios = ", ".join(f"{ratio:.2f}" for ratio in line["ratios"])
        more = ", **missed**" if growth.missed(line) else ""
        cells.append((line["growth"], seconds, f"{ratios} (of {line['base']:,}){more}"))
    return markdown_table(("what grows", "CPU seconds", "ratio to one size"), cells, left=3)


def tables(lines: Sequence[Line]) -> str:
    """Return the origin of a record and its tables."""
    if not lines:
        return "No record is kept yet."
    first = lines[0]
    where = f"{first['processor']}, {first['cores']} cores, PyTorch {first['torch']}"
    took = sum(line["took"] for line in lines)
    said = [f"`{first['command']}` at commit {first['commit']}, {first['when']}, in {took:.0f} s: {where}."]
    for kind, make in (("row", rows), ("growth", grown)):
        own = [line for line in lines if kind in line]
        if own:
            said += ["", make(own)]
    return "\n".join(said)


def missed(lines: Sequence[Line]) -> list[str]:
    """Return the names of rows that miss their target."""
    return [name(line) for line in lines if (race if "row" in line else growth).missed(line)]
