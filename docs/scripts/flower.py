"""Write the tables of `docs/flower.md` of what was seen on Flower itself from their records, and from nothing else.

    python docs/scripts/flower.py

`docs/results/flower.json` is what the tests kept (`make test-flower FLOWER_RECORD=docs/results/flower.json`, and so
`make test-flower-faults`), `docs/results/flower_costs.json` what `python -m tests.benchmarks flower --out ...` kept.
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
WAYS = ("bare", "adapter", "threads")
NOT_YET = "Not seen on Flower itself yet; only on the grid in memory."
Record = dict[str, Any]


def seconds(value: float | None, digits: int = 1) -> str:
    """Some seconds, if they were measured on an idle machine."""
    return "–" if value is None else f"{value:.{digits}f}"


def words(head: str, lines: list[list[str]]) -> str:
    """A table of words, with numbers in its last column."""
    made = table(head, lines)
    rule = f"|{'---|' * head.count('|')}---:|"
    return "\n".join([made.split("\n")[0], rule, *made.split("\n")[2:]])


def seen(record: Record) -> str:
    """What was run, at which commit, and how long it took."""
    parts: Record = {}
    for part in record.values():
        parts.setdefault(part["command"], part)
    lines = [
        [f"`{command}`", part["commit"], part["date"], part.get("tests", "passed"), seconds(part["seconds"], 0)]
        for command, part in parts.items()
    ]
    return words("command | commit | date | outcome | seconds", lines)


def equal(record: Record) -> str:
    """Hashes with threads and on Flower."""
    lines = [
        [part, row["method"], *(f"`{row[name][:12]}`" for name in ("hash_threads", "hash_flower")),
         seconds(row["seconds"])]
        for part in ("simulated", "deployed", "secure") for row in record.get(part, {"rows": []})["rows"]
    ]  # fmt: skip
    return words("where | method | hash with threads | hash on Flower | seconds", lines)


def private(record: Record) -> str:
    """Epsilons in process and on Flower, round by round; and what nodes said that were asked for too much."""
    if "private" not in record:
        return NOT_YET
    part = record["private"]
    lines = [
        [row["run"], row["method"], *(", ".join(map(str, row[name])) for name in ("simulate", "flower"))]
        for row in part["rows"]
    ]
    told = [
        f"Run {row['run']}, round {number}, client {client}: *{why}*."
        for row in part["rows"] for number, failed in enumerate(row["failed"], 1) for client, why in failed.items()
    ]  # fmt: skip
    told += [f"Run {name}, status `{status}`: *{part['raised'][0]}*." for name, status in part["status"].items()][-1:]
    made = words("run | method | epsilon of `simulate`, each round | epsilon on Flower", lines)
    return "\n\n".join([made, *told])


def secure(record: Record) -> str:
    """How many clients each sum was over, and how far it was from a plain one."""
    if "secure" not in record:
        return NOT_YET
    part = record["secure"]
    lines = [
        [row["method"], str(number), ", ".join(failed) or "–", str(done["clients"]), str(done["recovered"])]
        for row in part["rows"] for number, (failed, done) in enumerate(zip(row["failed"], row["secure_sum"]), 1)
    ]  # fmt: skip
    made = words("method | round | failed | clients in the sum | masks recovered", lines)
    return f"{made}\n\nThe largest difference of a weight from the run with plain sums is {part['apart']:.1e}."


def costs(record: Record) -> str:
    """What each payload costs, and where that was measured."""
    if not record:
        return NOT_YET
    lines = []
    for row in record["rows"]:
        bare, adapter, threads = (statistics.median(row[way]) / row["clients"] for way in WAYS)
        ratios = f"{adapter / bare:.2f}", f"{adapter / threads:,.0f}"
        lines.append([row["method"], f"{bare:.3f}", f"{adapter:.3f}", f"{threads:.4f}", *ratios])
    where = f"{record['processor']}, {record['cores']} cores, PyTorch {record['torch']}"
    flower = f"Flower {record['flwr']}, Ray {record['ray']}; {record['memory'] / 1e9:.1f} GB for all processes together"
    head = "each way | Flower alone, s | adapter, s | threads, s | adapter / Flower | adapter / threads"
    made = table(head, lines)
    return f"{made}\n\n`{record['command']}` at commit {record['commit']}, {record['date']}: {where}; {flower}."


def filled(text: str, record: Record, measured: Record) -> str:
    """The text of the page with its tables made of the records.

    Args:
        text: of the page, with its marks.
        record: what the tests saw, by part.
        measured: what a round costs; empty if that is not there.
    """
    tables = {"seen": seen, "equal": equal, "private": private, "secure": secure}
    return with_tables(text, lambda name: costs(measured) if name == "costs" else tables[name](record))


def read(path: Path) -> Record:
    """A record; empty without a file."""
    return json.loads(path.read_text()) if path.exists() else {}


if __name__ == "__main__":
    PAGE.write_text(filled(PAGE.read_text(), read(RECORD), read(COSTS)))
