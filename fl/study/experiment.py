"""A folder of runs: finished ones are not run again, interrupted ones go on, `summary.json` lists them all."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from distillkit.owner import owned
from distillkit.provenance import git_commit
from fl.engine import history
from fl.engine.simulate import simulate
from fl.engine.store import CheckpointError, read_history, write_atomically
from fl.method import Method

__all__ = ["Experiment"]


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
