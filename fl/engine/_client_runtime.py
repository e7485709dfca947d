"""All that happens at one client: from what it was told, and from what lies there, to its answer."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from distillkit.privacy import BudgetExhausted, Ledger
from fl.engine._client_memory import MemoryStore
from fl.engine._clients import ClientData
from fl.engine._devices import placed
from fl.engine._transport import ClientRequest, ClientResult, RequestHeader, noise_of, reason_of
from fl.method import Method
from fl.participants import Client, Interrupted
from fl.task import LabelTask

__all__ = ["ClientRuntime", "respond"]


@dataclass(frozen=True)
class ClientRuntime:
    """What is at hand where clients run.

    Attributes:
        method: built anew from its construction, or the server's own object where clients are threads beside it.
        task: what the labels mean.
        client_data: each client's data, by number.
        memories: what the clients remember.
        device: where they compute.
        stop: set when the run is being stopped.
        ledger: what a private client charges.
    """

    method: Method
    task: LabelTask
    client_data: Sequence[ClientData] | Mapping[int, ClientData]
    memories: MemoryStore
    device: torch.device
    stop: threading.Event = field(default_factory=threading.Event)
    ledger: Ledger | None = None


def respond(
    runtime: ClientRuntime, header: RequestHeader, number: int, request: Callable[[], ClientRequest]
) -> ClientResult:
    """A client's answer, in whatever way it comes about: one that fails is an answer with an error.

    Args:
        runtime: what is at hand where the client runs.
        header: what every client is told in this exchange.
        number: the client's.
        request: gives what this client is told; called if there is anybody to read it, on the thread that this runs on.

    Raises:
        BudgetExhausted: what it would release, the ledger does not allow.
        Interrupted: the run is being stopped.
    """
    started = time.thread_time()

    def cost() -> float:
        return time.thread_time() - started

    try:
        held = runtime.client_data[number]
        if _absent(runtime.method, header, held):
            return ClientResult(number, absent=True, seconds=cost())
        told = request()
        train, test = held.read()
        memory = placed(runtime.memories.load(number, told.memory, tidy=header.keeps), runtime.device)
        client = Client(
            number,
            placed(train, runtime.device),
            placed(test, runtime.device),
            runtime.task,
            header.round,
            header.seed,
            memory=memory,
            stop=runtime.stop,
            device=runtime.device,
            ledger=runtime.ledger,
            secret=noise_of(header.secret, header.round, number),
        )
        reply = runtime.method.run_on_client(header.verb, client, placed(told.message, runtime.device))
        remembers = header.keeps and len(client.memory) > 0
        if remembers:
            runtime.memories.stage(number, header.version, client.memory)
        return ClientResult(number, reply, notes=client.notes, remembers=remembers, seconds=cost())
    except (Interrupted, BudgetExhausted):
        raise
    except Exception as error:  # a client that fails in any way is counted, named and left out
        return ClientResult(number, error=reason_of(error), seconds=cost())


def _absent(method: Method, header: RequestHeader, held: ClientData) -> bool:
    """Whether there is nothing to ask about. That a client has no images is private, if anything is."""
    if header.verb == "evaluate":
        return held.test is None
    return not method.private and not len(held.train)
