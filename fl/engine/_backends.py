"""Where a run computes: the backend interface, and its default, threads of this process."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, Self, TypeVar, runtime_checkable

import torch

from distillkit._utils.threads import create_thread_pool
from distillkit.privacy import Ledger
from fl.engine._client_memory import MemoryStore
from fl.engine._client_runtime import ClientRuntime, respond
from fl.engine._clients import ClientRegistry
from fl.engine._transport import (
    BundledExchange,
    ClientRequest,
    ClientResult,
    RequestBuilder,
    RequestHeader,
    Transport,
)
from fl.method import Method
from fl.task import LabelTask

__all__ = ["Backend", "RunContext", "ServerThread", "ThreadTransport", "Threads", "backend_of"]

T = TypeVar("T")


@dataclass(frozen=True)
class RunContext:
    """What a backend opens its transport with, once the run's options are checked.

    Attributes:
        task: what the labels mean.
        device: where clients compute.
        memories: folder for the clients' memories if they run on this machine; None for a run that writes no files.
        stop: set when the run is being stopped.
        ledger: ledger of a private run.
    """

    task: LabelTask
    device: torch.device
    memories: Path | None
    stop: threading.Event
    ledger: Ledger | None


@runtime_checkable
class Backend(Protocol):
    """A way to run the clients of `simulate`: the value of its `backend` option."""

    @property
    def faults(self) -> str | None:
        """Description of the faults that the backend causes, which are part of the result; None for none."""
        ...

    def open(self, method: Method, clients: ClientRegistry, workers: int, context: RunContext) -> Transport:
        """Open the transport of one run.

        Args:
            method: the run's method.
            clients: the clients' data.
            workers: number of clients that run in parallel.
            context: the run's task, device, folder and ledger.

        Raises:
            TypeError: the method cannot be sent to where the clients run; the part is named.
        """
        ...


@dataclass(frozen=True)
class Threads:
    """The default backend: clients are threads of this process."""

    faults: None = None

    def open(self, method: Method, clients: ClientRegistry, workers: int, context: RunContext) -> Transport:
        """Open the transport of one run; see `Backend.open`."""
        memories = MemoryStore(context.memories)
        runtime = ClientRuntime(method, context.task, clients, memories, context.device, context.stop, context.ledger)
        return ThreadTransport(runtime, workers)


def backend_of(backend: object) -> Backend:
    """Return the backend that the option `backend` of `simulate` names.

    Raises:
        TypeError, ValueError: it is neither "threads" nor a backend.
    """
    wanted = "backend must be 'threads' or a backend such as fl.Loopback()"
    if isinstance(backend, str):
        if backend != "threads":
            raise ValueError(f"{wanted}, got {backend!r}")
        return Threads()
    if isinstance(backend, type) or not isinstance(backend, Backend):
        raise TypeError(f"{wanted}, got {type(backend).__name__}")
    return backend


class ThreadTransport:
    """A transport of persistent threads with one intra-op thread each, which share the server's method and ledger.

    Args:
        runtime: what is at hand.
        workers: how many.
    """

    def __init__(self, runtime: ClientRuntime, workers: int) -> None:
        self.runtime, self._window = runtime, 2 * workers
        self._pool = create_thread_pool(workers, "client")

    def exchange(
        self,
        header: RequestHeader,
        clients: Sequence[int],
        build_request: RequestBuilder,
        bundled: BundledExchange | None = None,
    ) -> Iterator[ClientResult]:
        """Ask the `clients`, each told `header` and what `build_request` writes; see `Transport.exchange`.

        At most two for each worker are under way ahead of the next yield. What is `bundled` goes ahead.
        """
        if bundled is not None:
            bundled.run_first(self)
        waiting: deque[Future[ClientResult]] = deque()
        rest = iter(clients)

        def fill() -> None:
            while len(waiting) < self._window and (number := next(rest, None)) is not None:
                waiting.append(self._pool.submit(self._one, header, number, build_request))

        fill()
        while waiting:
            answer = waiting.popleft().result()
            fill()
            yield answer

    def _one(self, header: RequestHeader, number: int, build_request: RequestBuilder) -> ClientResult:
        def request() -> ClientRequest:
            return build_request(number)

        return respond(self.runtime, header, number, request)

    def commit(self, versions: Mapping[int, str]) -> None:
        """Keep these `versions` of the memories; see `Transport.commit`."""
        self.runtime.memories.commit(versions)

    def rollback(self) -> None:
        """Delete what the failed round left in memories; see `Transport.rollback`."""
        self.runtime.memories.rollback()

    def metadata(self) -> dict[str, str]:
        """Nothing: the memories' files lie in the run's folder."""
        return {}

    def restore(self, facts: Mapping[str, str], versions: Mapping[int, str]) -> None:
        """Delete all memories but these `versions`; there are no `facts`. See `Transport.restore`."""
        self.runtime.memories.cut(versions)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: Any) -> None:
        """Ask what is running to stop, wait for it, and end the threads."""
        self.runtime.stop.set()
        self._pool.shutdown(wait=True, cancel_futures=True)


class ServerThread:
    """Where the server's side of the method runs: one thread, so that nothing of it needs a lock.

    A context: the thread ends with it.

    Args:
        threads: intra-op threads of its tensors' operations.
    """

    def __init__(self, threads: int = 1) -> None:
        self._pool = create_thread_pool(1, "server", threads)

    def run(self, work: Callable[[], T]) -> T:
        """Run `work` there and return its result."""
        return self._pool.submit(work).result()

    def __enter__(self) -> ServerThread:
        return self

    def __exit__(self, *_: Any) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)
