"""Write the tables of `docs/benchmarks.md` from their records.

    python docs/scripts/benchmarks.py

The records are what `make bench-page`, `make bench-peers` and `python -m tests.benchmarks profiles` keep under
`docs/results/`. One that was made at tiny sizes is refused; rows that one lacks are named on the page.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "docs" / "scripts")]
from _marks import TABLE, with_tables  # noqa: E402

from tests.benchmarks import bench_peers, bench_profiles, show  # noqa: E402
from tests.benchmarks.table import NAMES  # noqa: E402

__all__ = ["PAGE", "RESULTS", "TABLE", "filled"]

RESULTS, PAGE = ROOT / "docs" / "results", ROOT / "docs" / "benchmarks.md"
NONE = "No record is kept yet."


def rows(record: Path) -> str:
    """Return the table of benchmarks and the table of growth."""
    lines = show.read(record)
    if any(line["tiny"] for line in lines):
        raise ValueError(f"{record.name} was made with --tiny, which measures nothing: make it again without")
    held = {show.name(line) for line in lines}
    missing = [name for name in NAMES if lines and name not in held]
    return show.tables(lines) + (f"\n\nNot measured: {', '.join(missing)}." if missing else "")


def peers(record: Path) -> str:
    """Return the comparison with other engines."""
    if not record.exists():
        return NONE
    held = json.loads(record.read_text(encoding="utf-8"))
    if (held["users"], held["cohort"]) != (1000, 50):
        raise ValueError(f"{record.name} is of {held['users']} users, {held['cohort']} in a round, want 1000 and 50")
    return bench_peers.table(held)


def profiles(record: Path) -> str:
    """Return the profile of the examples."""
    return bench_profiles.table(json.loads(record.read_text(encoding="utf-8"))) if record.exists() else NONE


MAKERS = {"benchmarks.jsonl": rows, "peers.json": peers, "profiles.json": profiles}


def filled(text: str, results: Path) -> str:
    """Return the page with its tables rebuilt; a table without a record says so.

    Args:
        text: of the page, with its marks: a table's is the name of its record.
        results: the records' folder.

    Raises:
        ValueError: a record that measured nothing, or other sizes than the page speaks of.
    """
    return with_tables(text, lambda mark: MAKERS[mark](results / mark))


if __name__ == "__main__":
    PAGE.write_text(filled(PAGE.read_text(encoding="utf-8"), RESULTS), encoding="utf-8")
