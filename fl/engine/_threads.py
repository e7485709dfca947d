"""Clients that run in threads of this process, and `ServerThread`, the thread in which the server's functions run."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Self, TypeVar

import torch

from distillkit._utils.threads import create_thread_pool
from distillkit.privacy import Ledger
from fl.engine._client_runtime import ClientRuntime, respond
from fl.engine._transport import ClientResult, Exchange
from fl.participants import Scratch
from fl.task import LabelTask

__all__ = ["RunContext", "ServerThread", "ThreadTransport"]

T = TypeVar("T")


@dataclass(frozen=True)
class RunContext:
    """Validated options of a run that are needed to open the connection to the clients.

    Attributes:
        task: label task of the run, such as `Classification`.
        device: device on which clients compute.
        memories: folder for the data that clients keep between rounds, if clients run on this machine; None if the run
            writes no files.
        stop: event that is set when the run is being stopped.
        ledger: privacy ledger of a run with a differentially private method; None for other methods.
        scratch: folder in which clients save the state of long computations, to continue them in a resumed run; None if
            the run writes no files.
    """

    task: LabelTask
    device: torch.device
    memories: Path | None
    stop: threading.Event
    ledger: Ledger | None
    scratch: Scratch | None = None


class ThreadTransport:
    """Transport that runs clients in a pool of threads of this process.

    Every client computes with one intra-op thread. The clients use the server's own method object and privacy ledger.

    Args:
        runtime: method, data and other objects that all clients use.
        workers: number of threads.
    """

    def __init__(self, runtime: ClientRuntime, workers: int) -> None:
        self.runtime, self._window = runtime, 2 * workers
        self._pool = create_thread_pool(workers, "client")

    def exchange(self, exchange: Exchange) -> Iterator[ClientResult]:
        """Run the clients of `exchange`, and yield their results in the order of `exchange.clients`.

        At most two clients per worker are queued or running at a time.
        """
        waiting: deque[Future[ClientResult]] = deque()
        rest = iter(exchange.clients)

        def fill() -> None:
            while len(waiting) < self._window and (client := next(rest, None)) is not None:
                request = partial(exchange.build_request, client)
                waiting.append(self._pool.submit(respond, self.runtime, exchange.header, client, request))

        fill()
        while waiting:
            result = waiting.popleft().result()
            fill()
            yield result

    def commit(self, versions: Mapping[int, str]) -> None:
        """Commit one version of the memory of each client in `versions`, and delete older versions.

        A client's memory holds the values that the client keeps between rounds.

        Args:
            versions: name of the committed version, by client index.
        """
        self.runtime.memories.commit(versions)

    def rollback(self) -> None:
        """Delete the memories that clients stored in the failed round."""
        self.runtime.memories.rollback()

    def metadata(self) -> dict[str, str]:
        """Return an empty mapping; a checkpoint needs no values from this transport."""
        return {}

    def require_memories(self, versions: Mapping[int, str]) -> None:
        """Read every client's memory once, so that a damaged one is found before the run goes on."""
        for client, version in versions.items():
            self.runtime.memories.load(client, version, delete_others=False)

    def restore(self, metadata: Mapping[str, str], versions: Mapping[int, str]) -> None:
        """Delete all stored versions of client memories that are not in `versions`.

        Args:
            metadata: not used.
            versions: by client index, the name of the version of the client's memory after the last completed round.
        """
        self.runtime.memories.restore(versions)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: Any) -> None:
        """Ask running clients to stop, wait until they have stopped, and end the threads."""
        self.runtime.stop.set()
        self._pool.shutdown(wait=True, cancel_futures=True)


class ServerThread:
    """Thread that runs all of the method's server functions, so that these functions need no locks.

    Use this class as a context manager. The thread ends when the `with` block ends.

    Args:
        threads: number of intra-op threads for the thread's tensor operations.
    """

    def __init__(self, threads: int = 1) -> None:
        self._pool = create_thread_pool(1, "server", threads)

    def run(self, work: Callable[[], T]) -> T:
        """Run `work` on the server's thread, wait for it, and return its result."""
        return self._pool.submit(work).result()

    def __enter__(self) -> ServerThread:
        return self

    def __exit__(self, *_: Any) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)
