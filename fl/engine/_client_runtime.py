"""The client's side of a request: pass the request and the client's data to the method, and return the result."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import torch

from distillkit.privacy import BudgetExhausted, Ledger
from distillkit.privacy._journal import LedgerWriteError
from distillkit.privacy.validation._arguments import refuse_derived
from fl.engine._client_memory import MemoryStore
from fl.engine._clients import ClientData, ClientRegistry
from fl.engine._contract import ChangedInput, Unchanged
from fl.engine._devices import placed
from fl.engine._transport import (
    ClientRequest,
    ClientResult,
    RequestError,
    RequestHeader,
    noise_of,
    reason_of,
)
from fl.method import Method
from fl.participants import Client, Interrupted, Scratch
from fl.task import LabelTask

FAILED_PRIVATELY = "failed; the reason is in its own log, because it may depend on private records"
"""Text that the server gets if a client of a private method fails, for any reason."""


@dataclass(frozen=True)
class ClientRuntime:
    """Objects that all clients in one process use: the method, the clients' data and memories, and the device.

    Attributes:
        method: the server's own method object if clients are threads of the server's process; otherwise a copy built
            from the method's config.
        task: label task of the run, such as `Classification`.
        client_data: each client's data, by client index.
        memories: store of the values that clients keep between rounds.
        device: device on which the clients compute.
        stop: event that is set when the run is being stopped.
        ledger: privacy ledger to which the clients of a private method charge what they release; None for other
            methods.
        scratch: folder in which clients save the state of long computations; None if the run has no folder.
    """

    method: Method
    task: LabelTask
    client_data: ClientRegistry | Mapping[int, ClientData]
    memories: MemoryStore
    device: torch.device
    stop: threading.Event = field(default_factory=threading.Event)
    ledger: Ledger | None = None
    scratch: Scratch | None = None


def respond(
    runtime: ClientRuntime, header: RequestHeader, number: int, build_request: Callable[[], ClientRequest]
) -> ClientResult:
    """Run one client's part of an exchange, and return its result. If the client fails, the result holds the error."""
    started = time.thread_time()

    def cost(client: Client | None = None) -> float:
        return time.thread_time() - started + (0.0 if client is None else client.seconds)

    device = runtime.device
    try:
        data = runtime.client_data[number]
        if _absent(runtime.method, header, data):
            return ClientResult(number, absent=True, seconds=cost())
        request = build_request()
        if runtime.method.private:
            refuse_derived(data.train.info, f"clients[{number}]")
        train, test = data.read()
        memory = runtime.memories.load(number, request.memory, delete_others=header.keeps)
        client = Client(
            number, placed(train, device), placed(test, device), runtime.task, header.round, header.seed,
            memory=placed(memory, device), stop=runtime.stop, device=device, ledger=runtime.ledger,
            secret=noise_of(header.secret, header.round, number), scratch=_scratch(runtime, header, number),
        )  # fmt: skip
        message = placed(request.message, device)
        with Unchanged(runtime.method, header.verb, {"message": message}, client):
            reply = runtime.method.run_on_client(header.verb, client, message)
        remembers = header.keeps and len(client.memory) > 0
        if remembers:
            runtime.memories.stage(number, header.version, client.memory)
        hidden = runtime.method.private or runtime.method.sealed  # notes have neither noise nor a mask
        notes = {} if hidden else client.notes
        return ClientResult(number, reply, notes=notes, remembers=remembers, seconds=cost(client))
    except (ChangedInput, LedgerWriteError):
        raise
    except Exception as error:  # whatever fails, the history lists the client, and its reply is not used
        _end_run(runtime, error)
        return ClientResult(number, error=_shown_reason(runtime.method, error), seconds=cost())


def _end_run(runtime: ClientRuntime, error: Exception) -> None:
    """Raise `error` again if it ends the run: the run is being stopped, or its ledger has refused a charge.

    A client's code may raise errors of the same classes, perhaps because of its records. They do not end the run.
    """
    if isinstance(error, Interrupted) and (runtime.stop.is_set() or (runtime.scratch and runtime.scratch.late)):
        raise error
    if isinstance(error, BudgetExhausted) and error._ledger == id(runtime.ledger):
        raise error


def _scratch(runtime: ClientRuntime, header: RequestHeader, number: int) -> Scratch | None:
    """Return the folder for the unfinished work of the client with index `number` in the round of the request.

    The result is None if the client is not asked to train, if the run has no folder, or if the method is private.
    """
    if runtime.scratch is None or runtime.method.private or header.verb != "local":
        return None
    return replace(runtime.scratch, folder=runtime.scratch.folder / str(header.round) / str(number))


def _shown_reason(method: Method, error: Exception) -> str:
    """Return the text that tells the server why a client failed.

    For a differentially private method, this text is always the same sentence, and the actual reason is only logged on
    the client's machine. A `RequestError` means that the server failed to build the request. Its reason is returned for
    every method.
    """
    if not method.private or isinstance(error, RequestError):
        return reason_of(error)
    logging.getLogger(__name__).warning("%s", reason_of(error))
    return FAILED_PRIVATELY


def _absent(method: Method, header: RequestHeader, data: ClientData) -> bool:
    """Return whether the client takes no part in an exchange because it has no images.

    An evaluation needs test images, and all other requests need training images. There is one exception: clients of a
    private method train even without images, so that a missing reply does not reveal an empty dataset.
    """
    if header.verb == "evaluate":
        return data.test is None
    return not method.private and not len(data.train)
