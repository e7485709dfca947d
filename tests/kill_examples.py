"""Kill examples at random moments with SIGKILL (the parent alone), restart them at once, and compare the results.

    python -m tests.kill_examples --kills 10 [--examples quickstart feddm] [--preset smoke] [--out runs/killed]
    python -m tests.kill_examples --kills 3 --seconds 5     # one run in pieces of five seconds, killed three times

Each kill comes at most a second after a random number of rounds of all runs together. Histories and models must equal
those of an uninterrupted run, which must leave a summary, a table and two figures. Each kill prints a line with the
time that workers outlived their parent (a worker that is importing torch ends afterwards). The script exits with 1 if
any result differs. Two processes share the first run. With `--seconds`, one run is killed several times, and is
continued in pieces until it is finished.
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

from tests.scripts import EXAMPLES

FEDERATED = ("quickstart", "feddm", "fedlgd", "vhl", "fedcog", "single_image")
LIMIT = 900
"""Seconds after which a process is killed."""

UNFINISHED = 3
"""Exit status of an example that `--seconds` stopped."""

TIMES = ("seconds", "client_seconds", "server_seconds")


def start(
    out: Path, *more: str, example: str = "quickstart", preset: str = "smoke", workers: int = 2,
    seconds: int | None = None,
) -> subprocess.Popen[str]:  # fmt: skip
    """Start an example on a folder with captured output."""
    command = [sys.executable, str(EXAMPLES[example]), "--preset", preset, "--workers", str(workers)]
    command += [] if seconds is None else ["--seconds", str(seconds)]
    return subprocess.Popen(
        [*command, "--out", str(out), *more],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        encoding="utf-8",
    )


def finish(process: subprocess.Popen[str], statuses: tuple[int, ...] = (0,)) -> str:
    """Wait for a process and return its output.

    Raises:
        AssertionError: it failed: its exit status is not one of `statuses`.
        subprocess.TimeoutExpired: it took more than `LIMIT` seconds, and was killed.
    """
    try:
        said = process.communicate(timeout=LIMIT)[0]
    finally:
        process.kill()
    assert process.returncode in statuses, said
    return said


def histories(out: Path) -> list[Path]:
    """Return the histories of all runs in a folder, in which other processes may delete folders meanwhile."""
    return sorted(Path(place, "history.jsonl") for place, _, files in os.walk(out) if "history.jsonl" in files)


def record(out: Path) -> dict[str, Any]:
    """Return everything that must be equal: each run's history without seconds, and its models as bytes."""
    found: dict[str, Any] = {}
    for history in histories(out):
        folder, name = history.parent, str(history.parent.relative_to(out))
        rows = [json.loads(line) for line in history.read_text(encoding="utf-8").splitlines()]
        found[name] = [{k: v for k, v in row.items() if k not in TIMES} for row in rows]
        for model in sorted(folder.glob("checkpoint/model*.safetensors")):
            found[f"{name}/{model.name}"] = model.read_bytes()
    return found


def rounds_of(out: Path) -> int:
    """Return how many rounds the runs in a folder have written so far."""
    return sum(len(path.read_text(encoding="utf-8").splitlines()) for path in histories(out))


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


def killed_in_pieces(out: Path, moments: random.Random, whole: Path, kills: int, **how: Any) -> tuple[list[int], int]:
    """Run an example in pieces, some of which are killed (the parent alone), and continue until it is finished.

    Args:
        out: folder of the run.
        moments: generator of the moments, each at most half a second after a random round before the last quarter.
        whole: folder of an uninterrupted run, for the total number of rounds.
        kills: number of kills.
        how: options of `start`, with `seconds`.

    Returns:
        The number of completed rounds at each kill, and the number of pieces.
    """
    targets = sorted(moments.sample(range(max(kills, 3 * rounds_of(whole) // 4)), kills))
    done, pieces = list[int](), 0
    while True:
        process, pieces = start(out, **how), pieces + 1
        if targets:
            while rounds_of(out) < targets[0] and process.poll() is None:
                time.sleep(0.05)
            time.sleep(moments.random() / 2)
            if process.poll() is None:
                process.kill()
                process.wait()
                targets.pop(0)
                done.append(rounds_of(out))
                continue
        finish(process, (0, UNFINISHED))
        if process.returncode == 0:
            return done, pieces


def shared(out: Path, **how: Any) -> None:
    """Start two processes on one folder, which must share its runs, and wait for both."""
    both = [start(out, **how) for _ in range(2)]
    for process in both:
        finish(process)


def count_failures(
    example: str, kills: int, preset: str, out: Path, moments: random.Random, seconds: int | None = None
) -> int:
    """Run an example whole, and then killed the given number of times; return the number of different results."""
    began = time.perf_counter()
    shared(out / "whole", example=example, preset=preset)
    for pattern, least in (("summary.json", 1), ("table.md", 1), ("*.png", 2)):
        found = len(list((out / "whole").rglob(pattern)))
        assert found >= least, f"{example} left {found} of {pattern}"
    print(f"{example}: whole in {time.perf_counter() - began:.0f} s", flush=True)
    whole, failures = record(out / "whole"), 0
    if seconds is not None:
        how: dict[str, Any] = {"example": example, "preset": preset, "seconds": seconds}
        killed, pieces = killed_in_pieces(out / "pieces", moments, out / "whole", kills, **how)
        same = record(out / "pieces") == whole
        print(f"{example}: killed after {killed} rounds, finished in {pieces} pieces; the same: {same}", flush=True)
        return int(not same or len(killed) < kills)
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
    parser.add_argument("--examples", nargs="+", choices=FEDERATED, default=FEDERATED)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--preset", default="smoke")
    parser.add_argument("--out", type=Path, default=Path("runs/killed"))
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    parser.add_argument("--seconds", type=int, default=None, help="kill one run --kills times, in pieces of this time")
    o = parser.parse_args()
    moments = random.Random(o.seed)
    failed = [count_failures(name, o.kills, o.preset, o.out / name, moments, o.seconds) for name in o.examples]
    return int(sum(failed) > 0)


if __name__ == "__main__":
    sys.exit(main())
