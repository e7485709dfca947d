"""Cost of Flower per round and client: bare messages, our adapter and threads, up to 100 MB each way.

The method does nothing: clients send back what they are sent. Four nodes, which Flower simulates on two cores. Needs
Flower, which `make test-flower` installs; on an idle machine, for the record of which the page is made:

    .venv-flower/bin/python -m tests.benchmarks flower --out docs/results/flower_costs.json
    python docs/scripts/tables.py
"""

from __future__ import annotations

import argparse
import datetime
import importlib.util
import json
import os
import shlex
import statistics
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))
from distillkit._utils.tables import markdown_table
from tests.benchmarks.table import processor
from tests.flower_real.deployed import APP, Flower
from tests.flower_real.record import commit, version_of

sys.path.append(str(APP))
from dk_app.costs import SIZES

PLACE = "num-supernodes=4 client-resources-num-cpus=1 init-args-num-cpus=2"
TRIES = 8


class Room:
    """Sampler of the least free memory of the machine, in bytes, twice per second."""

    def __enter__(self) -> Room:
        self.before = self.least = self._left()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._done.wait(0.5):
            self.least = min(self.least, self._left())

    @staticmethod
    def _left() -> int:
        lines = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
        return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))


def measured(payloads: list[str]) -> dict[str, Any]:
    """Return the rows, and the memory of all processes together."""
    with Flower(simulation=True) as flower, Room() as room:
        for tried in range(TRIES):  # Ray gives its own start 15 and 30 seconds, whatever the machine is busy with
            name, out = f"run{tried}", flower.folder / f"out{tried}"
            config = {"methods": "costs", "payloads": ",".join(payloads), "out": str(out)}
            number = flower.begin(name, config, PLACE)
            run, log = flower.end(name, number), flower.log(name)
            if "timed out during startup" not in log:
                break
        if run["status"] != "finished:completed":
            raise RuntimeError(f"{json.dumps(run)}\n{log[-3000:]}")
        return {"memory": room.before - room.least, "rows": list(flower.results(out).values())}


def table(record: dict[str, Any]) -> str:
    """Return the seconds per round and client for each payload, and the machine of the measurement."""
    lines = []
    for row in record["rows"]:
        seconds = [statistics.median(row[way]) / row["clients"] for way in ("bare", "adapter", "threads")]
        bare, adapter, threads = seconds
        ratios = f"{adapter / bare:.2f}", f"{adapter / threads:,.0f}"
        lines.append([row["method"], f"{bare:.3f}", f"{adapter:.3f}", f"{threads:.4f}", *ratios])
    head = ("each way", "Flower alone, s", "adapter, s", "threads, s", "adapter / Flower", "adapter / threads")
    where = f"{record['processor']}, {record['cores']} cores, PyTorch {record['torch']}"
    flower = f"Flower {record['flwr']}, Ray {record['ray']}; {record['memory'] / 1e9:.1f} GB for all processes together"
    said = f"`{record['command']}` at commit {record['commit']}, {record['date']}: {where}; {flower}."
    return f"{markdown_table(head, lines)}\n\n{said}"


def main() -> None:
    """Print the table and write the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="a file for the record")
    parser.add_argument("--payloads", nargs="+", choices=list(SIZES), default=list(SIZES))
    o = parser.parse_args()
    if importlib.util.find_spec("flwr") is None:
        print(
            "Flower is not installed here: .venv-flower/bin/python -m tests.benchmarks flower, after make test-flower"
        )
        return
    began = time.monotonic()
    facts = {
        "command": shlex.join(["python", "-m", "tests.benchmarks", "flower", *sys.argv[1:]]), "commit": commit(),
        "date": f"{datetime.date.today():%Y-%m-%d}", "flwr": version_of("flwr"), "ray": version_of("ray"),
        "torch": str(torch.__version__), "processor": processor(), "cores": os.cpu_count(),
    }  # fmt: skip
    found = measured(o.payloads)
    record = {**facts, "seconds": round(time.monotonic() - began, 1), **found}
    if o.out:
        o.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print(table(record))


if __name__ == "__main__":
    main()
