"""The thread that the server works on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from distillkit._utils.threads import pool_of

__all__ = ["ServerThread"]

T = TypeVar("T")


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
