"""Write the result tables of `docs/flower.md` from the records of runs on Flower.

    python docs/scripts/flower.py

`docs/results/flower.json` is written by the tests (`make test-flower FLOWER_RECORD=docs/results/flower.json`, and
`make test-flower-faults` likewise), `docs/results/flower_costs.json` by `python -m tests.benchmarks flower --out ...`.
"""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parents[1]
sys.path.insert(0, str(DOCS / "scripts"))

from _marks import table, with_tables  # noqa: E402

__all__ = ["PAGE", "filled"]

PAGE = DOCS / "flower.md"
RECORD, COSTS = DOCS / "results" / "flower.json", DOCS / "results" / "flower_costs.json"
TRANSPORTS = ("bare", "adapter", "threads")
NOT_YET = "Not run on Flower yet, only on the in-memory grid."
Record = dict[str, Any]


def seconds(value: float | None, digits: int = 1) -> str:
    """Format seconds; a dash if they were not measured on an idle machine."""
    return "–" if value is None else f"{value:.{digits}f}"


def text_table(head: str, lines: list[list[str]]) -> str:
    """Return a Markdown table of text with a numeric last column."""
    rows = table(head, lines).split("\n")
    rule = f"|{'---|' * head.count('|')}---:|"
    return "\n".join([rows[0], rule, *rows[2:]])


def seen(record: Record) -> str:
    """Return the table of commands with their commit and duration."""
    parts: Record = {}
    for part in record.values():
        parts.setdefault(part["command"], part)
    lines = [
        [f"`{command}`", part["commit"], part["date"], part.get("tests", "passed"), seconds(part["seconds"], 0)]
        for command, part in parts.items()
    ]
    return text_table("command | commit | date | outcome | seconds", lines)


def equal(record: Record) -> str:
    """Return the table of result hashes with threads and on Flower."""
    lines = [
        [part, row["method"], *(f"`{row[name][:12]}`" for name in ("hash_threads", "hash_flower")),
         seconds(row["seconds"])]
        for part in ("simulated", "deployed", "secure") for row in record.get(part, {"rows": []})["rows"]
    ]  # fmt: skip
    return text_table("where | method | hash with threads | hash on Flower | seconds", lines)


def private(record: Record) -> str:
    """Return the table of epsilons in process and on Flower, and the refusals by node policies."""
    if "private" not in record:
        return NOT_YET
    part = record["private"]
    lines = [
        [row["run"], row["method"], *(", ".join(map(str, row[name])) for name in ("simulate", "flower"))]
        for row in part["rows"]
    ]
    refusals = [
        f"Run {row['run']}, round {number}, client {client}: *{why}*."
        for row in part["rows"] for number, failed in enumerate(row["failed"], 1) for client, why in failed.items()
    ]  # fmt: skip
    name, status = list(part["status"].items())[-1]
    refusals.append(f"Run {name}, status `{status}`: *{part['raised'][0]}*.")
    made = text_table("run | method | epsilon of `simulate`, each round | epsilon on Flower", lines)
    return "\n\n".join([made, *refusals])


def secure(record: Record) -> str:
    """Return the table of clients in each secure sum, and the difference from a plain run."""
    if "secure" not in record:
        return NOT_YET
    part = record["secure"]
    lines = [
        [row["method"], str(number), ", ".join(failed) or "–", str(done["clients"]), str(done["recovered"])]
        for row in part["rows"] for number, (failed, done) in enumerate(zip(row["failed"], row["secure_sum"]), 1)
    ]  # fmt: skip
    made = text_table("method | round | failed | clients in the sum | masks recovered", lines)
    return f"{made}\n\nThe largest difference of a weight from the run with plain sums is {part['apart']:.1e}."


def costs(record: Record) -> str:
    """Return the table of costs per payload, and the machine of the measurement."""
    if not record:
        return NOT_YET
    lines = []
    for row in record["rows"]:
        bare, adapter, threads = (statistics.median(row[transport]) / row["clients"] for transport in TRANSPORTS)
        ratios = f"{adapter / bare:.2f}", f"{adapter / threads:,.0f}"
        lines.append([row["method"], f"{bare:.3f}", f"{adapter:.3f}", f"{threads:.4f}", *ratios])
    where = f"{record['processor']}, {record['cores']} cores, PyTorch {record['torch']}"
    flower = f"Flower {record['flwr']}, Ray {record['ray']}; {record['memory'] / 1e9:.1f} GB for all processes together"
    head = "each way | Flower alone, s | adapter, s | threads, s | adapter / Flower | adapter / threads"
    made = table(head, lines)
    return f"{made}\n\n`{record['command']}` at commit {record['commit']}, {record['date']}: {where}; {flower}."


def filled(text: str, record: Record, measured: Record) -> str:
    """Return the page with its tables filled from the records.

    Args:
        text: the page with its markers.
        record: results of the tests, by part.
        measured: costs of a round, or an empty record.
    """
    tables = {"seen": seen, "equal": equal, "private": private, "secure": secure}
    return with_tables(text, lambda name: costs(measured) if name == "costs" else tables[name](record))


def read(path: Path) -> Record:
    """Read a record; it is empty without a file."""
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


if __name__ == "__main__":
    PAGE.write_text(filled(PAGE.read_text(encoding="utf-8"), read(RECORD), read(COSTS)), encoding="utf-8")
