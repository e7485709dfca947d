"""Worker processes that end with their parent."""

from __future__ import annotations

import multiprocessing
import os
import threading
from concurrent.futures import ProcessPoolExecutor

__all__ = ["exit_with_parent", "worker_pool"]


def exit_with_parent() -> None:
    """End this worker process as soon as its parent process ends.

    Use it as the initializer of a process pool: `ProcessPoolExecutor(n, mp_context=get_context("spawn"),
    initializer=exit_with_parent)`. Otherwise, if the parent is killed, its workers wait forever.
    """
    parent = multiprocessing.parent_process()
    if parent is None:
        raise RuntimeError("exit_with_parent must be called in a worker process of multiprocessing")

    def watch() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, name="end with parent", daemon=True).start()


def worker_pool(count: int) -> ProcessPoolExecutor:
    """Create a pool of worker processes that end when this process ends, even if this process is killed.

    If this process is killed while a worker starts, the worker ends after its imports, without running a task.

    Args:
        count: number of workers.

    Raises:
        TypeError, ValueError: `count` is not a positive int.
    """
    from distillkit._utils import check  # which imports torch: a new worker watches its parent before that

    count = check.positive_int(count, "count")
    return ProcessPoolExecutor(count, mp_context=multiprocessing.get_context("spawn"), initializer=exit_with_parent)
