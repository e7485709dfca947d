"""Kill examples at random moments with SIGKILL (the parent alone), restart them at once, and compare the results.

    python -m tests.kill_examples --kills 10 [--examples quickstart feddm] [--preset smoke] [--out runs/killed]

Each kill comes at most a second after a random number of rounds of all runs together. Histories and models must equal
those of an uninterrupted run, which must leave a summary, a table and two figures. Each kill prints a line with the
time that workers outlived their parent (a worker that is importing torch ends afterwards). The script exits with 1 if
any result differs. During the first run, a second process on its folder must be refused by name.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
FEDERATED = ("quickstart", "feddm", "fedlgd", "vhl", "fedcog", "single_image")
EXAMPLES = [name for name in FEDERATED if (ROOT / "examples" / f"{name}.py").exists()]
TIMES = ("seconds", "client_seconds", "server_seconds")


def start(
    out: Path, *more: str, example: str = "quickstart", preset: str = "smoke", workers: int = 2
) -> subprocess.Popen[str]:
    """Start an example on a folder with captured output."""
    command = [sys.executable, str(ROOT / "examples" / f"{example}.py"), "--preset", preset, "--workers", str(workers)]
    return subprocess.Popen(
        [*command, "--out", str(out), *more],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        encoding="utf-8",
    )


def finish(process: subprocess.Popen[str]) -> str:
    """Wait for a process and return its output.

    Raises:
        AssertionError: it failed.
    """
    said = process.communicate()[0]
    assert process.returncode == 0, said
    return said


def record(out: Path) -> dict[str, Any]:
    """Return everything that must be equal: each run's history without seconds, and its models as bytes."""
    found: dict[str, Any] = {}
    for folder in sorted(p.parent for p in out.rglob("history.jsonl")):
        name = str(folder.relative_to(out))
        rows = [json.loads(line) for line in (folder / "history.jsonl").read_text(encoding="utf-8").splitlines()]
        found[name] = [{k: v for k, v in row.items() if k not in TIMES} for row in rows]
        for model in sorted(folder.glob("checkpoint/model*.safetensors")):
            found[f"{name}/{model.name}"] = model.read_bytes()
    return found


def rounds_of(out: Path) -> int:
    """Return how many rounds the runs in a folder have written so far."""
    return sum(len(path.read_text(encoding="utf-8").splitlines()) for path in out.rglob("history.jsonl"))


def children(pid: int) -> list[int]:
    """Return the child processes of a process (Linux; elsewhere none are known)."""
    path = Path(f"/proc/{pid}/task/{pid}/children")
    return [int(word) for word in path.read_text(encoding="utf-8").split()] if path.exists() else []


def running(pid: int) -> bool:
    """Return whether a process is running (a zombie is not)."""
    path = Path(f"/proc/{pid}/stat")
    return path.exists() and path.read_text(encoding="utf-8").rsplit(")", 1)[1].split()[0] != "Z"


def killed_and_resumed(out: Path, ready: Callable[[], bool], **how: Any) -> tuple[int, float]:
    """Kill a run's parent when `ready()` and resume at once: return rounds so far and seconds until workers ended."""
    first = start(out, **how)
    while not ready() and first.poll() is None:
        time.sleep(0.01)
    assert first.poll() is None, "it ended before it could be killed"
    workers, done, died = children(first.pid), rounds_of(out), time.perf_counter()
    first.send_signal(signal.SIGKILL)
    first.wait()
    second = start(out, **how)
    while any(map(running, workers)):
        time.sleep(0.01)
    lived = time.perf_counter() - died
    finish(second)
    return done, lived


def refused(out: Path, **how: Any) -> str:
    """Return the output of the refused process of two on one folder: the second, or the first at a later study."""
    both = [start(out, **how)]
    while not any(out.rglob(".owner.json")) and both[0].poll() is None:
        time.sleep(0.01)
    both.append(start(out, **how))
    said = [process.communicate()[0] for process in both]
    failed = [i for i, process in enumerate(both) if process.returncode != 0]
    assert len(failed) == 1, "\n".join(said)
    heard, other = said[failed[0]], both[1 - failed[0]]
    assert f"is in use by process {other.pid}" in heard, heard
    return heard.strip().splitlines()[-1]


def count_failures(example: str, kills: int, preset: str, out: Path, moments: random.Random) -> int:
    """Run an example whole, and then killed the given number of times; return the number of different results."""
    began = time.perf_counter()
    print(f"{example}: {refused(out / 'whole', example=example, preset=preset)}", flush=True)
    for pattern, least in (("summary.json", 1), ("table.md", 1), ("*.png", 2)):
        found = len(list((out / "whole").rglob(pattern)))
        assert found >= least, f"{example} left {found} of {pattern}"
    print(f"{example}: whole in {time.perf_counter() - began:.0f} s", flush=True)
    whole, failures = record(out / "whole"), 0
    for i in range(kills):
        place, later = out / str(i), moments.random()
        rounds = moments.randrange(rounds_of(out / "whole"))

        def ready(place: Path = place, rounds: int = rounds, later: float = later) -> bool:
            return rounds_of(place) >= rounds and (time.sleep(later) is None)

        done, lived = killed_and_resumed(place, ready, example=example, preset=preset)
        same = record(place) == whole
        failures += not same
        print(f"kill {i}: after {done} rounds; workers ended in {lived:.2f} s; the same: {same}", flush=True)
    print(f"{example}: {kills - failures} of {kills}, {os.cpu_count()} cores", flush=True)
    return failures


def main() -> int:
    """Run the script as described in the module's docstring."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--examples", nargs="+", choices=EXAMPLES, default=EXAMPLES)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--preset", default="smoke")
    parser.add_argument("--out", type=Path, default=Path("runs/killed"))
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    o = parser.parse_args()
    moments = random.Random(o.seed)
    return int(sum(count_failures(name, o.kills, o.preset, o.out / name, moments) for name in o.examples) > 0)


if __name__ == "__main__":
    sys.exit(main())
