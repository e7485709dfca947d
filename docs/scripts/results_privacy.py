"""Write the tables of `results/privacy.md` from `results/privacy.json`, one object a run.

python docs/scripts/results_privacy.py [SUMMARY ...]

With SUMMARY, files that `examples/private_sets.py` wrote, their records are first taken into `results/privacy.json`
(one of the same run and settings is replaced). A table stands between `<!-- table: DATASET -->` and
`<!-- end of table -->`.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
from private_sets import METHODS, table, updates

RESULTS = Path(__file__).parents[1] / "results"
TABLE = re.compile(r"(<!-- table: (\S+) -->\n).*?(<!-- end of table -->)", re.DOTALL)


def place(record: dict[str, Any]) -> tuple[Any, ...]:
    """Where a record stands; equal for runs that replace each other."""
    settings = json.dumps(record["settings"], sort_keys=True)
    return (
        record["dataset"],
        METHODS.index(record["method"]),
        -(record["epsilon_wanted"] or 0),
        -updates(record),
        settings,
        record["seed"],
    )


def take(summaries: list[Path]) -> None:
    """Merge runs into the results; where they wrote to is nobody else's business."""
    path = RESULTS / "privacy.json"
    records = json.loads(path.read_text()) if path.exists() else []
    for summary in summaries:
        for record in json.loads(summary.read_text()):
            record["command"] = re.sub(r" --(out|data) \S+", "", record["command"])
            records.append(record)
    lines = [json.dumps(record) for _, record in sorted({place(r): r for r in records}.items())]
    path.write_text("[\n" + ",\n".join(lines) + "\n]\n")


def main() -> None:
    """Take the records of the named summaries, then write the tables."""
    take([Path(name) for name in sys.argv[1:]])
    records = json.loads((RESULTS / "privacy.json").read_text())
    page = RESULTS / "privacy.md"

    def made(found: re.Match[str]) -> str:
        own = [r for r in records if r["dataset"] == found[2]]
        return f"{found[1]}\n{table(own)}\n\n{found[3]}"

    page.write_text(TABLE.sub(made, page.read_text()))


if __name__ == "__main__":
    main()
