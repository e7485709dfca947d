"""Write the table of `results/condense.md` from `results/condense.json`, beside the published numbers.

python docs/scripts/results_condense.py [SUMMARY]

With SUMMARY, a `summary.json` that `examples/condense.py` wrote, its rows are first taken into `results/condense.json`
(a row of the same run, epochs and nets is replaced).
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parents[1] / "results"
START, END = "<!-- table -->", "<!-- end of table -->"
# Per cent at 10 images per class; the pages that they were read on are named in condense.md. "*": recalled, not read.
PUBLISHED = {
    "mnist": {
        "random": "95.1 ± 0.9 *",
        "herding": "93.7 ± 0.3 *",
        "dm": "97.5 ± 0.1 *",
        "dc": "97.4 ± 0.2",
        "dsa": "97.8 ± 0.1",
    },
    "fashionmnist": {
        "random": "73.8 ± 0.7 *",
        "herding": "71.1 ± 0.7 *",
        "dc": "82.3 ± 0.4",
        "dsa": "84.6 ± 0.3",
    },
    "cifar10": {"random": "26.0 ± 1.2", "dm": "48.9 ± 0.6"},
}
ORDER = ("random", "herding", "k-center", "dm", "dc", "dsa")


def take(summary: Path) -> None:
    """Merge a run's rows into the results; where it wrote to is nobody else's business."""
    path = RESULTS / "condense.json"
    taken = json.loads(path.read_text()) if path.exists() else []
    for row in json.loads(summary.read_text()):
        row["command"] = re.sub(r" --(out|data) \S+", "", row["command"])
        taken.append(row)
    rows = {(row["run"], row["epochs"], row["nets"]): row for row in taken}
    ordered = sorted(rows.values(), key=lambda r: (r["dataset"], r["epochs"], ORDER.index(r["method"]), r["seed"]))
    path.write_text(json.dumps(ordered, indent=2) + "\n")


def table(rows: list[dict[str, Any]]) -> str:
    """One line a row: what it cost, what it gave, what was published."""
    lines = [
        "| dataset | method | seed | image updates | epochs x batch | nets | accuracy % | CPU s | published |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for r in rows:
        accuracy = f"{100 * r['accuracy_mean']:.1f}"
        if r["nets"] > 1:
            accuracy += f" ± {100 * r['accuracy_std']:.1f}"
        published = PUBLISHED.get(r["dataset"], {}).get(r["method"], "–") if r["ipc"] == 10 else "–"
        schedule = f"{r['epochs']} x {r['batch']}"
        cost = f"{r['seconds_cpu']:.0f}"
        cells = (r["dataset"], r["method"], r["seed"], r["steps"], schedule, r["nets"], accuracy, cost, published)
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines)


def main() -> None:
    """Take the rows of the named summary, then write the table."""
    if len(sys.argv) > 1:
        take(Path(sys.argv[1]))
    page = RESULTS / "condense.md"
    text = page.read_text()
    before, rest = text.split(START)
    rows = json.loads((RESULTS / "condense.json").read_text())
    page.write_text(f"{before}{START}\n\n{table(rows)}\n\n{END}{rest.split(END)[1]}")


if __name__ == "__main__":
    main()
