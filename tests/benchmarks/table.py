"""One table: each row ours beside the straightforward way and beside the convolutions alone, measured in turn.

    make bench                                                     python -m tests.benchmarks
    python -m tests.benchmarks --out docs/results/benchmarks.jsonl --only "DM step"

Every row is a process of its own, alone on the machine. Before a time is taken, both sides are held against each other,
in float64 at a small size and in float32 at the measured one, and a difference ends the program.
"""

from __future__ import annotations

import argparse
import datetime
import json
import multiprocessing
import os
import platform
import shlex
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch

from distillkit.provenance import git_commit
from tests.benchmarks import growth, show
from tests.benchmarks.race import Result, measured
from tests.benchmarks.rows import ROWS
from tests.benchmarks.sizes import FULL, TINY

NAMES = [*(row.name for row in ROWS), *growth.NAMES]


def line(number: int, tiny: bool, seconds: float) -> Result:
    """The line of that number, measured in this process."""
    torch.set_num_threads(1)
    if number < len(ROWS):
        return measured(ROWS[number], TINY if tiny else FULL, TINY, seconds)
    return growth.line(NAMES[number], tiny=tiny, repeats=1 if tiny else 3)


def apart(work: Callable[..., Result], *arguments: Any) -> Result:
    """The same from a process of its own, which is started for it."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as one:
        return one.submit(work, *arguments).result()


def processor() -> str:
    """Its name, as the system calls it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def main(arguments: Sequence[str] | None = None) -> list[Result]:
    """Measure, print, and keep what was asked for."""
    parser = argparse.ArgumentParser(
        "python -m tests.benchmarks", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="a file for the record, a line of JSON a row")
    parser.add_argument("--only", action="append", help="rows whose names have these words in them")
    parser.add_argument("--seconds", type=float, default=10.0, help="about how long a row is measured")
    parser.add_argument("--tiny", action="store_true", help="only that everything runs: times of no use, none kept")
    parser.add_argument("--here", action="store_true", help="in this process: memory is that of what ran before too")
    o = parser.parse_args(arguments)
    wanted = [n for n, name in enumerate(NAMES) if not o.only or any(words in name for words in o.only)]
    if not wanted:
        parser.error(f"--only must be part of one of {', '.join(NAMES)}, got {', '.join(o.only)}")
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler's own log
    words = sys.argv[1:] if arguments is None else arguments
    facts = {
        "command": shlex.join(["python", "-m", "tests.benchmarks", *words]),
        "commit": git_commit(), "torch": str(torch.__version__), "python": platform.python_version(),
        "processor": processor(), "cores": os.cpu_count(), "tiny": o.tiny, "when": f"{datetime.date.today():%Y-%m-%d}",
    }  # fmt: skip
    found: list[Result] = []
    for position, number in enumerate(wanted):
        print(f"{position + 1} of {len(wanted)}: {NAMES[number]}", file=sys.stderr, flush=True)
        run = line if o.here else lambda *given: apart(line, *given)
        found.append(run(number, o.tiny, o.seconds) | facts)
        if o.out:
            o.out.write_text("".join(f"{json.dumps(own)}\n" for own in found))
    print(show.tables(found))
    if missed := show.missed(found):
        print(f"\nBeside their targets: {', '.join(missed)}.")
    return found
