"""Doing one run of a study, here or in a worker process, and what it leaves in its folder."""

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
from distillkit.data import Split
from distillkit.serialization import from_config, referenced_objects, to_config
from distillkit.study.candidate import Candidate, Cost, Job
from distillkit.study.task import Task

__all__ = ["Order", "Said", "attempt", "attempt_far", "perform", "perform_far", "said"]


@dataclass(frozen=True)
class Order:
    """One run that a study wants done.

    Attributes:
        run: its name.
        folder: below the study's.
        task, method: names of the task and the way.
        seed: of the run.
        settings: the way's own and those of the try.
        validation: whether it is a try.
    """

    run: str
    folder: str
    task: str
    method: str
    seed: int
    settings: Mapping[str, Any]
    validation: bool = False


@dataclass(frozen=True)
class Said:
    """All that a worker process needs for an `Order`.

    Attributes:
        task, way, built: recipes of the task, of the bare way, and of what it made.
        order: the order, its settings as a recipe.
        names: the functions and classes that these name.
    """

    task: Any
    way: Any
    built: Any
    order: Mapping[str, Any]
    names: Mapping[str, Any]


def said(order: Order, task: Task, way: Candidate, built: Any, out: Path) -> Said:
    """Write an order down for another process; tensors go to the study's folder.

    Args:
        order: what is to be done.
        task, way, built: what it names, and what the way made for it.
        out: the study's folder.

    Raises:
        distillkit.serialization.SerializationError: something in them has no name.
    """
    where = f"candidates[{order.method!r}]"
    return Said(
        to_config(task, store=out / "data", name=f"tasks[{order.task!r}]"),
        to_config(way.for_record(), store=out / "arguments", name=where),
        to_config(built, store=out / "arguments", name=f"what {where} makes"),
        {**vars(order), "settings": said_settings(order, out / "arguments")},
        referenced_objects([task, way.for_record(), built, dict(order.settings)]),
    )


def said_settings(order: Order, store: Path) -> dict[str, Any]:
    """The settings of a run as its records hold them: by name, each as a recipe.

    Args:
        order: the run.
        store: the folder for tensors among them.
    """
    where = f"the settings of ways[{order.method!r}]"
    return {name: to_config(value, store=store, name=f"{where}.{name}") for name, value in order.settings.items()}


def perform(
    order: Order, task: Task, split: Split, way: Candidate, built: Any, out: Path, **options: Any
) -> dict[str, Any]:
    """Do one run unless its summary lies there; return its line.

    Args:
        order: what is to be done.
        task, split, way, built: what it names, the images, and what the way made.
        out: the study's folder.
        options: `device`, `workers` and `progress` of the job; `commit` of the code; `keep`; `partition_seed`;
            `shared`, a folder that may hold the task's files already.
    """
    folder = out / order.folder
    path = folder / "summary.json"
    if path.exists():
        return read_line(path)
    commit = options.pop("commit", None)
    folder.mkdir(parents=True, exist_ok=True)
    store = folder / "arguments"
    data = to_config(task, store=store, shared=options.pop("shared", out / "data"), name="task")
    notes = {
        "task": data, "way": to_config(way.for_record(), store=store, name="way"),
        "method": order.method, "settings": said_settings(order, store),
        "validation": order.validation, "commit": commit,
    }  # fmt: skip
    if options.get("keep") is not None:
        notes["keep"] = to_config(options["keep"], store=store, name="keep")
    if options.get("partition_seed") is not None:
        notes["partition_seed"] = options["partition_seed"]
    job = _job(order, task, split, folder, notes=notes, **options)
    try:
        found = way.run(built, job)
    except way.failures as error:
        if not order.validation:
            raise
        found = {"accuracy_last": None, "error": f"{type(error).__name__}: {error}"}
    line = {
        "run": order.run, "task": order.task, "method": order.method, "seed": order.seed,
        "settings": notes["settings"], **found, "commit": commit,
    }  # fmt: skip
    write_atomically(path, json.dumps(line, indent=1) + "\n")
    return line


def read_line(path: Path) -> dict[str, Any]:
    """The line in a run's `summary.json`.

    Args:
        path: of the file.

    Raises:
        ValueError: it is damaged.
    """
    try:
        line = json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is damaged ({error}): remove its folder, and the run is done again") from error
    return dict(line)


def perform_far(wanted: Said, out: Path, options: Mapping[str, Any]) -> dict[str, Any]:
    """`perform` in a worker process, which builds everything from what it is told.

    Args:
        wanted: as `said` wrote it.
        out, options: see `perform`.
    """
    torch.set_num_threads(1)  # its own share of the cores; no result depends on it
    order, task, split, way, built = _built(wanted, out)
    return perform(order, task, split, way, built, out, **options)


def attempt(
    order: Order, task: Task, split: Split, way: Candidate, built: Any, **options: Any
) -> tuple[Cost, int | None]:
    """A moment of a run: what all of it will take, and the most memory that this process held meanwhile, in bytes.

    Args:
        order, task, split, way, built: see `perform`.
        options: `device` and `workers` of the job.
    """
    with tempfile.TemporaryDirectory() as folder:
        _forget_peak()
        with without_warnings():  # the run itself will say it
            cost = way.trial(built, _job(order, task, split, Path(folder), **options))
        return cost, _peak()


def attempt_far(wanted: Said, out: Path, options: Mapping[str, Any]) -> tuple[Cost, int | None]:
    """`attempt` in a worker process.

    Args:
        wanted: as `said` wrote it.
        out: the study's folder.
        options: see `attempt`.
    """
    torch.set_num_threads(1)
    return attempt(*_built(wanted, out), **options)


def _forget_peak() -> None:
    """Let the kernel count this process's largest memory from now on, where it can."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def _peak() -> int | None:
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        return None
    found = re.search(r"^VmHWM:\s*(\d+) kB", status, re.MULTILINE)
    return int(found[1]) * 1024 if found else None


_SPLITS: dict[str, Split] = {}
"""Of a worker process: the images of the task that it did last."""


def _built(wanted: Said, out: Path) -> tuple[Order, Task, Split, Candidate, Any]:
    def build(said: Any) -> Any:
        return from_config(said, store=out / "arguments", names=wanted.names)

    task: Task = from_config(wanted.task, store=out / "data", names=wanted.names)
    key = json.dumps(wanted.task["with"]["data"])
    if key not in _SPLITS:
        _SPLITS.clear()
        _SPLITS[key] = task.load()
    settings = {name: build(said) for name, said in wanted.order["settings"].items()}
    order = Order(**{**wanted.order, "settings": settings})
    return order, task, _SPLITS[key], build(wanted.way), build(wanted.built)


def _job(order: Order, task: Task, split: Split, folder: Path, **options: Any) -> Job:
    return Job(order.run, folder, task, split, order.seed, order.settings, order.validation, **options)
