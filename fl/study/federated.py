"""Candidates of a study that run a federated method."""

from __future__ import annotations

import inspect
import time
from dataclasses import dataclass
from typing import Any, ClassVar

from distillkit._utils.options import Share
from distillkit.privacy import Ledger
from distillkit.study._execution import privacy_columns
from distillkit.study.candidate import Candidate, Cost, Job, OutOfTime
from distillkit.study.task import Allocation
from fl.engine import RunFolder, history
from fl.engine._clients import ClientData
from fl.engine.run import Run
from fl.engine.simulate import simulate
from fl.method import Method, NoUsableReply, require_method
from fl.participants import Interrupted
from fl.study.saved_run import outcome_hash
from fl.task import Classification, MultiLabel


@dataclass(frozen=True)
class Federated(Candidate):
    """Candidate of a study that runs a federated method: `Federated(FedAvg, search=grid(lr=[0.03, 0.1]))`.

    `make` is a class or function that returns the method. It is called with the task's network factory, `factory`, and
    with the settings of one configuration in `search`, by name. A setting called `rounds` replaces the task's number of
    rounds. It is passed to `make` only if `make` has an argument of that name.

    The summary of a run has the columns of `fl.history.summary`, and `accuracy_own`, the clients' mean accuracy on
    their own test images (of the personal models if there are any). For a private method, the summary also states the
    privacy guarantee, in columns such as `epsilon` and `delta`.

    Args:
        make, search, settings, like: arguments of `Candidate`.
        transcript: whether to save the messages of all rounds, for attacks; see `fl.RunFolder`.
        delta: delta at which the epsilon of a private method is computed. The run's ledger is the file `ledger.jsonl`
            in the run's folder.
    """

    transcript: bool = False
    delta: Share = 1e-5

    needs_own_tests: ClassVar[bool] = True
    failures: ClassVar[tuple[type[Exception], ...]] = (FloatingPointError, NoUsableReply)

    def passes_to_make(self, name: str) -> bool:
        """Return whether the setting `name` is passed to `make`, the function that builds the method.

        This is true for every setting, except for `rounds` if `make` has no argument of this name.
        """
        return name != "rounds" or (self.make is not None and name in inspect.signature(self.make).parameters)

    def run(self, built: Method, job: Job) -> dict[str, Any]:
        """Run the method, or resume its interrupted run, and return the summary.

        Args:
            built: the method that `make` returned.
            job: task, seed and folder of the run.
        """
        ledger = Ledger(job.folder / "ledger.jsonl", delta=self.delta) if require_method(built).private else None
        out = RunFolder(job.folder, self.transcript, job.notes, deadline=job.deadline, cache=job.cache)
        try:
            run = self._simulate(built, job, rounds=self._rounds(job), ledger=ledger, resume=True, out=out)
        except Interrupted as error:
            raise OutOfTime(f"{job.run}: {error}") from error
        last = run.rows[-1]
        own = last.get("accuracy_personal") or last.get("accuracy_clients") or {}
        private = {} if ledger is None else privacy_columns(ledger)
        return {**history.summary(run.rows), **private, "accuracy_own": own.get("mean"), "hash": outcome_hash(run)}

    def trial(self, built: Method, job: Job) -> Cost:
        """Run at most two rounds, and estimate the cost of the whole run.

        The second round's cost is the estimate for all later rounds, because the first round includes one-time costs.

        Args:
            built: the method that `make` returned.
            job: task, seed and folder of the run.
        """
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
            workers=job.workers,
            device=job.device,
            progress=job.progress,
            **arguments,
        )


def client_data(allocation: Allocation) -> list[ClientData]:
    """Return the argument `clients` of `simulate` for a study's allocation of images to clients.

    Args:
        allocation: each client's training and test images, from `Task.assign`. A `StoredImages` is passed on without
            reading its file.
    """
    return [ClientData(*sets) for sets in zip(allocation.clients, allocation.own_tests, strict=True)]
