"""The loopback backend."""

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
    """Backend that runs clients in other processes, reached by bytes alone: `simulate(..., backend=Loopback())`.

    Use it to debug a method of your own: what works here shares nothing with the server, as on other machines. Faults
    can be requested as shares of the results, each drawn from (seed, verb, round, client), so that they repeat.

    Args:
        lose: never arrive; the client is recorded as failed. The notice of a committed round is lost as often.
        repeat: arrive twice; the second is recognised and dropped.
        delay: arrive after their exchange is over; the client is recorded as failed, and the result is dropped when it
            comes.
        seed: of the faults.

    Raises:
        ValueError: shares outside [0, 1], or more than 1 in all.
    """

    @property
    def faults(self) -> str | None:
        """Description of the requested faults; None without any."""
        return repr(self) if self.faulty else None

    def open(self, method: Method, clients: ClientRegistry, workers: int, context: RunContext) -> Transport:
        """Open the transport of one run.

        Args:
            method: the run's method.
            clients: the clients' data.
            workers: number of processes.
            context: the run's task, device, folder and ledger.

        Raises:
            TypeError: the method cannot be sent to another process; the part is named.
        """
        folder = context.memories.resolve() if context.memories is not None else None
        config = WorkerConfig(method, context.task, str(context.device), folder, self)
        return ProcessTransport(config, clients, workers, context.ledger)
