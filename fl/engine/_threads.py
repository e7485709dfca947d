"""Clients that run in threads of this process, and `ServerThread`, the thread in which the server's functions run."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from distillkit._utils.threads import create_thread_pool
from fl.engine._client_memory import MemoryStore
from fl.engine._client_runtime import ClientRuntime, respond
from fl.engine._clients import ClientRegistry
from fl.engine._run_record import data_fingerprint
from fl.engine._transport import ClientResult, RequestBuilder, RequestHeader
from fl.method import Method
from fl.participants import Scratch, Server

T = TypeVar("T")


class ThreadTransport:
    """Transport that runs clients in a pool of threads of this process. See `Transport` for the interface.

    Every client computes with one intra-op thread. The clients use the server's own method object and privacy ledger.

    Args:
        method: the method, on the server and on all clients.
        registry: the clients' data.
        workers: number of threads.
    """

    def __init__(self, method: Method, registry: ClientRegistry, workers: int) -> None:
        self.space, self.clients = registry.first, len(registry)
        self._method, self._registry, self._workers = method, registry, workers

    def fingerprint(self, key: bytes) -> str:
        """Return a fingerprint of the clients' images."""
        return data_fingerprint(self._registry, key)

    def open(self, server: Server, memories: Path | None, scratch: Scratch | None) -> None:
        """Start the threads."""
        self._stop, self._memories = server.stop, MemoryStore(memories)
        self._runtime = ClientRuntime(
            self._method,
            server.task,
            self._registry,
            self._memories,
            server.device,
            server.stop,
            server.ledger,
            scratch,
        )
        self._pool = create_thread_pool(self._workers, "client")

    def close(self) -> None:
        """Ask running clients to stop, wait until they have stopped, and end the threads."""
        self._stop.set()
        self._pool.shutdown(wait=True, cancel_futures=True)

    def exchange(
        self, header: RequestHeader, clients: Sequence[int], build_request: RequestBuilder
    ) -> Iterator[ClientResult]:
        """Run the clients, and yield their results. At most two clients per worker are queued or running at a time."""
        waiting, rest = deque[Future[ClientResult]](), iter(clients)

        def fill() -> None:
            while len(waiting) < 2 * self._workers and (client := next(rest, None)) is not None:
                request = partial(build_request, client)
                waiting.append(self._pool.submit(respond, self._runtime, header, client, request))

        fill()
        while waiting:
            result = waiting.popleft().result()
            fill()
            yield result

    def commit(self, versions: Mapping[int, str]) -> None:
        """Commit one version of the memory of each client in `versions`, and delete older versions."""
        self._memories.commit(versions)

    def rollback(self) -> None:
        """Delete the memories that clients stored in the failed round."""
        self._memories.rollback()

    def metadata(self) -> dict[str, str]:
        """Return an empty mapping; a checkpoint needs no values from this transport."""
        return {}

    def require_memories(self, versions: Mapping[int, str]) -> None:
        """Read every client's memory once, so that a damaged one is found before the run goes on."""
        for client, version in versions.items():
            self._memories.load(client, version, delete_others=False)

    def restore(self, metadata: Mapping[str, str], versions: Mapping[int, str]) -> None:
        """Delete all stored versions of client memories that are not in `versions`."""
        self._memories.restore(versions)


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
