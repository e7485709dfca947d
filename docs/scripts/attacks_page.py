"""Write the documentation's attack results from the records of examples/membership.py.

    python docs/scripts/attacks_page.py [FOLDER]

With FOLDER, which the example wrote, its rows first take the place of theirs in `results/attacks.jsonl`. In
`results/attacks.md` a table stands between `<!-- table: NAME -->` and `<!-- end of table -->`, and the commits between
`<!-- commits -->` and `<!-- end of commits -->`. Any page may have a single number between
`<!-- found: ROW ATTACK KEY -->` and `<!-- end of found -->`, where KEY is one of `NUMBERS` and an attack's blanks are
underscores.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "examples"), str(ROOT / "docs" / "scripts")]

from _marks import COMMITS, TABLE, read, with_commits, with_tables  # noqa: E402

from _membership_tables import TABLES, percent, table  # noqa: E402
from _pipelines import ROWS  # noqa: E402

RECORDS = ROOT / "docs" / "results" / "attacks.jsonl"
FOUND = re.compile(r"(<!-- found: (\S+) (\S+) (\S+) -->).*?(<!-- end of found -->)", re.DOTALL)
__all__ = ["COMMITS", "TABLE", "TABLES", "filled", "merged", "number", "pages", "read"]

Lines = Sequence[dict[str, Any]]
NUMBERS: dict[str, Callable[[dict[str, Any]], str]] = {
    "tpr": lambda line: percent(line["tpr"]),
    "started": lambda line: percent(line["started"]["tpr"]),
    "rest": lambda line: percent(line["started"]["rest"]),
    "share": lambda line: f"{100 * line['started']['share']:.0f}",
    "accuracy": lambda line: f"{100 * line['accuracy']:.1f}",
    "training": lambda line: f"{100 * line['above']['25']['training'][0]:.1f}",
    "held-out": lambda line: f"{100 * line['above']['25']['held-out'][0]:.1f}",
}
"""What a single number may be."""


def merged(old: Lines, new: Lines) -> list[dict[str, Any]]:
    """Merge records: newer rows replace older ones, in the order of the table."""
    fresh = {line["row"] for line in new}
    order = [*ROWS, "transcript"]
    return sorted(
        [*(line for line in old if line["row"] not in fresh), *new], key=lambda line: order.index(line["row"])
    )


def number(lines: Lines, row: str, attack: str, key: str) -> str:
    """Return one number of the records in per cent.

    Raises:
        ValueError: there is no such record, or more than one.
    """
    own = [line for line in lines if line["row"] == row and line["attack"] == attack]
    if len(own) != 1:
        raise ValueError(f"there must be one record of {row}, {attack}, found {len(own)}")
    return f"{NUMBERS[key](own[0])} %"


def filled(text: str, lines: Lines) -> str:
    """Return a page with its tables, commits and numbers rebuilt from the records."""
    text = with_commits(text, (line["commit"] for line in lines))
    text = FOUND.sub(lambda m: f"{m[1]}{number(lines, m[2], m[3].replace('_', ' '), m[4])}{m[5]}", text)
    return with_tables(text, lambda name: (table(name, lines) or "Not run yet.") if name in TABLES else None)


def pages() -> list[Path]:
    """Return the pages that contain such numbers."""
    found = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    return [path for path in found if path.stem == RECORDS.stem or FOUND.search(path.read_text(encoding="utf-8"))]


def main() -> None:
    """Import the records of a folder, then write the pages."""
    lines = read(RECORDS)
    if sys.argv[1:]:
        lines = merged(lines, read(Path(sys.argv[1]) / "records.jsonl"))
        RECORDS.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    for path in pages():
        path.write_text(filled(path.read_text(encoding="utf-8"), lines), encoding="utf-8")


if __name__ == "__main__":
    main()
