"""Run the planted mistakes of `tests/mutants.toml` one by one, and report those that no named test notices.

Use `make mutants`, or `python -m tests.mutants NAME ...` for some of them. The mistakes are planted in a copy of the
repository, never in this one. With `--log FILE` every result is appended to a file, and an interrupted run continues.
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
    """Return the mutants by name, or those among `names`."""
    mutants: dict[str, dict[str, Any]] = tomllib.loads(LIST.read_text(encoding="utf-8"))
    unknown = [name for name in names if name not in mutants]
    if unknown:
        raise SystemExit(f"no mutant is called {unknown[0]!r}")
    return {name: mutant for name, mutant in mutants.items() if not names or name in names}


def is_current(mutant: dict[str, Any]) -> bool:
    """Return whether the correct text still stands in its file exactly once, so that the mistake can be planted."""
    path = ROOT / mutant["file"]
    return path.is_file() and path.read_text(encoding="utf-8").count(mutant["old"]) == 1


def outcome(copy: Path, mutant: dict[str, Any]) -> str:
    """Plant one mistake in the `copy`, run the tests that must notice it, and take the mistake out again."""
    path = copy / mutant["file"]
    text = path.read_text(encoding="utf-8")
    path.write_text(text.replace(mutant["old"], mutant["new"]), encoding="utf-8")
    marks = ["-m", "slow or not slow"] if mutant.get("slow") else []
    command = [sys.executable, "-m", "pytest", "-q", "-x", "--no-header", *marks, *mutant["tests"]]
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
    try:
        done = subprocess.run(command, cwd=copy, env=environment, capture_output=True, timeout=SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return "caught"
    finally:
        path.write_text(text, encoding="utf-8")
    if done.returncode > 1:
        print(f"{' '.join(command)} did not run:\n{done.stdout.decode(errors='replace')[-2000:]}")
    return {0: "SURVIVED", 1: "caught"}.get(done.returncode, "BROKEN")


def main() -> int:
    """Run the mutants given on the command line, or all; the exit status is 1 if one survives or cannot be planted."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="names of mutants; default: all")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--log", type=Path, help="file of results; mutants that it lists as caught are not run again")
    arguments = parser.parse_args()
    mutants, log = read_list(arguments.names), arguments.log
    lines = log.read_text(encoding="utf-8").splitlines() if log is not None and log.exists() else []
    done = {line.split()[-1] for line in lines if line.startswith("caught")}
    results = {name: "caught" if name in done else "" if is_current(one) else "STALE" for name, one in mutants.items()}

    def report(name: str, seconds: float) -> None:
        line = f"{results[name]:8} {seconds:5.1f} s  {name}"
        print(line, flush=True)
        if log is not None:
            with log.open("a", encoding="utf-8") as file:
                file.write(line + "\n")

    for name, result in results.items():
        if result == "STALE":
            report(name, 0.0)
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

        def run(name: str) -> tuple[str, str, float]:
            copy, started = free.pop(), time.monotonic()
            try:
                return name, outcome(copy, mutants[name]), time.monotonic() - started
            finally:
                free.append(copy)

        for name, result, seconds in pool.map(run, [name for name, known in results.items() if not known]):
            results[name] = result
            report(name, seconds)
    missed = [name for name, result in results.items() if result != "caught"]
    explained = [name for name in missed if results[name] == "SURVIVED" and "why" in mutants[name]]
    print(f"{len(mutants) - len(missed)} of {len(mutants)} mutants caught; {len(explained)} survivors are explained")
    return 1 if len(missed) > len(explained) else 0


if __name__ == "__main__":
    sys.exit(main())
