"""Threads with a fixed number of intra-op threads each."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import torch

__all__ = ["create_thread_pool", "thread_pool"]


def create_thread_pool(workers: int, name: str, intra: int = 1) -> ThreadPoolExecutor:
    """Threads for work on tensors.

    Intra-op thread counts change results by rounding, so each pool fixes its own; the number of workers changes
    nothing. PyTorch hands the count of whoever set it last to threads that first use it later, so the caller's own
    count is pinned before a pool starts.

    Args:
        workers: how many threads.
        name: what their names begin with.
        intra: intra-op threads of each.
    """
    torch.set_num_threads(torch.get_num_threads())
    return ThreadPoolExecutor(workers, name, initializer=torch.set_num_threads, initargs=(intra,))


@contextlib.contextmanager
def thread_pool(workers: int, name: str) -> Iterator[ThreadPoolExecutor]:
    """Such a pool for the length of a `with` block, then threads to come have the caller's count again.

    Args:
        workers: how many threads, of one intra-op thread each.
        name: what their names begin with.
    """
    threads, pool = torch.get_num_threads(), create_thread_pool(workers, name)
    try:
        yield pool
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
        torch.set_num_threads(threads)
