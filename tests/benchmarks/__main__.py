"""Benchmark table (`make bench`), or long programs by name: `python -m tests.benchmarks folder stored`.

Options are the table's (`--help`), or go to the programs that are named.
"""

from __future__ import annotations

import subprocess
import sys
from itertools import takewhile
from pathlib import Path

if __name__ == "__main__":
    named = list(takewhile(lambda word: not word.startswith("-"), sys.argv[1:]))
    if named:
        for name in named:
            print(f"== {name}", flush=True)
            program = Path(__file__).parent / f"bench_{name}.py"
            if not program.exists():
                known = ", ".join(sorted(p.stem.removeprefix("bench_") for p in program.parent.glob("bench_*.py")))
                raise SystemExit(f"no program is called {name}; there are {known}")
            subprocess.run(
                [sys.executable, "-m", f"tests.benchmarks.bench_{name}", *sys.argv[1 + len(named) :]], check=True
            )
    else:
        from tests.benchmarks.table import main

        main()
