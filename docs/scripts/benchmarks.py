"""Write the table of `docs/benchmarks.md` from its record, and from nothing else.

    python docs/scripts/benchmarks.py

The record is what `python -m tests.benchmarks --out docs/results/benchmarks.jsonl` wrote (`make bench-page` does both).
One that was made at tiny sizes, or that lacks a row, is refused.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))
from tests.benchmarks import show  # noqa: E402
from tests.benchmarks.table import NAMES  # noqa: E402

RECORD, PAGE = ROOT / "docs" / "results" / "benchmarks.jsonl", ROOT / "docs" / "benchmarks.md"
TABLE = re.compile(r"(<!-- table -->\n).*?(<!-- end of table -->)", re.DOTALL)


def filled(text: str, record: Path) -> str:
    """The text of the page with the tables of a record; without one it says so.

    Args:
        text: of the page, with its marks.
        record: its file, which need not exist.

    Raises:
        ValueError: the record is no whole one.
    """
    lines = show.read(record)
    if any(line["tiny"] for line in lines):
        raise ValueError(f"{record.name} was made with --tiny, which measures nothing: make it again without")
    missing = [name for name in NAMES if name not in {line.get("row", line.get("growth")) for line in lines}]
    if lines and missing:
        raise ValueError(f"{record.name} lacks {', '.join(missing)}: make it again without --only")
    return TABLE.sub(lambda found: f"{found[1]}\n{show.tables(lines)}\n\n{found[2]}", text)


if __name__ == "__main__":
    PAGE.write_text(filled(PAGE.read_text(), RECORD))
