"""Candidates (the methods that a study compares) that condense a task's images and evaluate the result."""

from __future__ import annotations

import inspect
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
from distillkit._utils.options import PositiveInt, Share
from distillkit.condense import Progress, save_state
from distillkit.data import Split
from distillkit.evaluate import evaluate
from distillkit.fingerprint import set_fingerprint, tensor_fingerprint
from distillkit.networks import build
from distillkit.privacy import Ledger
from distillkit.rng import derive
from distillkit.sets import LabeledImages
from distillkit.study._execution import privacy_columns, write_config
from distillkit.study.candidate import Candidate, Cost, Job
from distillkit.study.task import Task
from distillkit.training import CLASSIC, Protocol, accuracy, require_protocol, train

_SAVE_INTERVAL = 60.0
"""Seconds between two saved states of a running condenser."""

_TRIAL_STEPS, _TRIAL_TEST_IMAGES = 3, 500


class _EndOfTrial(Exception):
    """Exception that `Condense.trial` raises to end the condensation after a few steps."""


_DEVICE: ContextVar[str] = ContextVar("device", default="cpu")
"""Device of the run in this thread."""


@dataclass(frozen=True)
class DeviceFactory:
    """Network factory that places the networks of a function on the device of the run."""

    factory: Callable[[], nn.Module]

    def __call__(self) -> nn.Module:
        """Return a new network on the device of the run."""
        return self.factory().to(_DEVICE.get())


@contextmanager
def run_device(device: str, threads: int = 1) -> Iterator[None]:
    """Set the device of every `DeviceFactory` and the number of intra-op threads in this thread, for a `with` block."""
    before, count = _DEVICE.set(device), torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        _DEVICE.reset(before)
        torch.set_num_threads(count)


@dataclass(frozen=True)
class Condense(Candidate):
    """Candidate that condenses a task's training images to a small set, and tests networks trained only on this set.

    The function `make` returns a condenser, a function that condenses the real images to a `LabeledImages`:

        def make(factory, steps):
            return partial(distribution_matching, networks=RandomNetworks(factory), ipc=10, steps=steps)

    `factory` is a function without arguments that returns a network on the device of the run, and `steps` is a setting
    of the candidate. The condenser is called with the real images, and with `generator`, `ledger` and `progress` if it
    accepts these options. If the condenser accepts `resume` and `callback`, an interrupted condensation is resumed.

    The summary of a run contains `accuracy_last` (the mean test accuracy of the networks), `accuracies` (of each
    network), `images` (the number of images in the small set), wall times (`seconds_condense`, `seconds_test`) and CPU
    times (`cpu_seconds_condense`, `cpu_seconds_test`), in seconds. The condensation times of an interrupted run are
    None. If the condenser charges a ledger, the summary also contains `epsilon`, `delta`, `relation` (the neighboring
    relation) and `noise` (the source of the noise, "seeded" or "operating system"). If there is no guarantee,
    `epsilon_reason` gives the reason. If the guarantee has limits (`Guarantee.remarks`), `epsilon_remarks` lists them.
    The small set is saved in the run's folder, unless it consists of all real images.

    Args:
        make, search, settings, like: arguments of `Candidate`.
        num_networks: number of networks trained on the small set of each run.
        protocol: protocol with which the networks are trained.
        tested: function that gets a number of outputs and returns a network. The networks are trained on the small set
            and tested on the test images. Default: the task's network factory. Use this option to test whether the set
            also works for other networks than those used in the condensation.
        delta: delta of the privacy ledger that a private condenser charges. The ledger is the file `ledger.jsonl` in
            the run's folder.
        threads: number of intra-op threads on the CPU. It affects rounding, so the results depend on it.
        measure: function of the small set and the run's `Job` that computes additional columns of the summary, and
            returns them as a dictionary of JSON values. It is not called in tuning runs. The cost that `Study.estimate`
            returns does not include the time that this function takes.
    """

    num_networks: PositiveInt = 3
    protocol: Protocol = CLASSIC
    tested: Callable[[int], nn.Module] | None = None
    delta: Share = 1e-5
    threads: PositiveInt = 1
    measure: Callable[[LabeledImages, Job], Mapping[str, Any]] | None = None

    rules: ClassVar[tuple[str, ...]] = ("last",)

    def __post_init__(self) -> None:
        super().__post_init__()
        require_protocol(self.protocol)
        if self.tested is not None:
            check.callable_with(self.tested, "tested", ["outputs"], "partial(ConvNet, (3, 32, 32))", classes=True)
        if self.measure is not None:
            check.callable_with(self.measure, "measure", ["small", "job"], "lambda small, job: {'pixels': ...}")

    def factory(self, task: Task, split: Split) -> Callable[..., Any]:
        """Return a function without arguments that makes a network for the task, with one output per class."""
        return DeviceFactory(partial(task.network(split), split.train.num_classes))

    def run(self, built: Any, job: Job) -> dict[str, Any]:
        """Condense the images and save the set, unless the set exists already. Then train and test networks on it."""
        with run_device(job.device, self.threads):
            return self._run(built, job)

    def _run(self, built: Any, job: Job) -> dict[str, Any]:
        began, path = _now(), job.folder / "set.safetensors"
        real, test = self._real(job)
        ledger = self._ledger(built, job)
        interrupted = path.exists() or (job.folder / "state.safetensors").exists()
        if path.exists():
            found = LabeledImages.load(path).to(job.device)
        else:
            write_config(built, job)
            found = self._condense(built, real, job, ledger)
            if found is not real:
                found.save(path)
        condensed = _now()
        options: dict[str, Any] = {"protocol": self.protocol, "generator": derive(job.seed, "evaluate")}
        factory, networks = self._tested_factory(job), self.num_networks
        [row] = evaluate(found, test, factory, num_networks=networks, progress=job.progress, **options).rows
        (job.folder / "state.safetensors").unlink(missing_ok=True)
        ended = _now()
        times = {
            f"{kind}seconds_{part}": None if interrupted and part == "condense" else times[1][i] - times[0][i]
            for part, times in (("condense", (began, condensed)), ("test", (condensed, ended)))
            for i, kind in enumerate(("", "cpu_"))
        }
        columns: dict[str, Any] = {
            "rounds": None, "accuracy_last": row.mean, "accuracy_std": row.std, "accuracies": list(row.accuracies),
            "images": len(found), **times, "seconds": ended[0] - began[0], **privacy_columns(ledger),
            "sigma": found.info.get("sigma"),
            "hash": tensor_fingerprint([set_fingerprint(found.to("cpu")), json.dumps(list(row.accuracies))]),
        }  # fmt: skip
        if self.measure is None or job.validation:
            return columns
        measured = self.measure(found, job)
        try:
            return columns | dict(json.loads(json.dumps(check.mapping(measured, "the result of measure"))))
        except (TypeError, ValueError) as error:
            raise TypeError(
                f"measure must return a dictionary of JSON values, got {measured!r:.80}: {error}"
            ) from error

    def trial(self, built: Any, job: Job) -> Cost:
        """Estimate the cost of a run from its first condensation steps and one short training.

        Args:
            built: the object that `build` returned.
            job: the run; its folder is temporary.
        """
        with run_device(job.device, self.threads):
            return self._trial(built, job)

    def _trial(self, built: Any, job: Job) -> Cost:
        real, test = self._real(job)
        began, paces = time.perf_counter(), list[tuple[float, int]]()

        def callback(progress: Progress) -> None:
            paces.append((time.perf_counter(), progress.steps))
            if len(paces) > min(_TRIAL_STEPS, progress.steps - 1):
                raise _EndOfTrial

        sample = real[: 10 * real.num_classes]
        try:
            options = {"generator": derive(job.seed, "trial"), "progress": False, "ledger": self._ledger(built, job)}
            sample = _call(built, real, callback, None, options)
            seconds = time.perf_counter() - began
        except _EndOfTrial:
            (first, steps), (last, _) = paces[0], paces[-1]
            seconds = first - began + (last - first) / max(1, len(paces) - 1) * (steps - 1)
        network, some = build(self._tested_factory(job), 0).to(job.device), test[:_TRIAL_TEST_IMAGES]
        short, began = replace(self.protocol, epochs=1), time.perf_counter()
        train(network, sample, short, progress=False)
        trained = time.perf_counter()
        accuracy(network, some)
        tested = (time.perf_counter() - trained) * len(test) / len(some)
        epochs = self.protocol.num_epochs / short.num_epochs
        return Cost(seconds + self.num_networks * (epochs * (trained - began) + tested))

    def _tested_factory(self, job: Job) -> Callable[[], nn.Module]:
        return partial(self.tested or job.task.network(job.split), job.split.train.num_classes)

    def _real(self, job: Job) -> tuple[LabeledImages, LabeledImages]:
        real, test = job.task.pooled(job.split, validation=job.validation, keep=job.keep)
        return real.to(job.device), test.to(job.device)

    def _ledger(self, built: Any, job: Job) -> Ledger | None:
        return Ledger(job.folder / "ledger.jsonl", delta=self.delta) if _supported(built, ledger=None) else None

    def _condense(self, built: Any, real: LabeledImages, job: Job, ledger: Any) -> LabeledImages:
        state, last = job.folder / "state.safetensors", time.monotonic()

        def callback(progress: Progress) -> None:
            nonlocal last
            stops = job.late and progress.step < progress.steps
            if stops or time.monotonic() - last >= _SAVE_INTERVAL:
                save_state(state, progress.state())
                last = time.monotonic()
            if stops:
                job.check_deadline()

        options = {"generator": derive(job.seed, "condense"), "ledger": ledger, "progress": job.progress}
        return _call(built, real, callback, state if state.exists() else None, options)


def _call(condenser: Any, real: LabeledImages, callback: Any, resume: Path | None, options: Any) -> LabeledImages:
    """Call a condenser with the `options` that it accepts, and with `callback` and `resume` if it accepts both."""
    checkpoint = _supported(condenser, callback=callback, resume=resume)  # another callback may stand alone
    found = condenser(real, **_supported(condenser, **options), **(checkpoint if len(checkpoint) == 2 else {}))
    if not isinstance(found, LabeledImages):
        raise TypeError(f"the condenser that make returned must return a LabeledImages, got {type(found).__name__}")
    return found


def _supported(function: Callable[..., Any], **options: Any) -> dict[str, Any]:
    """Return those `options` that a function accepts by name, and that a `functools.partial` does not set."""
    if not callable(function):
        raise TypeError(f"make must return a condenser, a function of the images, got {type(function).__name__}")
    parameters, fixed = inspect.signature(function).parameters, getattr(function, "keywords", {})
    return {name: value for name, value in options.items() if name in parameters and name not in fixed}


def _now() -> tuple[float, float]:
    """Return the wall-clock time and the CPU time of this process, in seconds."""
    return time.perf_counter(), time.process_time()
