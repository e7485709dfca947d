"""Execution of one run of a study, in this process or in a worker, and the records in the run's folder."""

from __future__ import annotations

import contextlib
import json
import re
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from distillkit._utils import check
from distillkit._utils.files import write_atomically
from distillkit._utils.processes import worker_pool
from distillkit._utils.provenance import RUN_FORMAT, versions
from distillkit._utils.user_warnings import without_warnings
from distillkit.data import Split
from distillkit.privacy import Ledger
from distillkit.serialization import SerializationError, from_config, referenced_objects, to_config
from distillkit.study._guarantee import CHOSEN, EXACT
from distillkit.study._records import read_json, write_json
from distillkit.study.candidate import Candidate, Cost, Job, OutOfTime
from distillkit.study.task import Task

__all__ = [
    "PreparedRun", "RunSpec", "SerializedRun", "WorkerKilled", "privacy_columns", "run_all", "set_aside",
    "settings_config", "write_config",
]  # fmt: skip


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
        return SerializedRun(out, *configs, referenced_objects([self.task, candidate, self.built, dict(spec.settings)]))

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

    def execute(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """Execute the run in this worker process; see `PreparedRun.execute`."""
        return self._prepare().execute(self.out, **options)

    def trial(self, options: Mapping[str, Any]) -> tuple[Cost, int | None]:
        """Execute a short part of the run in this worker process; see `PreparedRun.trial`."""
        return self._prepare().trial(**options)

    def _prepare(self) -> PreparedRun:
        torch.set_num_threads(1)  # several workers share the cores; results do not depend on this number

        def build(config: Any) -> Any:
            return from_config(config, store=self.out / "arguments", names=self.names)

        task: Task = from_config(self.task, store=self.out / "data", names=self.names)
        key = json.dumps(self.task["with"]["data"])
        if key not in _SPLITS:
            _SPLITS.clear()
            _SPLITS[key] = task.load()
        settings = {name: build(config) for name, config in self.spec["settings"].items()}
        spec = RunSpec(**{**self.spec, "settings": settings})
        return PreparedRun(spec, task, _SPLITS[key], build(self.candidate), build(self.built))


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
    folder.rename(target)


class WorkerKilled(RuntimeError):
    """Error for a run whose worker process was killed. The message names the run; all other runs are finished."""


def run_all(
    specs: Sequence[RunSpec], prepare: Callable[[RunSpec], PreparedRun], out: Path, processes: int,
    options: Mapping[str, Any],
) -> Iterator[tuple[RunSpec, dict[str, Any]]]:  # fmt: skip
    """Execute runs, in processes if `processes` is above 1, and yield each summary when its run ends."""
    if processes == 1:
        for index, spec in enumerate(specs):
            if index and options["deadline"] is not None and time.time() >= options["deadline"]:
                raise OutOfTime(f"{spec.run} was not started, because the deadline has passed")
            yield spec, prepare(spec).execute(out, **options)
        return
    waiting = {spec.folder: (spec, prepare(spec).serialize(out)) for spec in specs}
    with contextlib.suppress(BrokenProcessPool), worker_pool(processes) as pool:
        futures = {pool.submit(run.execute, options): spec for spec, run in waiting.values()}
        try:
            for future in as_completed(futures):
                summary = future.result()
                del waiting[futures[future].folder]
                yield futures[future], summary
        except OutOfTime:
            pool.shutdown(wait=True, cancel_futures=True)  # wait until the other runs have saved their states
            raise
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    killed = []
    for spec, run in waiting.values():  # a killed worker breaks its pool, so the remaining runs get one process each
        try:
            with worker_pool(1) as pool:
                summary = pool.submit(run.execute, options).result()
        except BrokenProcessPool:
            killed.append(spec.run)
        else:
            yield spec, summary
    if killed:
        raise WorkerKilled(
            f"the processes of {', '.join(killed)} were killed, perhaps for lack of memory; all other runs are "
            "finished. Let them use less memory (fewer workers, a smaller batch or chunk), and run the study again"
        )
