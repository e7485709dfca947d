"""Ways that make a small set, and judge it by the networks that are trained on it."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from distillkit.condense import Progress, save_state
from distillkit.data import Split
from distillkit.evaluate import evaluate
from distillkit.fingerprint import set_fingerprint, tensor_fingerprint
from distillkit.rng import derive
from distillkit.sets import LabeledImages
from distillkit.study.config import write_config
from distillkit.study.task import Task
from distillkit.study.way import Cost, Job, Way, accepted
from distillkit.training import CLASSIC, Protocol

__all__ = ["Condense"]

_SAVED_EVERY = 60.0
"""Seconds between two states of a condenser that is at work."""

_TRIAL_STEPS = 3


class _Enough(Exception):
    """A trial has seen as many steps as it wanted."""


@dataclass(frozen=True)
class Condense(Way):
    """A way that makes a small set of a task's training images; networks trained on it alone are tested.

    `make` gives a function of the real images: `lambda factory, steps: partial(distribution_matching,
    networks=RandomNetworks(factory), ipc=10, steps=steps)`. Here `factory` takes no argument, as condensers want it.
    The function is called with the real images, and with those of `generator`, `resume`, `callback`, `ledger` and
    `progress` that it knows; it returns a `LabeledImages`. One that knows `callback` and `resume` goes on where it was
    interrupted.

    Its line has the mean `accuracy_last` over the networks, their `accuracies`, `images`, `seconds_condense`,
    `seconds_test`, and where a ledger was charged `epsilon`.

    Args:
        make, tries, settings, like: see `Way`.
        draws: networks trained on each set.
        protocol: how they are trained.
        delta: of the ledger that a private condenser charges (`ledger.jsonl` in the run's folder).
        threads: intra-op threads on the CPU; part of the result (rounding).
    """

    draws: int = 3
    protocol: Protocol = CLASSIC
    delta: float = 1e-5
    threads: int = 1

    def factory(self, task: Task, split: Split) -> Callable[..., Any]:
        """A function without arguments that gives a network of the task, with an output a class.

        Args:
            task, split: the task and its images.
        """
        return partial(task.network(split), split.train.num_classes)

    def run(self, made: Any, job: Job) -> dict[str, Any]:
        """Make the set (unless it lies there), save it, train networks on it and test them."""
        with intra_op_threads(self.threads):
            return self._run(made, job)

    def _run(self, made: Any, job: Job) -> dict[str, Any]:
        began, path = time.perf_counter(), job.folder / "set.safetensors"
        real, test = self._real(job)
        ledger = self._ledger(made, job)
        if path.exists():
            found = LabeledImages.load(path).to(job.device)
        else:
            write_config(made, job)
            found = self._condensed(made, real, job, ledger)
            found.save(path)
        condensed = time.perf_counter() - began
        network, seed = self.factory(job.task, job.split), derive(job.seed, "evaluate")
        rows = evaluate(
            found, test, network, draws=self.draws, protocol=self.protocol, generator=seed, progress=job.progress
        ).rows
        accuracies = list(rows[0].accuracies)
        (job.folder / "state.safetensors").unlink(missing_ok=True)
        return {
            "rounds": None, "accuracy_last": rows[0].mean, "accuracy_std": rows[0].std, "accuracies": accuracies,
            "images": len(found), "seconds_condense": condensed, "seconds_test": rows[0].seconds,
            "seconds": time.perf_counter() - began, "epsilon": None if ledger is None else ledger.epsilon(),
            "hash": tensor_fingerprint([set_fingerprint(found.to("cpu")), json.dumps(accuracies)]),
        }  # fmt: skip

    def trial(self, made: Any, job: Job) -> Cost:
        """Some steps of the making and one short training, and what the whole would take at that pace."""
        with intra_op_threads(self.threads):
            return self._trial(made, job)

    def _trial(self, made: Any, job: Job) -> Cost:
        real, test = self._real(job)
        began, paces = time.perf_counter(), list[tuple[float, int]]()

        def callback(progress: Progress) -> None:
            paces.append((time.perf_counter(), progress.steps))
            if len(paces) > min(_TRIAL_STEPS, progress.steps - 1):
                raise _Enough

        found: LabeledImages | None = None
        try:
            arguments = accepted(made, generator=derive(job.seed, "trial"), callback=callback, progress=False)
            found = made(real, **arguments, **accepted(made, ledger=self._ledger(made, job)))
        except _Enough:
            pass
        seconds = time.perf_counter() - began
        if found is None:
            (first, steps), (last, _) = paces[0], paces[-1]
            seconds = first - began + (last - first) / max(1, len(paces) - 1) * (steps - 1)
        sample = found if found is not None else real[: 10 * real.num_classes]
        short = Protocol(epochs=1, batch=self.protocol.batch, augment=self.protocol.augment)
        network = self.factory(job.task, job.split)
        row = evaluate(sample, test, network, draws=1, protocol=short, progress=False).rows[0]
        return Cost(seconds + row.seconds * self.draws * (self.protocol.epochs + 1) / 2)

    def _real(self, job: Job) -> tuple[LabeledImages, LabeledImages]:
        real, test = job.task.pooled(job.split, validation=job.validation, keep=job.keep)
        return real.to(job.device), test.to(job.device)

    def _ledger(self, made: Any, job: Job) -> Any:
        if not accepted(made, ledger=None):
            return None
        from distillkit.privacy import Ledger

        return Ledger(job.folder / "ledger.jsonl", delta=self.delta)

    def _condensed(self, made: Any, real: LabeledImages, job: Job, ledger: Any) -> LabeledImages:
        state, last = job.folder / "state.safetensors", time.monotonic()

        def callback(progress: Progress) -> None:
            nonlocal last
            if time.monotonic() - last >= _SAVED_EVERY:
                save_state(state, progress.state())
                last = time.monotonic()

        offered = {"generator": derive(job.seed, "condense"), "callback": callback, "ledger": ledger}
        resume = state if state.exists() else None
        found = made(real, **accepted(made, **offered, resume=resume, progress=job.progress))
        if not isinstance(found, LabeledImages):
            raise TypeError(f"what make gives must return a LabeledImages, got {type(found).__name__}")
        return found


@contextmanager
def intra_op_threads(count: int) -> Iterator[None]:
    """So many intra-op threads in this thread of the program, for the length of a `with` block.

    Args:
        count: how many.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
