"""Execution of one run of a study, in this process or in a worker, and the records in the run's folder."""

from __future__ import annotations

import contextlib
import json
import re
import tempfile
import time
import traceback
import uuid
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from distillkit._utils import check
from distillkit._utils.files import write_atomically
from distillkit._utils.provenance import RUN_FORMAT, versions
from distillkit._utils.user_warnings import without_warnings
from distillkit.data import Split
from distillkit.locking import InUse, locked
from distillkit.privacy import Ledger
from distillkit.serialization import SerializationError, from_config, referenced_objects, to_config
from distillkit.study._guarantee import CHOSEN, EXACT
from distillkit.study._records import read_json, write_json
from distillkit.study.candidate import Candidate, Cost, Job, OutOfTime
from distillkit.study.task import Task

_ATTEMPTS, _INTERVAL = 2, 0.1
"""Number of workers that a run may lose, and seconds between two looks at the workers."""


@dataclass(frozen=True)
class RunSpec:
    """Specification of one run of a study.

    Attributes:
        run: name of the run.
        folder: folder of the run, relative to the study's folder.
        task, method: names of the task and the candidate.
        seed: seed of the run.
        settings: settings that all configurations of the candidate share, combined with the settings of the one
            configuration that this run uses.
        validation: whether this is a tuning run.
    """

    run: str
    folder: str
    task: str
    method: str
    seed: int
    settings: Mapping[str, Any]
    validation: bool = False


@dataclass(frozen=True)
class PreparedRun:
    """Run of a study with all objects that are needed to execute it.

    Attributes:
        spec: specification of the run.
        task: task of the run.
        split: images of the task.
        candidate: candidate that is run.
        built: object that `Candidate.build` returned.
    """

    spec: RunSpec
    task: Task
    split: Split
    candidate: Candidate
    built: Any

    def execute(self, out: Path, **options: Any) -> dict[str, Any]:
        """Execute the run in the study's folder `out`, unless its summary exists, and return the summary."""
        spec, folder = self.spec, out / self.spec.folder
        path = folder / "summary.json"
        if path.exists():
            return dict(read_json(path))
        commit = options.pop("commit", None)
        check.folder(folder, "out").mkdir(parents=True, exist_ok=True)
        store = folder / "arguments"
        notes = {
            "task": to_config(self.task, store=store, shared=options.pop("shared", out / "data"), name="task"),
            "candidate": to_config(self.candidate.for_record(), store=store, name="candidate"),
            "method": spec.method, "settings": settings_config(spec, store),
            "validation": spec.validation, "commit": commit,
        }  # fmt: skip
        notes |= {
            name: to_config(options[name], store=store, name=name)
            for name in ("keep", "partition_seed")
            if options.get(name) is not None
        }
        cache = out / "cache" if spec.folder else None  # a repetition computes everything
        try:
            columns = self.candidate.run(self.built, self._job(folder, notes=notes, cache=cache, **options))
        except self.candidate.failures as error:
            if not spec.validation:
                raise
            columns = {"accuracy_last": None, "error": f"{type(error).__name__}: {error}"}
        if "noise" in columns and (spec.validation or self.candidate.like or len(self.candidate.search) > 1):
            remark = EXACT if spec.validation else CHOSEN
            columns = {**columns, "epsilon_remarks": [*columns.get("epsilon_remarks", []), remark]}
        summary = {
            "run": spec.run, "task": spec.task, "method": spec.method, "seed": spec.seed,
            "settings": notes["settings"], **columns, "commit": commit,
        }  # fmt: skip
        write_json(path, summary)
        return summary

    def trial(self, **options: Any) -> tuple[Cost, int | None]:
        """Execute a short part of the run; return its whole cost, and the peak memory in bytes if it is known."""
        process, memory = Path("/proc/self"), None
        with tempfile.TemporaryDirectory() as folder:
            with contextlib.suppress(OSError):  # reset the peak
                (process / "clear_refs").write_text("5", encoding="utf-8")
            with without_warnings():  # the run itself warns
                cost = self.candidate.trial(self.built, self._job(Path(folder), **options))
        with contextlib.suppress(OSError):
            found = re.search(r"^VmHWM:\s*(\d+) kB", (process / "status").read_text(encoding="utf-8"), re.MULTILINE)
            memory = int(found[1]) * 1024 if found else None
        return cost, memory

    def serialize(self, out: Path) -> SerializedRun:
        """Serialize the run for a worker process. Tensors are written to the study's folder `out`."""
        spec, candidate, store = self.spec, self.candidate.for_record(), out / "arguments"
        where = f"candidates[{spec.method!r}]"
        configs = (
            to_config(self.task, store=out / "data", name=f"tasks[{spec.task!r}]"),
            to_config(candidate, store=store, name=where),
            to_config(self.built, store=store, name=f"the result of {where}.make"),
            {**vars(spec), "settings": settings_config(spec, store)},
        )
        return SerializedRun(
            out.resolve(), *configs, referenced_objects([self.task, candidate, self.built, dict(spec.settings)])
        )

    def _job(self, folder: Path, **options: Any) -> Job:
        spec = self.spec
        return Job(spec.run, folder, self.task, self.split, spec.seed, spec.settings, spec.validation, **options)


_SPLITS: dict[str, Split] = {}
"""Images of the last task, kept in each worker process."""


@dataclass(frozen=True)
class SerializedRun:
    """Run of a study for a worker process: its parts in JSON form, and the functions and classes that they name."""

    out: Path
    task: Any
    candidate: Any
    built: Any
    spec: Mapping[str, Any]
    names: Mapping[str, Any]

    def attempt(self, options: Mapping[str, Any], key: str) -> dict[str, Any] | Exception:
        """Execute the run in this worker process; see `attempt`. A new `key` tells an executor that the call is new."""
        try:
            outcome = attempt(self._prepare(), self.out, options)
        except Exception as error:
            outcome = error
        if isinstance(outcome, Exception):
            outcome.add_note("".join(traceback.format_exception(outcome)))  # which is not sent with an error
        return outcome

    def trial(self, options: Mapping[str, Any]) -> tuple[Cost, int | None]:
        """Execute a short part of the run in this worker process; see `PreparedRun.trial`."""
        return self._prepare().trial(**options)

    def _prepare(self) -> PreparedRun:
        torch.set_num_threads(1)  # several workers share the cores; results do not depend on this number

        def build(config: Any) -> Any:
            return from_config(config, store=self.out / "arguments", names=self.names)

        task: Task = from_config(self.task, store=self.out / "data", names=self.names)
        key = json.dumps(self.task["with"]["data"])
        if (split := _SPLITS.get(key)) is None:
            _SPLITS.clear()
            _SPLITS[key] = split = task.load()
        settings = {name: build(config) for name, config in self.spec["settings"].items()}
        spec = RunSpec(**{**self.spec, "settings": settings})
        return PreparedRun(spec, task, split, build(self.candidate), build(self.built))


def write_config(built: Any, job: Job) -> None:
    """Write a run's `config.json`: the object that is run, the task, the seed, and the versions of the software."""
    missing = None
    try:
        config = to_config(built, store=job.folder / "arguments")
    except SerializationError as error:
        config, missing = None, str(error)
    content = {
        "format": RUN_FORMAT, "recipe": config, "recipe_missing": missing, "seed": job.seed, "device": job.device,
        "notes": dict(job.notes), "versions": versions(),
    }  # fmt: skip
    write_atomically(job.folder / "config.json", json.dumps(content, indent=2) + "\n")


def privacy_columns(ledger: Ledger | None) -> dict[str, Any]:
    """Return the privacy columns of a run's summary.

    Args:
        ledger: the ledger that the run charged; None for a run without a guarantee.

    Returns:
        The column `epsilon`, which is None if there is no guarantee. With a ledger, there are also the columns `delta`,
        `relation` (the neighboring relation of data sets) and `noise`, the source of the noise: "operating system" or
        "seeded". Seeded noise gives no guarantee. If there is no guarantee, `epsilon_reason` gives the reason. If the
        guarantee has remarks, `epsilon_remarks` lists them.
    """
    if ledger is None:
        return {"epsilon": None}
    guarantee = ledger.guarantee()
    seeded = any(event.seeded for event in ledger.events)
    columns = {"epsilon": guarantee.epsilon, "delta": guarantee.delta, "relation": guarantee.relation}
    columns["noise"] = "seeded" if seeded else "operating system"
    notes = {"epsilon_reason": guarantee.reason, "epsilon_remarks": list(guarantee.remarks)}
    return columns | {name: note for name, note in notes.items() if note}


def settings_config(spec: RunSpec, store: Path) -> dict[str, Any]:
    """Return the values of a run's settings in JSON form, by name. Tensors are written to the folder `store`."""
    where = f"the settings of candidates[{spec.method!r}]"
    return {name: to_config(value, store=store, name=f"{where}.{name}") for name, value in spec.settings.items()}


def set_aside(out: Path, spec: RunSpec) -> None:
    """Move a run to the folder `replaced` if it was started with other settings than those of `spec`."""
    folder = out / spec.folder
    config, summary = folder / "config.json", folder / "summary.json"
    found = read_json(config, checked=False)["notes"].get("settings") if config.exists() else None
    found = read_json(summary)["settings"] if summary.exists() else found
    if found is None or found == settings_config(spec, folder / "arguments"):
        return
    number = 1 + len(list(out.glob(f"replaced/{folder.name}-*")))
    target = out / "replaced" / f"{folder.name}-{number}"
    target.parent.mkdir(exist_ok=True)
    with _claim(out, spec):
        folder.rename(target)


class WorkerKilled(RuntimeError):
    """Error for runs whose workers were lost twice. The message names the runs; all other runs are finished."""


def run_all(
    specs: Sequence[RunSpec], prepare: Callable[[RunSpec], PreparedRun], out: Path, executor: Any,
    options: Mapping[str, Any],
) -> Iterator[tuple[RunSpec, dict[str, Any]]]:  # fmt: skip
    """Execute runs, in this process if `executor` is None, and yield each summary when its run ends.

    A run that another call executes in this folder is left to that call. A run whose worker is lost is continued once.
    """
    waiting, running, losses, begun = deque(specs), dict[Any, RunSpec](), dict[str, list[Exception]](), False
    try:
        while waiting or running:
            if begun and not running and options["deadline"] is not None and time.time() >= options["deadline"]:
                raise OutOfTime(f"{waiting[0].run} was not started, because the deadline has passed")
            for _ in range(len(waiting)):
                spec = waiting.popleft()
                if (summary := out / spec.folder / "summary.json").exists():
                    yield spec, read_json(summary)
                elif _is_claimed(out, spec):
                    waiting.append(spec)
                else:
                    running[_submit(executor, prepare(spec), out, options)] = spec
                    if executor is None:
                        break
            ended, begun = [future for future in running if future.done()], True
            for future in ended:
                spec = running.pop(future)
                try:
                    outcome = future.result()
                except Exception as error:  # a run returns its own errors, so the executor has lost the run
                    losses.setdefault(spec.run, []).append(error)
                    if len(losses[spec.run]) < _ATTEMPTS:
                        waiting.append(spec)
                    continue
                if isinstance(outcome, InUse):
                    waiting.append(spec)
                elif isinstance(outcome, Exception):
                    raise outcome
                else:
                    yield spec, outcome
            if not ended:
                time.sleep(_INTERVAL)
    except BaseException as stop:
        for future in running:
            if isinstance(future, Future):  # jobs of a cluster go on
                future.cancel()
        while isinstance(stop, OutOfTime) and not all(future.done() for future in running):
            time.sleep(_INTERVAL)  # until the other runs have saved their states
        raise
    if killed := sorted(run for run, errors in losses.items() if len(errors) == _ATTEMPTS):
        cause = losses[killed[0]][-1]
        raise WorkerKilled(
            f"the workers of {', '.join(killed)} were killed, perhaps for lack of memory, or cannot import "
            f"what these runs use ({type(cause).__name__}: {cause}); all other runs are finished. Let them use less "
            "memory (fewer workers, a smaller batch or chunk), or install your modules there, and run the study again"
        ) from cause


def attempt(run: PreparedRun, out: Path, options: Mapping[str, Any]) -> dict[str, Any] | Exception:
    """Execute a run, and return its summary or error. The error is `InUse` if another process executes the run."""
    try:
        with _claim(out, run.spec):
            return run.execute(out, **options)
    except Exception as error:
        return error


def _claim(out: Path, spec: RunSpec) -> AbstractContextManager[None]:
    """Lock a run for the process that executes it. The operating system releases the lock if the process ends."""
    return locked(out / ".claims" / f"{spec.folder}.lock", f"the run {spec.run}", wait=0.0)


def _is_claimed(out: Path, spec: RunSpec) -> bool:
    try:
        with _claim(out, spec):
            return False
    except InUse:
        return True


def _submit(executor: Any, run: PreparedRun, out: Path, options: Mapping[str, Any]) -> Any:
    """Start a run, and return a future of the result of `attempt`."""
    future: Future[Any] = Future()
    if executor is None:
        future.set_result(attempt(run, out, options))
        return future
    serialized = run.serialize(out)
    try:
        return executor.submit(serialized.attempt, options, uuid.uuid4().hex)
    except Exception as error:  # the executor is broken
        future.set_exception(error)
        return future
