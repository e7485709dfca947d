"""The loopback backend, which runs clients in other processes of this machine."""

from __future__ import annotations

from dataclasses import dataclass

from fl.deploy.loopback._faults import Faults
from fl.deploy.loopback._transport import ProcessTransport
from fl.deploy.loopback._worker import WorkerConfig
from fl.engine._backends import RunContext
from fl.engine._clients import ClientRegistry
from fl.engine._transport import Transport
from fl.method import Method

__all__ = ["Loopback"]


@dataclass(frozen=True)
class Loopback(Faults):
    """Backend that runs clients in other processes of this machine: `simulate(..., backend=Loopback())`.

    Use it to debug your own method: like clients on other machines, these clients share no objects with the server and
    exchange only bytes. You can also inject faults into a share of the results. Each fault is drawn from the seed, the
    kind of request, the round and the client, so a run can be repeated exactly.

    Args:
        lose: share of the clients' results that never arrive; their clients are recorded as failed. The messages that
            tell clients that a round is complete are lost with the same probability.
        repeat: share of the results that arrive twice; the second copy is recognized and dropped.
        delay: share of the results that arrive too late; their clients are recorded as failed, and the late results are
            dropped.
        seed: seed of the faults.

    Raises:
        ValueError: a share is outside [0, 1], or the shares add up to more than 1.
    """

    @property
    def faults(self) -> str | None:
        """Description of the faults that the backend injects, for `config.json`; None if it injects none."""
        return repr(self) if self.faulty else None

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
        config = WorkerConfig(method, context.task, str(context.device), folder, self)
        return ProcessTransport(config, clients, workers, context.ledger)
