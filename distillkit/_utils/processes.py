"""Worker processes that end with their parent."""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any, TypeVar, cast

T = TypeVar("T")


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


class WorkerPool(ThreadPoolExecutor):
    """Executor with worker processes. A killed worker fails only its own call, and is replaced.

    Each thread passes its calls to a process of its own.
    """

    def __init__(self, count: int) -> None:
        super().__init__(count, "worker pool")
        self._own, self._processes = threading.local(), list[ProcessPoolExecutor]()

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        """Call `fn(*args, **kwargs)` in a worker process; they must be picklable."""
        return super().submit(self._call, fn, *args, **kwargs)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """End the workers, as `ProcessPoolExecutor.shutdown` does."""
        super().shutdown(wait, cancel_futures=cancel_futures)
        for process in self._processes:
            process.shutdown(wait)

    def _call(self, fn: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        if getattr(self._own, "process", None) is None:
            context = multiprocessing.get_context("spawn")
            self._own.process = ProcessPoolExecutor(1, mp_context=context, initializer=exit_with_parent)
            self._processes.append(self._own.process)
        try:
            return cast("T", self._own.process.submit(fn, *args, **kwargs).result())
        except BrokenProcessPool:
            self._own.process = None
            raise


def worker_pool(count: int) -> WorkerPool:
    """Create an executor whose worker processes end when this process ends, even if this process is killed.

    If a worker is killed, its call raises `BrokenProcessPool`; the other workers and later calls go on. If this process
    is killed while a worker starts, the worker ends after its imports, without running a task.

    Args:
        count: number of workers.

    Raises:
        TypeError, ValueError: `count` is not a positive int.
    """
    from distillkit._utils import check  # which imports torch: a new worker watches its parent before that

    return WorkerPool(check.positive_int(count, "count"))
