"""One client's side of an exchange: from its request and its data to its result."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

from distillkit.privacy import BudgetExhausted, Ledger
from fl.engine._client_memory import MemoryStore
from fl.engine._clients import ClientData, ClientRegistry
from fl.engine._devices import placed
from fl.engine._transport import ClientRequest, ClientResult, RequestHeader, noise_of, reason_of
from fl.method import Method
from fl.participants import Client, Interrupted
from fl.task import LabelTask

__all__ = ["ClientRuntime", "respond"]


@dataclass(frozen=True)
class ClientRuntime:
    """Objects that the clients of one process share.

    Attributes:
        method: the method, rebuilt from its config, or the server's own object if clients are threads of its process.
        task: meaning of the labels.
        client_data: each client's data, by client index.
        memories: the clients' memories.
        device: device on which the clients compute.
        stop: event that is set when the run is being stopped.
        ledger: ledger that the clients of a private method charge.
    """

    method: Method
    task: LabelTask
    client_data: ClientRegistry | Mapping[int, ClientData]
    memories: MemoryStore
    device: torch.device
    stop: threading.Event = field(default_factory=threading.Event)
    ledger: Ledger | None = None


def respond(
    runtime: ClientRuntime, header: RequestHeader, number: int, build_request: Callable[[], ClientRequest]
) -> ClientResult:
    """Run one client, and return its result; a client that fails gives a result with an error.

    Args:
        runtime: objects that the clients share.
        header: part of the request that is the same for all clients.
        number: index of the client.
        build_request: function that returns the client's part of the request; called on this thread unless the client
            is absent.

    Raises:
        BudgetExhausted: the ledger does not allow the client's release.
        Interrupted: the run is being stopped.
    """
    started = time.thread_time()

    def cost() -> float:
        return time.thread_time() - started

    device = runtime.device
    try:
        data = runtime.client_data[number]
        if _absent(runtime.method, header, data):
            return ClientResult(number, absent=True, seconds=cost())
        request = build_request()
        train, test = data.read()
        memory = runtime.memories.load(number, request.memory, tidy=header.keeps)
        client = Client(
            number, placed(train, device), placed(test, device), runtime.task, header.round, header.seed,
            memory=placed(memory, device), stop=runtime.stop, device=device, ledger=runtime.ledger,
            secret=noise_of(header.secret, header.round, number),
        )  # fmt: skip
        reply = runtime.method.run_on_client(header.verb, client, placed(request.message, device))
        remembers = header.keeps and len(client.memory) > 0
        if remembers:
            runtime.memories.stage(number, header.version, client.memory)
        return ClientResult(number, reply, notes=client.notes, remembers=remembers, seconds=cost())
    except (Interrupted, BudgetExhausted):
        raise
    except Exception as error:  # a client that fails in any way is counted, named and left out
        return ClientResult(number, error=reason_of(error), seconds=cost())


def _absent(method: Method, header: RequestHeader, data: ClientData) -> bool:
    """Return whether the client has no images for the request; a private method hides a lack of training images."""
    if header.verb == "evaluate":
        return data.test is None
    return not method.private and not len(data.train)
