"""Where clients run: as threads of this process, or in others that are reached by bytes alone."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Literal

import torch

from distillkit.privacy import Ledger
from fl.deploy.loopback._transport import Processes
from fl.deploy.loopback._worker import Opening
from fl.deploy.loopback.faults import Loopback
from fl.engine._client_memory import Memories
from fl.engine._client_runtime import Site
from fl.engine._clients import Roster
from fl.engine._threads import Threads
from fl.engine._transport import Cohort
from fl.method import Method
from fl.task import LabelTask

__all__ = ["Where", "loopback_of", "open_cohort"]

Where = Literal["threads", "loopback"] | Loopback


def loopback_of(where: object) -> Loopback | None:
    """The loopback that is asked for, None for threads.

    Args:
        where: as it was given to `simulate`.

    Raises:
        TypeError, ValueError: neither.
    """
    known = {"threads": None, "loopback": Loopback()}
    if isinstance(where, Loopback):
        return where
    if not isinstance(where, str):
        raise TypeError(f"where must be 'threads', 'loopback' or a Loopback(...), got {type(where).__name__}")
    if where not in known:
        raise ValueError(f"where must be 'threads', 'loopback' or a Loopback(...), got {where!r}")
    return known[where]


def open_cohort(
    loopback: Loopback | None,
    method: Method,
    task: LabelTask,
    clients: Roster,
    workers: int,
    *,
    device: torch.device,
    memories: Path | None,
    stop: threading.Event,
    ledger: Ledger | None,
) -> Cohort:
    """The clients of a run, there where they run, as a context that ends with the run.

    Args:
        loopback: the loopback to run them in; None: threads of this process.
        method: what runs.
        task: what the labels mean.
        clients: their sets.
        workers: how many threads or processes.
        device: where clients compute.
        memories: the folder of what clients remember; None keeps it in RAM.
        stop: is set when the run is being stopped.
        ledger: of a private run.

    Raises:
        TypeError: the method cannot travel to another process; the part is named.
    """
    if loopback is None:
        return Threads(Site(method, task, clients, Memories(memories), device, stop, ledger), workers)
    folder = memories.resolve() if memories is not None else None
    return Processes(Opening(method, task, str(device), folder, loopback), clients, workers, ledger)
