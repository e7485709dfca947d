"""Candidates that run a federated method."""

from __future__ import annotations

import inspect
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from distillkit.privacy import Ledger
from distillkit.study._execution import privacy_columns
from distillkit.study.candidate import Candidate, Cost, Job
from distillkit.study.task import Allocation
from fl.deploy.loopback import Loopback
from fl.engine import RunFolder, history
from fl.engine._backends import Backend
from fl.engine._clients import ClientData
from fl.engine.run import Run
from fl.engine.simulate import simulate
from fl.method import Method, NoUsableReply, require_method
from fl.study._outcome_hash import outcome_hash
from fl.task import Classification, MultiLabel

__all__ = ["Federated", "client_data"]


@dataclass(frozen=True)
class Federated(Candidate):
    """Candidate that runs a federated method: `Federated(FedAvg, search=grid(lr=[0.03, 0.1]))`.

    `make` is called with `factory` and the settings, and returns the method. A setting called `rounds` replaces the
    task's number of rounds. This setting is passed to `make` only if `make` has an argument `rounds`.

    The summary has the columns of `fl.history.summary`, and `accuracy_own`, the mean accuracy over clients on their own
    tests (of personal models if there are any). For a private method it also has the privacy columns of `Condense`.

    Args:
        make, search, settings, like: arguments of `Candidate`.
        transcript: whether to keep the rounds' messages, for attacks; see `fl.simulate`.
        delta: delta of the ledger of a private method (`ledger.jsonl` in the run's folder).
        backend: backend that runs the clients, see `fl.simulate`.
    """

    transcript: bool = False
    delta: float = 1e-5
    backend: Backend | Literal["threads"] = "threads"

    old_options: ClassVar[Mapping[str, str]] = {**Candidate.old_options, "backend": "where"}
    failures: ClassVar[tuple[type[Exception], ...]] = (FloatingPointError, NoUsableReply)

    def __post_init__(self) -> None:
        super().__post_init__()
        if str(self.backend) == "loopback":  # in records of studies; `fl.Loopback()` today
            object.__setattr__(self, "backend", Loopback())

    def passes_to_make(self, name: str) -> bool:
        """Return whether the setting `name` is passed to `make`; `rounds` is passed only if `make` accepts it."""
        return name != "rounds" or (self.make is not None and name in inspect.signature(self.make).parameters)

    def run(self, built: Method, job: Job) -> dict[str, Any]:
        """Run the method, or resume an interrupted run."""
        ledger = Ledger(job.folder / "ledger.jsonl", delta=self.delta) if require_method(built).private else None
        rounds = self._rounds(job)

        def stop_if_late(row: Mapping[str, Any]) -> None:
            if row["round"] < rounds:
                job.stop_if_late()

        run = self._simulate(
            built, job, rounds=rounds, ledger=ledger, resume=True, on_round=stop_if_late,
            out=RunFolder(job.folder, transcript=self.transcript, notes=job.notes),
        )  # fmt: skip
        last = run.rows[-1]
        own = last.get("accuracy_personal") or last.get("accuracy_clients") or {}
        private = {} if ledger is None else privacy_columns(ledger)
        return {**history.summary(run.rows), **private, "accuracy_own": own.get("mean"), "hash": outcome_hash(run)}

    def trial(self, built: Method, job: Job) -> Cost:
        """Run up to two rounds to estimate the cost: the second round predicts the cost of all later rounds."""
        rounds = self._rounds(job)
        began = time.perf_counter()
        ledger = Ledger(None, delta=self.delta) if require_method(built).private else None
        rows = self._simulate(built, job, rounds=min(2, rounds), ledger=ledger).rows
        seconds, further = time.perf_counter() - began, rounds - len(rows)
        up, down = (sum(row[k] for row in rows) + further * rows[-1][k] for k in ("bytes_up", "bytes_down"))
        return Cost(seconds + further * rows[-1]["seconds"], up, down)

    def _rounds(self, job: Job) -> int:
        return int(job.settings.get("rounds", job.task.rounds))

    def _simulate(self, built: Method, job: Job, **arguments: Any) -> Run:
        seed = job.seed if job.partition_seed is None else job.partition_seed
        allocation = job.task.assign(job.split, seed, validation=job.validation, keep=job.keep)
        train = job.split.train
        return simulate(
            built,
            client_data(allocation),
            task=MultiLabel(train.num_classes) if train.labels.ndim == 2 else Classification(train.num_classes),
            test=allocation.test,
            server_data=allocation.server,
            participation=job.task.participation,
            evaluate=job.task.evaluate,
            seed=job.seed,
            backend=self.backend,
            workers=job.workers,
            device=job.device,
            progress=job.progress,
            **arguments,
        )


def client_data(allocation: Allocation) -> list[ClientData]:
    """Return the clients for `simulate`. Stored images are read when a client needs them.

    Args:
        allocation: allocation of a task's images, from `Task.assign`.
    """
    return [ClientData(*sets) for sets in zip(allocation.clients, allocation.own_tests, strict=True)]
