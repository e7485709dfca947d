"""Execution of one run of a study, in this process or in a worker, and the records in its folder."""

from __future__ import annotations

import contextlib
import json
import re
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from distillkit._sanity_checks import without_warnings
from distillkit._utils.files import write_atomically
from distillkit._utils.provenance import RUN_FORMAT, versions
from distillkit.data import Split
from distillkit.privacy import Ledger
from distillkit.serialization import SerializationError, from_config, referenced_objects, to_config
from distillkit.study.candidate import Candidate, Cost, Job
from distillkit.study.task import Task

__all__ = [
    "PreparedRun",
    "RunSpec",
    "SerializedRun",
    "execute",
    "execute_in_worker",
    "privacy_columns",
    "read_summary",
    "run_trial",
    "run_trial_in_worker",
    "serialize_run",
    "write_config",
]


@dataclass(frozen=True)
class RunSpec:
    """Specification of one run of a study.

    Attributes:
        run: name of the run.
        folder: folder of the run, relative to the study's.
        task, method: names of the task and the candidate.
        seed: seed of the run.
        settings: settings of the candidate and of the configuration.
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
    """A run with everything it needs.

    Attributes:
        spec: the specification.
        task, split: its task, and the task's images.
        candidate: its candidate.
        built: the object that `Candidate.build` returned.
    """

    spec: RunSpec
    task: Task
    split: Split
    candidate: Candidate
    built: Any

    def job(self, folder: Path, **options: Any) -> Job:
        """Return the job for the candidate, with records in `folder` and further `options` of `Job`."""
        spec = self.spec
        return Job(spec.run, folder, self.task, self.split, spec.seed, spec.settings, spec.validation, **options)


@dataclass(frozen=True)
class SerializedRun:
    """A run in serialized form, for a worker process.

    Attributes:
        task, candidate, built: configs of the task, the candidate, and the object it built.
        spec: fields of the specification; the settings as configs.
        names: functions and classes that the configs refer to.
    """

    task: Any
    candidate: Any
    built: Any
    spec: Mapping[str, Any]
    names: Mapping[str, Any]


def serialize_run(run: PreparedRun, out: Path) -> SerializedRun:
    """Serialize a run for a worker process. Tensors are written to the study's folder.

    Args:
        run: the run.
        out: the study's folder.

    Raises:
        distillkit.serialization.SerializationError: a part has no JSON form.
    """
    spec, candidate = run.spec, run.candidate.for_record()
    where = f"candidates[{spec.method!r}]"
    return SerializedRun(
        to_config(run.task, store=out / "data", name=f"tasks[{spec.task!r}]"),
        to_config(candidate, store=out / "arguments", name=where),
        to_config(run.built, store=out / "arguments", name=f"the result of {where}.make"),
        {**vars(spec), "settings": _settings_config(spec, out / "arguments")},
        referenced_objects([run.task, candidate, run.built, dict(spec.settings)]),
    )


def execute(run: PreparedRun, out: Path, **options: Any) -> dict[str, Any]:
    """Execute a run, unless its summary exists, and return its summary.

    Args:
        run: the run.
        out: the study's folder.
        options: `device`, `workers` and `progress` of the job; `commit` of the code; `keep`; `partition_seed`;
            `shared`, a folder that may already hold the task's files.
    """
    spec = run.spec
    folder = out / spec.folder
    path = folder / "summary.json"
    if path.exists():
        return read_summary(path)
    commit = options.pop("commit", None)
    folder.mkdir(parents=True, exist_ok=True)
    store = folder / "arguments"
    task = to_config(run.task, store=store, shared=options.pop("shared", out / "data"), name="task")
    notes = {
        "task": task, "way": to_config(run.candidate.for_record(), store=store, name="candidate"),
        "method": spec.method, "settings": _settings_config(spec, store),
        "validation": spec.validation, "commit": commit,
    }  # fmt: skip
    if options.get("keep") is not None:
        notes["keep"] = to_config(options["keep"], store=store, name="keep")
    if options.get("partition_seed") is not None:
        notes["partition_seed"] = options["partition_seed"]
    try:
        columns = run.candidate.run(run.built, run.job(folder, notes=notes, **options))
    except run.candidate.failures as error:
        if not spec.validation:
            raise
        columns = {"accuracy_last": None, "error": f"{type(error).__name__}: {error}"}
    summary = {
        "run": spec.run, "task": spec.task, "method": spec.method, "seed": spec.seed,
        "settings": notes["settings"], **columns, "commit": commit,
    }  # fmt: skip
    write_atomically(path, json.dumps(summary, indent=1) + "\n")
    return summary


def execute_in_worker(run: SerializedRun, out: Path, options: Mapping[str, Any]) -> dict[str, Any]:
    """Execute a serialized run in a worker process.

    Args:
        run: the run.
        out, options: see `execute`.
    """
    torch.set_num_threads(1)  # the worker's share of the cores; no result depends on it
    return execute(_deserialize(run, out), out, **options)


def run_trial(run: PreparedRun, **options: Any) -> tuple[Cost, int | None]:
    """Run a short trial.

    Args:
        run: the run.
        options: `device` and `workers` of the job.

    Returns:
        The estimated cost of the whole run, and the peak memory of this process during the trial, in bytes.
    """
    with tempfile.TemporaryDirectory() as folder:
        _reset_peak_memory()
        with without_warnings():  # the run itself warns
            cost = run.candidate.trial(run.built, run.job(Path(folder), **options))
        return cost, _peak_memory()


def run_trial_in_worker(run: SerializedRun, out: Path, options: Mapping[str, Any]) -> tuple[Cost, int | None]:
    """Run a short trial of a serialized run in a worker process.

    Args:
        run: the run.
        out: the study's folder.
        options: see `run_trial`.
    """
    torch.set_num_threads(1)
    return run_trial(_deserialize(run, out), **options)


def read_summary(path: Path) -> dict[str, Any]:
    """Read a run's `summary.json`.

    Args:
        path: of the file.

    Raises:
        ValueError: the file is damaged.
    """
    try:
        summary = json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is damaged ({error}); remove its folder to repeat the run") from error
    return dict(summary)


def write_config(built: Any, job: Job) -> None:
    """Write a run's `config.json`: what was run, on which task, with which seed and versions.

    Args:
        built: the object that the candidate built.
        job: the run.
    """
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
        `epsilon`, None where there is no guarantee. With a ledger also `delta`; `relation`, which data sets are
        neighbours; `noise`, "operating system" or "seeded" (no guarantee); `epsilon_reason` if there is no guarantee,
        and `epsilon_remarks` if there are remarks.
    """
    if ledger is None:
        return {"epsilon": None}
    guarantee = ledger.guarantee()
    seeded = any(event.seeded for event in ledger.events)
    columns = {"epsilon": guarantee.epsilon, "delta": guarantee.delta, "relation": guarantee.relation}
    columns["noise"] = "seeded" if seeded else "operating system"
    notes = {"epsilon_reason": guarantee.reason, "epsilon_remarks": list(guarantee.remarks)}
    return columns | {name: note for name, note in notes.items() if note}


def _settings_config(spec: RunSpec, store: Path) -> dict[str, Any]:
    where = f"the settings of candidates[{spec.method!r}]"
    return {name: to_config(value, store=store, name=f"{where}.{name}") for name, value in spec.settings.items()}


_SPLITS: dict[str, Split] = {}
"""In a worker process, the images of its last task."""


def _deserialize(run: SerializedRun, out: Path) -> PreparedRun:
    def build(config: Any) -> Any:
        return from_config(config, store=out / "arguments", names=run.names)

    task: Task = from_config(run.task, store=out / "data", names=run.names)
    key = json.dumps(run.task["with"]["data"])
    if key not in _SPLITS:
        _SPLITS.clear()
        _SPLITS[key] = task.load()
    settings = {name: build(config) for name, config in run.spec["settings"].items()}
    spec = RunSpec(**{**run.spec, "settings": settings})
    return PreparedRun(spec, task, _SPLITS[key], build(run.candidate), build(run.built))


def _reset_peak_memory() -> None:
    """Reset the kernel's peak memory count of this process, where supported."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def _peak_memory() -> int | None:
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        return None
    found = re.search(r"^VmHWM:\s*(\d+) kB", status, re.MULTILINE)
    return int(found[1]) * 1024 if found else None
