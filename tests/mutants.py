"""Run the planted mistakes of `tests/mutants.toml` one by one, and report those that no named test notices.

Use `make mutants`, or `python -m tests.mutants NAME ...` for some of them. The mistakes are planted in a copy of the
repository, never in this one.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
LIST = Path(__file__).with_suffix(".toml")
COPIED = ("distillkit", "fl", "attacks", "tests", "examples", "docs", "pyproject.toml", "README.md")
SECONDS = 300


def read_list(names: list[str]) -> dict[str, dict[str, Any]]:
    """Return the mutants by name, or those among `names`; every one must match its file exactly once."""
    mutants: dict[str, dict[str, Any]] = tomllib.loads(LIST.read_text(encoding="utf-8"))
    unknown = [name for name in names if name not in mutants]
    if unknown:
        raise SystemExit(f"no mutant is called {unknown[0]!r}")
    for name, mutant in mutants.items():
        found = (ROOT / mutant["file"]).read_text(encoding="utf-8").count(mutant["old"])
        if found != 1:
            raise SystemExit(f"{name}: {mutant['file']} holds the old text {found} times, must be once")
    return {name: mutant for name, mutant in mutants.items() if not names or name in names}


def is_caught(copy: Path, mutant: dict[str, Any]) -> bool:
    """Plant one mistake in the `copy`, run the tests that must notice it, and take the mistake out again."""
    path = copy / mutant["file"]
    text = path.read_text(encoding="utf-8")
    path.write_text(text.replace(mutant["old"], mutant["new"]), encoding="utf-8")
    command = [sys.executable, "-m", "pytest", "-q", "-x", "--no-header", *mutant["tests"]]
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
    try:
        done = subprocess.run(command, cwd=copy, env=environment, capture_output=True, timeout=SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return True
    finally:
        path.write_text(text, encoding="utf-8")
    if done.returncode > 1:
        raise SystemExit(f"{' '.join(command)} did not run:\n{done.stdout.decode(errors='replace')[-2000:]}")
    return done.returncode == 1


def main() -> int:
    """Run the mutants given on the command line, or all; the exit status is 1 if one survives."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="names of mutants; default: all")
    parser.add_argument("--workers", type=int, default=2)
    arguments = parser.parse_args()
    mutants, survivors = read_list(arguments.names), []
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(arguments.workers) as pool:
        copies = [Path(folder) / str(i) for i in range(arguments.workers)]
        for copy in copies:
            copy.mkdir()
            for name in COPIED:
                source = ROOT / name
                if source.is_dir():
                    shutil.copytree(source, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
                else:
                    shutil.copy(source, copy / name)
        free = list(copies)

        def run(name: str) -> tuple[str, bool, float]:
            copy, started = free.pop(), time.monotonic()
            try:
                return name, is_caught(copy, mutants[name]), time.monotonic() - started
            finally:
                free.append(copy)

        for name, caught, seconds in pool.map(run, mutants):
            print(f"{'caught  ' if caught else 'SURVIVED'} {seconds:5.1f} s  {name}", flush=True)
            survivors += [] if caught else [name]
    print(f"{len(mutants) - len(survivors)} of {len(mutants)} mutants caught")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
