"""Thread pools with a fixed number of intra-op threads."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import torch


def create_thread_pool(workers: int, name: str, intra: int = 1) -> ThreadPoolExecutor:
    """Create a thread pool for tensor computations.

    Each worker uses a fixed number of intra-op threads, because this number affects rounding. The number of workers
    does not affect results. In PyTorch, a thread that has not set its number of intra-op threads may get the number
    that a worker sets. Therefore this function first sets the calling thread's number to its current value.
    """
    torch.set_num_threads(torch.get_num_threads())
    return ThreadPoolExecutor(workers, name, initializer=set_intra_op_threads, initargs=(intra,))


def set_intra_op_threads(number: int) -> None:
    """Set the number of intra-op threads of the calling thread, whatever numbers other threads set later."""
    torch.get_num_threads()  # the first call in a thread takes over the number that any thread has set last
    torch.set_num_threads(number)


@contextlib.contextmanager
def thread_pool(workers: int, name: str) -> Iterator[ThreadPoolExecutor]:
    """Provide a thread pool during a `with` block, and restore the caller's number of intra-op threads at its end."""
    threads, pool = torch.get_num_threads(), create_thread_pool(workers, name)
    try:
        yield pool
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
        torch.set_num_threads(threads)
