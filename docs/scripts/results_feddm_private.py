"""Write the table of `results/feddm_private.md` from `results/feddm_private.json`.

python docs/scripts/results_feddm_private.py [SUMMARY ...]

Each SUMMARY, a `summary.json` that `examples/feddm.py` wrote, is first taken into `results/feddm_private.json` (a row
of the same run is replaced).
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
from feddm import TITLES, table

DOCS = Path(__file__).parents[1]
START, END = "<!-- table -->", "<!-- end of table -->"


def take(summaries: list[Path]) -> list[dict[str, Any]]:
    """Merge the rows of runs into the results; where they were written to is nobody else's business."""
    path = DOCS / "results" / "feddm_private.json"
    rows = {row["run"]: row for row in (json.loads(path.read_text()) if path.exists() else [])}
    for summary in summaries:
        for row in json.loads(summary.read_text()):
            row["command"] = re.sub(r" --(out|data) \S+", "", row["command"])
            rows[row["run"]] = row
    titles = [*TITLES.values()]

    def order(row: dict[str, Any]) -> tuple[Any, ...]:
        place = titles.index(row["method"]) if row["method"] in titles else len(titles)
        return row["task"], row["split"], -(row["epsilon_wanted"] or 0), place, row["method"], row["seed"]

    ordered = sorted(rows.values(), key=order)
    path.write_text(json.dumps(ordered, indent=1) + "\n")
    return ordered


def main() -> None:
    """Take the rows of the named summaries, then write the table."""
    rows = take([Path(word) for word in sys.argv[1:]])
    page = DOCS / "results" / "feddm_private.md"
    before, rest = page.read_text().split(START)
    page.write_text(f"{before}{START}\n\n{table(rows)}\n\n{END}{rest.split(END)[1]}")


if __name__ == "__main__":
    main()
