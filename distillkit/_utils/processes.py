"""Worker processes that end with their parent."""

from __future__ import annotations

import multiprocessing
import os
import threading
from concurrent.futures import ProcessPoolExecutor

__all__ = ["exit_with_parent", "worker_pool"]


def exit_with_parent() -> None:
    """End this worker process as soon as its parent ends. Call it first in a worker.

    Use it as the initializer of a process pool, because the workers of a killed process otherwise wait forever:
    `ProcessPoolExecutor(n, mp_context=get_context("spawn"), initializer=exit_with_parent)`.

    Raises:
        RuntimeError: this process was not started by `multiprocessing`.
    """
    parent = multiprocessing.parent_process()
    if parent is None:
        raise RuntimeError("exit_with_parent must be called in a worker process of multiprocessing")

    def watch() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, name="end with parent", daemon=True).start()


def worker_pool(count: int) -> ProcessPoolExecutor:
    """Create a pool of worker processes that end with this process, even if it is killed.

    A worker whose parent is killed during the worker's start ends after its imports, before any task.

    Args:
        count: number of workers.
    """
    return ProcessPoolExecutor(count, mp_context=multiprocessing.get_context("spawn"), initializer=exit_with_parent)
