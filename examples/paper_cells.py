"""Run single cells of the papers' tables at the papers' size in pieces of a few minutes, the most useful cells first.

    python examples/paper_cells.py --data DATA               # all cells; `make gpu` calls this
    python examples/paper_cells.py --data DATA --cells vhl-cifar10-two-classes
    python examples/paper_cells.py --smoke                   # each script to its end on a CPU, with tiny settings

Every cell runs in pieces of at most `--seconds`, with the same result as without interruptions. If the script itself is
interrupted, run the same command again. FedLGD's cell uses digits drawn from fonts in place of SynthDigits, and no
SVHN. `seconds.json` records the seconds that each cell took.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from shared.files import write_file
from shared.study import UNFINISHED


@dataclass(frozen=True)
class Cell:
    """Cell of a paper's table.

    Attributes:
        script: example that runs the cell.
        always: options of the script at any size.
        paper: further options at the paper's size.
        gain: gain in accuracy points that the paper reports.
    """

    script: str
    always: str
    paper: str
    gain: str


CELLS = {
    "vhl-cifar10-two-classes": Cell("vhl", "--pair", "--dataset cifar10 --split two-classes --rounds 100", "+30.1"),
    "vhl-fashionmnist": Cell("vhl", "--pair", "--dataset fashionmnist --rounds 150", "+5.2"),
    "feddm-cifar10-0.01": Cell("feddm", "--only claim", "--dataset cifar10 --split 0.01 --tries 1", "+24.5"),
    "fedcog-cifar10-two-classes": Cell("fedcog", "--headline", "--datasets cifar10 --division two-classes", "+3.45"),
    "feddm-cifar10-0.1": Cell("feddm", "--only claim", "--dataset cifar10 --split 0.1 --tries 1", "+10.1"),
    "vhl-cifar10": Cell("vhl", "--pair", "--dataset cifar10", "+7.8"),
    "single-image": Cell("single_image", "--headline", "", "+1.8"),
    "fedlgd-digits": Cell("fedlgd", "--no-ablations", "--domains mnist usps mnistm synthdigits-like", "+4.7"),
}


def main(words: Sequence[str] | None = None) -> None:
    """Run the cells."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--data", help="root of the datasets; default: $DISTILLKIT_DATA")
    add("--cells", nargs="+", choices=CELLS, default=list(CELLS), help="cells to run; default: all")
    add("--seconds", type=int, default=480, help="largest number of seconds of a piece")
    add("--seeds", nargs="+", default=["0"], help="seeds; default: 0")
    add("--device", default="auto", help="where to compute")
    add("--smoke", action="store_true", help="tiny settings on scikit-learn's digits")
    add("--out", type=Path, default=Path("runs/paper-cells"), help="folder of the results")
    o = parser.parse_args(words)
    for name in o.cells:
        while not run_piece(name, o):
            pass


def run_piece(name: str, o: argparse.Namespace) -> bool:
    """Run or continue a cell for at most `--seconds`, and return whether it is finished.

    Raises:
        SystemExit: the script failed.
    """
    cell, began = CELLS[name], time.perf_counter()
    options = ["--preset", "smoke"] if o.smoke else ["--preset", "paper", *cell.paper.split()]
    options += [*cell.always.split(), "--seeds", *o.seeds, "--device", o.device, "--workers", "1"]
    options += ["--seconds", str(o.seconds), "--out", str(o.out / name)]
    options += ["--data", o.data] if o.data and not o.smoke else []
    script = Path(__file__).parent / "papers" / cell.script / "run.py"
    status = subprocess.run([sys.executable, str(script), *options], check=False).returncode
    path = o.out / "seconds.json"
    counted = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    counted[name] = round(counted.get(name, 0) + time.perf_counter() - began, 1)
    write_file(path, json.dumps(counted, indent=1) + "\n")
    if status not in (0, UNFINISHED):
        raise SystemExit(status)
    state = "finished" if status == 0 else "unfinished"
    print(f"{name}: {state} after {counted[name]:.0f} s; the paper's gain is {cell.gain} points.", flush=True)
    return status == 0


if __name__ == "__main__":
    main()
