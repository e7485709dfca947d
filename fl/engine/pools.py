"""Threads with a fixed number of intra-op threads each, and the one that the server works on."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch

__all__ = ["ServerThread", "pool_of"]

T = TypeVar("T")


def pool_of(workers: int, name: str, intra: int) -> ThreadPoolExecutor:
    """Threads for work on tensors.

    Intra-op thread counts change results by rounding, so each pool fixes its own, and the run records them; the number
    of workers changes nothing. PyTorch hands the count of whoever set it last to threads that first use it later, so
    the caller's own count is pinned before a pool starts.

    Args:
        workers: how many threads.
        name: what their names begin with.
        intra: intra-op threads of each.
    """
    torch.set_num_threads(torch.get_num_threads())
    return ThreadPoolExecutor(workers, name, initializer=torch.set_num_threads, initargs=(intra,))


class ServerThread:
    """Where the server's side of the method runs: one thread, so that nothing of it needs a lock.

    A context: the thread ends with it.

    Args:
        threads: intra-op threads of its tensors' operations.
    """

    def __init__(self, threads: int = 1) -> None:
        self._pool = pool_of(1, "server", threads)

    def run(self, work: Callable[[], T]) -> T:
        """Run `work` there and return its result."""
        return self._pool.submit(work).result()

    def __enter__(self) -> ServerThread:
        return self

    def __exit__(self, *_: Any) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)
