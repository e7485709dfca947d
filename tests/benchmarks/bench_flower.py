"""What Flower costs a round and client: its own bare messages, our adapter, and threads, up to 100 MB each way.

The method does nothing: clients send back what they are sent. Four nodes, which Flower simulates on two cores. Needs
Flower, which `make test-flower` installs: .venv-flower/bin/python -m tests.benchmarks flower
"""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.flower_real.deployed import Flower

PLACE = "num-supernodes=4 client-resources-num-cpus=1 init-args-num-cpus=2"


def main() -> None:
    """Print the table."""
    if importlib.util.find_spec("flwr") is None:
        print(
            "Flower is not installed here: .venv-flower/bin/python -m tests.benchmarks flower, after make test-flower"
        )
        return
    with Flower(simulation=True) as flower:
        out = flower.folder / "out"
        number = flower.begin("run", {"methods": "costs", "out": str(out)}, PLACE)
        run = flower.end("run", number)
        if run["status"] != "finished:completed":
            raise RuntimeError(f"{json.dumps(run)}\n{flower.log('run')[-3000:]}")
        print("| payload | Flower alone, s | adapter, s | threads, s | adapter / Flower | Flower / threads |")
        print("|---|---:|---:|---:|---:|---:|")
        for name, line in flower.results(out).items():
            bare, adapter, threads = (line[way] for way in ("bare", "adapter", "threads"))
            said = f"{bare:.3f} | {adapter:.3f} | {threads:.4f} | {adapter / bare:.2f} | {adapter / threads:.0f}"
            print(f"| {name} | {said} |")


if __name__ == "__main__":
    main()
