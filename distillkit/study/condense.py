"""Ways that make a small set, and judge it by the networks that are trained on it."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import nn

from distillkit._utils import check
from distillkit.condense import Progress, save_state
from distillkit.data import Split
from distillkit.evaluate import evaluate
from distillkit.fingerprint import set_fingerprint, tensor_fingerprint
from distillkit.networks import build
from distillkit.rng import derive
from distillkit.sets import LabeledImages
from distillkit.study._config import write_config
from distillkit.study.candidate import Candidate, Cost, Job, accepted, privacy_columns
from distillkit.study.task import Task
from distillkit.training import CLASSIC, Protocol, accuracy, require_protocol, train

__all__ = ["Condense", "Placed", "placing"]

_SAVED_EVERY = 60.0
"""Seconds between two states of a condenser that is at work."""

_TRIAL_STEPS, _TRIAL_TESTED = 3, 500


class _Enough(Exception):
    """A trial has seen as many steps as it wanted."""


_DEVICE: ContextVar[str] = ContextVar("device", default="cpu")
"""Where the run of this thread computes."""


@dataclass(frozen=True)
class Placed:
    """Makes networks where the run computes: what a condenser gets as `factory`. A record of it names no device.

    Args:
        factory: makes a network, on the CPU.
    """

    factory: Callable[[], nn.Module]

    def __call__(self) -> nn.Module:
        """Make a network, and put it there."""
        return self.factory().to(_DEVICE.get())


@contextmanager
def placing(device: str) -> Iterator[None]:
    """Networks of every `Placed` are made on this device, for the length of a `with` block in this thread.

    Args:
        device: where.
    """
    before = _DEVICE.set(device)
    try:
        yield
    finally:
        _DEVICE.reset(before)


@dataclass(frozen=True)
class Condense(Candidate):
    """A way that makes a small set of a task's training images; networks trained on it alone are tested.

    `make` gives a function of the real images: `lambda factory, steps: partial(distribution_matching,
    networks=RandomNetworks(factory), ipc=10, steps=steps)`. Here `factory` takes no argument, as condensers want it,
    and its networks are where the run computes.
    The function is called with the real images, and with those of `generator`, `ledger` and `progress` that it knows;
    it returns a `LabeledImages`. One that knows `resume` and `callback` gets both; it goes on where it was interrupted.

    Its line has the mean `accuracy_last` over the networks, their `accuracies`, `images`, `seconds_condense` and
    `seconds_test` (CPU seconds of this process: `cpu_seconds_condense`, `cpu_seconds_test`; no seconds of a making that
    was interrupted), and of what was charged to a ledger the columns of
    `distillkit.study.candidate.privacy_columns`. A set
    that is all the real images is not saved a second time.

    Args:
        make, search, settings, like: see `Candidate`.
        num_networks: networks trained on each set.
        protocol: how they are trained.
        tested: what makes them, called with the number of outputs; default the task's network. For a set that shall
            serve others than those it was made with.
        delta: of the ledger that a private condenser charges (`ledger.jsonl` in the run's folder).
        threads: intra-op threads on the CPU; part of the result (rounding).
    """

    num_networks: int = 3
    protocol: Protocol = CLASSIC
    tested: Callable[[int], nn.Module] | None = None
    delta: float = 1e-5
    threads: int = 1

    old_options: ClassVar[Mapping[str, str]] = {**Candidate.old_options, "num_networks": "draws"}

    def __post_init__(self) -> None:
        super().__post_init__()
        check.positive_int(self.num_networks, "num_networks")
        require_protocol(self.protocol)
        check.real_number(self.delta, "delta", above=0.0, below=1.0)
        check.positive_int(self.threads, "threads")
        if self.tested is not None:
            check.callable_with(self.tested, "tested", ["outputs"], "partial(ConvNet, (3, 32, 32))", classes=True)

    def factory(self, task: Task, split: Split) -> Callable[..., Any]:
        """A function without arguments that gives a network of the task, with an output a class.

        Args:
            task, split: the task and its images.
        """
        return Placed(partial(task.network(split), split.train.num_classes))

    def _tested(self, job: Job) -> Callable[[], nn.Module]:
        return partial(self.tested or job.task.network(job.split), job.split.train.num_classes)

    def run(self, made: Any, job: Job) -> dict[str, Any]:
        """Make the set (unless it lies there), save it, train networks on it and test them."""
        with intra_op_threads(self.threads), placing(job.device):
            return self._run(made, job)

    def _run(self, made: Any, job: Job) -> dict[str, Any]:
        began, path = _now(), job.folder / "set.safetensors"
        real, test = self._real(job)
        ledger = self._ledger(made, job)
        interrupted = path.exists() or (job.folder / "state.safetensors").exists()
        if path.exists():
            found = LabeledImages.load(path).to(job.device)
        else:
            write_config(made, job)
            found = self._condensed(made, real, job, ledger)
            if found is not real:
                found.save(path)
        condensed = _now()
        network, seed = self._tested(job), derive(job.seed, "evaluate")
        rows = evaluate(
            found,
            test,
            network,
            num_networks=self.num_networks,
            protocol=self.protocol,
            generator=seed,
            progress=job.progress,
        ).rows
        accuracies = list(rows[0].accuracies)
        (job.folder / "state.safetensors").unlink(missing_ok=True)
        ended = _now()
        (seconds, cpu), (test_seconds, test_cpu) = _between(began, condensed), _between(condensed, ended)
        return {
            "rounds": None, "accuracy_last": rows[0].mean, "accuracy_std": rows[0].std, "accuracies": accuracies,
            "images": len(found), "seconds_condense": None if interrupted else seconds, "seconds_test": test_seconds,
            "cpu_seconds_condense": None if interrupted else cpu, "cpu_seconds_test": test_cpu,
            "seconds": ended[0] - began[0], **privacy_columns(ledger), "sigma": found.info.get("sigma"),
            "hash": tensor_fingerprint([set_fingerprint(found.to("cpu")), json.dumps(accuracies)]),
        }  # fmt: skip

    def trial(self, made: Any, job: Job) -> Cost:
        """Some steps of the making and one short training, and what the whole would take at that pace."""
        with intra_op_threads(self.threads), placing(job.device):
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
            offered = {"generator": derive(job.seed, "trial"), "progress": False, "ledger": self._ledger(made, job)}
            found = _a_set(made(real, **accepted(made, **offered), **_kept(made, callback, None)))
        except _Enough:
            pass
        seconds = time.perf_counter() - began
        if found is None:
            (first, steps), (last, _) = paces[0], paces[-1]
            seconds = first - began + (last - first) / max(1, len(paces) - 1) * (steps - 1)
        sample = found if found is not None else real[: 10 * real.num_classes]
        epoch, tested = self._paces(sample, test, job)
        return Cost(seconds + self.num_networks * ((self.protocol.epochs + 1) * epoch + tested))

    def _paces(self, sample: LabeledImages, test: LabeledImages, job: Job) -> tuple[float, float]:
        """Seconds of an epoch on a set, and of a test."""
        network, some = build(self._tested(job), 0).to(job.device), test[:_TRIAL_TESTED]
        protocol, began = replace(self.protocol, epochs=1), time.perf_counter()
        train(network, sample, protocol, progress=False)
        trained = time.perf_counter()
        accuracy(network, some)
        return (trained - began) / (protocol.epochs + 1), (time.perf_counter() - trained) * len(test) / len(some)

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

        offered = {"generator": derive(job.seed, "condense"), "ledger": ledger, "progress": job.progress}
        resume = state if state.exists() else None
        return _a_set(made(real, **accepted(made, **offered), **_kept(made, callback, resume)))


def _a_set(found: Any) -> LabeledImages:
    if not isinstance(found, LabeledImages):
        raise TypeError(f"what make gives must return a LabeledImages, got {type(found).__name__}")
    return found


def _kept(made: Any, callback: Callable[[Progress], None], state: Path | None) -> dict[str, Any]:
    """`callback` and `resume` for a condenser that knows both: a callback alone may be of another kind."""
    found = accepted(made, callback=callback, resume=state)
    return found if len(found) == 2 else {}


def _now() -> tuple[float, float]:
    """Seconds of the clock, and CPU seconds of this process."""
    return time.perf_counter(), time.process_time()


def _between(began: tuple[float, float], ended: tuple[float, float]) -> tuple[float, float]:
    return ended[0] - began[0], ended[1] - began[1]


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
