"""Comparison of the engine with its peers (`peers.py`): seconds per round on the shape that pfl-research publishes.

    make bench-peers                                                                  on an idle machine, in six minutes
    python -m tests.benchmarks peers --out docs/results/peers.json                    in an environment with both peers

Repeats of the implementations alternate. A repeat has four rounds, of which the first is not counted (in Flower, it
starts the actors). Rounds in which clients fail are fast. An implementation therefore gets no seconds if a round had
fewer than 50 replies, if it fails, or if it is not installed; the record gives the reason. The record is written after
every repeat of every implementation.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from distillkit._utils.files import write_atomically
from distillkit._utils.provenance import git_commit
from distillkit._utils.tables import NONE, Table
from tests.benchmarks import peers
from tests.benchmarks.table import processor

PACKAGES = {"pfl-research": ("pfl",), "Flower": ("flwr", "ray")}
Way = Callable[[int], peers.Rounds]


def installed(name: str) -> str:
    """Return the version of a package, or "" without it."""
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


def ways(users: int, cohort: int) -> dict[str, Way]:
    """Return all available engines by name: functions of the number of rounds."""
    data = [peers.user(number) for number in range(users)]
    found: dict[str, Way] = {"plain loop": partial(peers.plain, data, cohort)}
    for workers in (1, 2):
        found[f"ours, workers {workers}"] = partial(peers.ours, data, cohort, workers=workers)
    found["pfl-research"] = partial(peers.pfl, data, cohort)
    found["Flower"] = partial(peers.flower, users, cohort)
    return {name: way for name, way in found.items() if all(installed(p) for p in PACKAGES.get(name, ()))}


def tried(way: Way, rounds: int, cohort: int) -> tuple[peers.Rounds, str]:
    """Return the rounds of an engine without the first; or none, and the reason."""
    try:
        found = way(rounds)
    except Exception as error:  # a peer that fails has no row, and takes none of the others with it
        return [], f"{type(error).__name__}: {error}"[:300]
    replies = [row["replies"] for row in found]
    if replies != [cohort] * rounds:
        return [], f"rounds with {replies} replies, want {cohort} each"
    return found[1:], ""


def table(record: dict[str, Any]) -> str:
    """Return a record as a table; ratios are those of medians over all rounds."""
    header = ("engine", "version", "rounds", "replies", "wall s per round", "range", "ratio to plain loop", "CPU ratio")
    cells = []
    rows = {name: [row for row in record["rows"] if row["way"] == name] for name in record["ways"]}
    base = rows["plain loop"]
    for name, own in rows.items():
        shipped = ", ".join(f"{p} {record['versions'][p]}" for p in PACKAGES.get(name, ())) or NONE
        if not own or not base:
            cells.append((name, shipped, *[NONE] * 6))
            continue
        wall, cpu = [row["wall"] for row in own], [row["cpu"] for row in own]
        of = statistics.median(wall) / statistics.median(row["wall"] for row in base)
        worked = NONE if None in cpu else f"{statistics.median(cpu) / statistics.median(r['cpu'] for r in base):.2f}"
        target = record["targets"].get(name)
        ratio = f"{of:.2f}" if target is None else f"{of:.2f} (target {target:.2f})"
        ratio = f"**{ratio}, missed**" if target is not None and of > target else ratio
        seconds = f"{statistics.median(wall):.2f}", f"{min(wall):.2f} to {max(wall):.2f}"
        replies = sum(row["replies"] for row in own)
        cells.append((name, shipped, str(len(own)), f"{replies:,}", *seconds, ratio, worked))
    notes = [f"{name}: {why}." for name, why in record["failed"].items()]
    if record.get("parts"):
        of_it = ", ".join(f"{part} {ms:.1f}" for part, ms in record["parts"].items())
        notes.append(f"CPU milliseconds per client of our engine, by thread, in profiled rounds: {of_it}.")
    where = f"{record['processor']}, {record['cores']} cores, PyTorch {record['versions']['torch']}"
    shape = f"{record['users']:,} users of {record['images']} images, {record['cohort']} in a round"
    of = f"`{record['command']}` at commit {record['commit']}, {record['when']}"
    return f"{of}, in {record['seconds']:.0f} s: {where}; {shape}.\n\n{Table(header, cells, notes=notes)}"


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """Measure, write the record after every engine, print the table."""
    parser = argparse.ArgumentParser(
        "python -m tests.benchmarks peers", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="a file for the record, JSON")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=4, help="of a repeat, at least 2; the first is not counted")
    parser.add_argument("--users", type=int, default=1000)
    parser.add_argument("--cohort", type=int, default=50)
    o = parser.parse_args(arguments)
    if o.rounds < 2 or o.repeats < 1 or not 1 <= o.cohort <= o.users:
        parser.error("--rounds must be at least 2, --repeats at least 1, --cohort at most --users")
    began, named = time.perf_counter(), ("torch", *(p for own in PACKAGES.values() for p in own))
    there = ways(o.users, o.cohort)
    record: dict[str, Any] = {
        "command": shlex.join(["python", "-m", "tests.benchmarks", "peers", *(arguments or sys.argv[1:])]),
        "commit": git_commit(), "when": f"{datetime.date.today():%Y-%m-%d}", "seconds": 0.0,
        "processor": processor(), "cores": os.cpu_count(), "python": platform.python_version(),
        "versions": {name: installed(name) for name in named}, "users": o.users, "cohort": o.cohort,
        "images": peers.IMAGES, "rounds": o.rounds, "repeats": o.repeats,
        "targets": {"ours, workers 1": 1.03, "ours, workers 2": 0.60}, "ways": list(there),
        "failed": {name: "it is not installed" for name in PACKAGES if name not in there}, "rows": [],
    }  # fmt: skip
    torch.set_num_threads(1)
    record["parts"] = peers.parts([peers.user(number) for number in range(o.users)], o.cohort)
    for repeat in range(o.repeats):
        for name, way in there.items():
            print(f"{repeat + 1} of {o.repeats}: {name}", file=sys.stderr, flush=True)
            rounds, why = tried(way, o.rounds, o.cohort)
            record["rows"] += [{"way": name, "repeat": repeat, **row} for row in rounds]
            record["failed"].update({name: why} if why else {})
            record["seconds"] = time.perf_counter() - began
            if o.out:
                write_atomically(o.out, f"{json.dumps(record, indent=1)}\n".encode())
    print(table(record))
    return record


if __name__ == "__main__":
    raise SystemExit(1 if main()["failed"] else 0)
