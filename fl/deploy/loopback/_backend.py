"""The loopback backend, which runs clients in other processes of this machine."""

from __future__ import annotations

from dataclasses import dataclass

from fl.deploy.loopback._transport import ProcessTransport
from fl.deploy.loopback._worker import WorkerConfig
from fl.engine._backends import RunContext
from fl.engine._clients import ClientRegistry
from fl.engine._transport import Transport
from fl.method import Method

__all__ = ["Loopback"]


@dataclass(frozen=True)
class Loopback:
    """Backend that runs clients in other processes of this machine: `simulate(..., backend=Loopback())`.

    Use it to debug your own method: like clients on other machines, these clients share no objects with the server and
    exchange only bytes.
    """

    def open(self, method: Method, clients: ClientRegistry, workers: int, context: RunContext) -> Transport:
        """Start the processes of one run, and return the transport to them.

        Args:
            method: method of the run.
            clients: data of the clients.
            workers: number of processes.
            context: task, device and ledger of the run, and folder for the values that clients keep between rounds.

        Raises:
            TypeError: a part of the method cannot be sent to another process; the message names it.
        """
        folder = context.memories.resolve() if context.memories is not None else None
        config = WorkerConfig(method, context.task, str(context.device), folder)
        return ProcessTransport(config, clients, workers, context.ledger)
