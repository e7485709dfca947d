"""Ways that run a federated method."""

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
    """A way of a study that runs a federated method: `Federated(FedAvg, search=grid(lr=[0.03, 0.1]))`.

    `make` is called with `factory` and the settings and gives the method. A setting called `rounds` is the run's number
    of rounds in place of the task's; `make` gets it too if it has an argument of that name.

    Its line has the columns of `fl.history.summary`, and `accuracy_own`: the mean over clients on their own tests, of
    personal models where there are some; of a private method the columns of
    `Condense` too.

    Args:
        make, search, settings, like: see `Candidate`.
        transcript: keep the rounds' messages, for the attacks; see `fl.simulate`.
        delta: of the ledger of a private method (`ledger.jsonl` in the run's folder).
        backend: where clients run, see `fl.simulate`.
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
        """Whether the setting of this `name` is handed to `make`: all but `rounds`, unless `make` knows it."""
        return name != "rounds" or (self.make is not None and name in inspect.signature(self.make).parameters)

    def run(self, made: Method, job: Job) -> dict[str, Any]:
        """Run the method, or go on with it."""
        ledger = Ledger(job.folder / "ledger.jsonl", delta=self.delta) if require_method(made).private else None
        run = self._simulated(
            made, job, rounds=self._rounds(job), ledger=ledger, resume=True,
            out=RunFolder(job.folder, transcript=self.transcript, notes=job.notes),
        )  # fmt: skip
        last = run.rows[-1]
        own = last.get("accuracy_personal") or last.get("accuracy_clients") or {}
        private = {} if ledger is None else privacy_columns(ledger)
        return {**history.summary(run.rows), **private, "accuracy_own": own.get("mean"), "hash": outcome_hash(run)}

    def trial(self, made: Method, job: Job) -> Cost:
        """One round, or two where there are more: the second tells what all further ones take."""
        rounds = self._rounds(job)
        began = time.perf_counter()
        ledger = Ledger(None, delta=self.delta) if require_method(made).private else None
        rows = self._simulated(made, job, rounds=min(2, rounds), ledger=ledger).rows
        seconds, further = time.perf_counter() - began, rounds - len(rows)
        up, down = (sum(row[k] for row in rows) + further * rows[-1][k] for k in ("bytes_up", "bytes_down"))
        return Cost(seconds + further * rows[-1]["seconds"], up, down)

    def _rounds(self, job: Job) -> int:
        return int(job.settings.get("rounds", job.task.rounds))

    def _simulated(self, made: Method, job: Job, **arguments: Any) -> Run:
        seed = job.seed if job.partition_seed is None else job.partition_seed
        dealt = job.task.assign(job.split, seed, validation=job.validation, keep=job.keep)
        train = job.split.train
        return simulate(
            made,
            client_data(dealt),
            task=MultiLabel(train.num_classes) if train.labels.ndim == 2 else Classification(train.num_classes),
            test=dealt.test,
            server_data=dealt.server,
            participation=job.task.participation,
            evaluate=job.task.evaluate,
            seed=job.seed,
            backend=self.backend,
            workers=job.workers,
            device=job.device,
            progress=job.progress,
            **arguments,
        )


def client_data(dealt: Allocation) -> list[ClientData]:
    """What `simulate` takes as its clients; images that lie in a file are read when their client is asked.

    Args:
        dealt: as a task deals.
    """
    return [ClientData(*sets) for sets in zip(dealt.clients, dealt.own_tests, strict=True)]
