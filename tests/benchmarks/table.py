"""Benchmark table: each row compares our code with the straightforward implementation and with its convolutions alone.

    make bench                                                     python -m tests.benchmarks
    python -m tests.benchmarks --out docs/results/benchmarks.jsonl --only "DM step"

Every row is a process of its own, alone on the machine. Before timing, the results of both sides are compared. If they
differ in float64 at a small size, there is no row. If they differ in float32 at the measured size, the table says so.

The record is written after every row. Rows of the same code and machine are not measured again, so a killed run
continues where it stopped. If a row fails, the other rows are still measured, and the program exits with status 1.
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import json
import multiprocessing
import os
import platform
import shlex
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch

from distillkit._utils.files import write_atomically
from distillkit._utils.provenance import git_commit
from tests.benchmarks import growth, show
from tests.benchmarks.race import Result, measured
from tests.benchmarks.rows import ROWS
from tests.benchmarks.sizes import FULL, TINY

NAMES = [*(row.name for row in ROWS), *growth.NAMES]
SAME = ("code", "torch", "python", "processor", "cores", "tiny")
"""What must be as it was for a row to stand."""


def line(number: int, tiny: bool, seconds: float) -> Result:
    """Measure one line in this process."""
    torch.set_num_threads(1)
    if number < len(ROWS):
        return measured(ROWS[number], TINY if tiny else FULL, TINY, seconds)
    return growth.line(NAMES[number], tiny=tiny, repeats=1 if tiny else 3)


def apart(work: Callable[..., Result], *arguments: Any) -> Result:
    """Call a function in a new process."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as one:
        return one.submit(work, *arguments).result()


def code() -> str:
    """Return a hash of the sources that a row runs."""
    root = Path(__file__).parents[2]
    files = sorted(p for part in ("distillkit", "fl", "tests/benchmarks") for p in (root / part).rglob("*.py"))
    text = b"".join(f"{p.relative_to(root)}\n".encode() + p.read_bytes() for p in files)
    return hashlib.sha256(text).hexdigest()[:16]


def processor() -> str:
    """Return the processor's name as the system reports it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def known(path: Path | None, facts: dict[str, Any], seconds: float) -> dict[str, Result]:
    """Return the rows of a record that need no new measurement, by name: same code, machine, sizes and length."""
    wanted = {name: facts[name] for name in SAME} | {"asked": seconds}
    lines = show.read(path) if path is not None else []
    return {show.name(line): line for line in lines if wanted.items() <= line.items()}


def main(arguments: Sequence[str] | None = None) -> list[Result]:
    """Measure, print and write what was requested."""
    parser = argparse.ArgumentParser(
        "python -m tests.benchmarks", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="a file for the record, a line of JSON a row")
    parser.add_argument("--only", action="append", help="rows whose names have these words in them")
    parser.add_argument("--seconds", type=float, default=8.0, help="about how long a row is measured")
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
        "commit": git_commit(), "code": code(), "torch": str(torch.__version__), "python": platform.python_version(),
        "processor": processor(), "cores": os.cpu_count(), "tiny": o.tiny, "when": f"{datetime.date.today():%Y-%m-%d}",
    }  # fmt: skip
    held, failed, begun = known(o.out, facts, o.seconds), list[str](), time.perf_counter()
    for position, number in enumerate(wanted):
        name = NAMES[number]
        if name in held:
            continue
        start, run = time.perf_counter(), line if o.here else partial(apart, line)
        print(f"{position + 1} of {len(wanted)}, after {start - begun:.0f} s: {name}", file=sys.stderr, flush=True)
        try:
            made = run(number, o.tiny, o.seconds)
        except Exception:  # among them a process that the system killed
            traceback.print_exc()
            failed.append(name)
            continue
        held[name] = made | facts | {"asked": o.seconds, "took": time.perf_counter() - start}
        if o.out:
            write_atomically(o.out, "".join(f"{json.dumps(held[name])}\n" for name in NAMES if name in held))
    found = [held[NAMES[number]] for number in wanted if NAMES[number] in held]
    print(show.tables(found))
    if missed := show.missed(found):
        print(f"\nBeside their targets: {', '.join(missed)}.")
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}; the same command measures what is missing")
    return found
