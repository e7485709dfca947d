"""Running the drawn clients: a thread pool with one intra-op thread each, and replies in client order."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from distillkit.privacy import BudgetExhausted
from fl.message import Message
from fl.method import Client, Interrupted

__all__ = ["Outcome", "Pool"]

T = TypeVar("T")


@dataclass(frozen=True)
class Outcome:
    """What came of one client's work: a reply or the reason why there is none, and its cost in CPU seconds."""

    client: Client
    reply: Message | None
    error: str | None
    seconds: float


class Pool:
    """A persistent pool of client threads and one server thread, each with a fixed number of intra-op threads.

    Intra-op thread counts change results by rounding, so they are fixed here and recorded by the engine; the number
    of workers changes nothing. PyTorch hands the count of whoever set it last to threads that first use it later,
    so the caller's own count is pinned before the pool starts.
    """

    def __init__(self, workers: int, server_threads: int = 1) -> None:
        torch.set_num_threads(torch.get_num_threads())
        self.workers, self.stop = workers, threading.Event()
        self._clients = ThreadPoolExecutor(workers, "client", initializer=torch.set_num_threads, initargs=(1,))
        self._server = ThreadPoolExecutor(1, "server", initializer=torch.set_num_threads, initargs=(server_threads,))

    def on_server(self, work: Callable[[], T]) -> T:
        """Run `work` on the server's thread and return its result."""
        return self._server.submit(work).result()

    def run(self, clients: Sequence[int], work: Callable[[int], tuple[Client, Message | None]]) -> Iterator[Outcome]:
        """Yield outcomes in the order of `clients`; none starts more than a window ahead of the next yield."""
        waiting: deque[tuple[int, Future[Outcome]]] = deque()
        rest = iter(clients)
        window = 2 * self.workers

        def fill() -> None:
            while len(waiting) < window:
                client = next(rest, None)
                if client is None:
                    return
                waiting.append((client, self._clients.submit(_attempt, work, client)))

        fill()
        while waiting:
            outcome = waiting.popleft()[1].result()
            fill()
            yield outcome

    def close(self) -> None:
        """Ask what is running to stop, wait for it, and end the threads."""
        self.stop.set()
        for pool in (self._clients, self._server):
            pool.shutdown(wait=True, cancel_futures=True)

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()


def _attempt(work: Callable[[int], tuple[Client, Message | None]], client: int) -> Outcome:
    started = time.thread_time()
    try:
        who, reply = work(client)
        return Outcome(who, reply, None, time.thread_time() - started)
    except (Interrupted, BudgetExhausted):
        raise
    except Exception as error:  # a client that fails in any way is counted, named and left out
        reason = f"raised {type(error).__name__}: {error}"
        return Outcome(_nobody(client), None, reason, time.thread_time() - started)


def _nobody(client: int) -> Client:
    return Client(client, None, None, None, 0, 0)  # type: ignore[arg-type]
