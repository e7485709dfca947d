"""A folder of runs: finished ones are not run again, interrupted ones go on, `summary.json` lists them all."""

from __future__ import annotations

import json
import statistics
import subprocess
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import AbstractContextManager
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from distillkit.owner import end_with_parent, owned
from fl.engine import history
from fl.engine.simulate import simulate
from fl.engine.store import CheckpointError, read_history, write_atomically
from fl.method import Method

__all__ = ["Experiment", "git_commit", "mean_std", "processes", "show", "spark"]


def git_commit(folder: Path | None = None) -> str | None:
    """The commit of the working tree, with `+` if it was changed; None outside a repository.

    Args:
        folder: inside of the repository; default: where this file is.
    """

    def git(*words: str) -> str:
        where = folder or Path(__file__).parent
        return subprocess.run(["git", *words], cwd=where, capture_output=True, text=True, check=True).stdout.strip()

    try:
        commit, changed = git("rev-parse", "--short=12", "HEAD"), git("status", "--porcelain", "--untracked-files=no")
    except (OSError, subprocess.CalledProcessError):
        return None
    return commit + ("+" if changed else "")


def processes(count: int) -> ProcessPoolExecutor:
    """A pool of worker processes that end with this one, also when it is killed.

    (One that is killed while it starts ends when its imports are done; it has begun nothing by then.)

    Args:
        count: how many.
    """
    return ProcessPoolExecutor(count, mp_context=get_context("spawn"), initializer=end_with_parent)


class Experiment:
    """Runs methods into one folder, one sub-folder a run, and lists them in `summary.json`.

    A run that is finished there is not run again, so that a script may be started as often as it takes.

    Args:
        out: the folder.
        resume: go on with a run that was interrupted; without it such a run is refused.
        device: "auto", "cpu" or "cuda".
        workers: threads that run clients.
    """

    def __init__(self, out: Path, *, resume: bool = False, device: str = "auto", workers: int = 1) -> None:
        import torch

        self.out, self.resume, self.workers = out, resume, workers
        self.device = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
        self.rows: dict[str, list[dict[str, Any]]] = {}
        self._commit = git_commit()

    def owned(self) -> AbstractContextManager[None]:
        """Be the only process that fills this folder, for the length of a `with` block; its workers may too.

        Raises:
            distillkit.owner.InUse: another process does; it is named.
        """
        return owned(self.out / ".owner.lock", f"the experiment in {self.out}")

    def summary(self) -> list[dict[str, Any]]:
        """The lines of the runs finished so far in this folder, in the order of their names."""
        found: dict[str, dict[str, Any]] = {}
        for path in sorted(self.out.glob("*/summary.json")):
            try:
                line = json.loads(path.read_text())
            except json.JSONDecodeError as error:
                raise CheckpointError(f"{path} is damaged: {error}") from error
            found[line["run"]] = line
        return list(found.values())

    def run(
        self, name: str, make: Callable[[], Method], clients: Sequence[Any], *, facts: dict[str, Any], **simulation: Any
    ) -> dict[str, Any]:
        """Run one method under `out/name` unless it is finished there; return its line of the summary.

        Args:
            name: of the run and of its folder.
            make: builds the method.
            clients: as for `simulate`.
            facts: method, task, split, seed: what tells this run from the others.
            simulation: the other arguments of `simulate`.
        """
        folder = self.out / name
        done = {line["run"]: line for line in self.summary()}.get(name)
        if done is not None:
            self.rows[name] = read_history(folder / "history.jsonl")
            if done["rounds"] != simulation["rounds"]:
                raise ValueError(
                    f"rounds must be {done['rounds']}, as the run in {folder} has, got {simulation['rounds']}; "
                    "give another folder (--out)"
                )
            return done
        options = {"workers": self.workers, "device": self.device, "seed": facts["seed"], "resume": self.resume}
        run = simulate(make(), clients, out=folder, **{**options, **simulation})
        self.rows[name] = run.rows
        line = history.summary(run.rows, run=name, **facts, commit=self._commit)
        # Each run writes its own line first, so that processes that share the folder lose none.
        write_atomically(folder / "summary.json", (json.dumps(line, indent=1) + "\n").encode())
        write_atomically(self.out / "summary.json", (json.dumps(self.summary(), indent=1) + "\n").encode())
        return line


def mean_std(values: Sequence[float], scale: float = 1.0, digits: int = 1) -> str:
    """Mean and standard deviation over seeds (n - 1), as text "91.2 ± 0.4"; one value has no deviation.

    Args:
        values: one a seed.
        scale: factor for all of them: 100 for fractions in per cent.
        digits: behind the point.
    """
    scaled = [scale * v for v in values]
    spread = f" ± {statistics.stdev(scaled):.{digits}f}" if len(scaled) > 1 else ""
    return f"{statistics.mean(scaled):.{digits}f}{spread}"


def spark(accuracies: Sequence[float]) -> str:
    """A curve of `accuracies` in [0, 1] as one line of blocks, for a terminal."""
    return "".join("▁▂▃▄▅▆▇█"[min(7, max(0, int(8 * a)))] for a in accuracies)


def show(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table whose columns line up in a terminal too; the first column left, the others right.

    Args:
        header: the columns' names.
        rows: the cells, as many in each row as there are names.
    """
    widths = [max(len(r[i]) for r in [header, *rows]) for i in range(len(header))]

    def line(cells: Sequence[str]) -> str:
        first, *rest = (c.ljust(w) if i == 0 else c.rjust(w) for i, (c, w) in enumerate(zip(cells, widths)))
        return f"| {' | '.join([first, *rest])} |"

    rule = ["-" * w if i == 0 else "-" * (w - 1) + ":" for i, w in enumerate(widths)]
    return "\n".join([line(header), line(rule), *map(line, rows)])
