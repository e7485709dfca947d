"""Run every benchmark in turn, each in a process of its own: `make bench`, or one by name: `-m tests.benchmarks dm`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

here = Path(__file__).parent
wanted = sys.argv[1:] or sorted(p.stem.removeprefix("bench_") for p in here.glob("bench_*.py"))
for name in wanted:
    print(f"== {name}", flush=True)
    subprocess.run([sys.executable, str(here / f"bench_{name}.py")], check=True)
