"""All that happens at one client: from what it was told, and from what lies there, to its answer."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from distillkit.privacy import BudgetExhausted, Ledger
from fl.engine._client_memory import Memories
from fl.engine._devices import placed
from fl.engine._failures import reason_of
from fl.engine._transport import Answer, Head, Letter, noise_of
from fl.engine.client_data import Holding
from fl.method import Method
from fl.participants import Client, Interrupted
from fl.task import LabelTask

__all__ = ["Site", "respond"]


@dataclass(frozen=True)
class Site:
    """What is at hand where clients run.

    Attributes:
        method: built anew from its construction, or the server's own object where clients are threads beside it.
        task: what the labels mean.
        holdings: each client's data, by number.
        memories: what the clients remember.
        device: where they compute.
        stop: set when the run is being stopped.
        ledger: what a private client charges.
    """

    method: Method
    task: LabelTask
    holdings: Sequence[Holding] | Mapping[int, Holding]
    memories: Memories
    device: torch.device
    stop: threading.Event = field(default_factory=threading.Event)
    ledger: Ledger | None = None


def respond(site: Site, head: Head, number: int, letter: Callable[[], Letter]) -> Answer:
    """A client's answer, in whatever way it comes about: one that fails is an answer with an error.

    Args:
        site: what is at hand where the client runs.
        head: what every client is told in this exchange.
        number: the client's.
        letter: gives what this client is told; called if there is anybody to read it, on the thread that this runs on.

    Raises:
        BudgetExhausted: what it would release, the ledger does not allow.
        Interrupted: the run is being stopped.
    """
    started = time.thread_time()

    def cost() -> float:
        return time.thread_time() - started

    try:
        held = site.holdings[number]
        if _absent(site.method, head, held):
            return Answer(number, absent=True, seconds=cost())
        told = letter()
        train, test = held.read()
        client = Client(
            number, placed(train, site.device), placed(test, site.device), site.task, head.round, head.seed,
            memory=placed(site.memories.load(number, told.memory, tidy=head.keeps), site.device), stop=site.stop,
            device=site.device, ledger=site.ledger, secret=noise_of(head.secret, head.round, number),
        )  # fmt: skip
        reply = site.method.act(head.verb, client, placed(told.message, site.device))
        remembers = head.keeps and len(client.memory) > 0
        if remembers:
            site.memories.stage(number, head.version, client.memory)
        return Answer(number, reply, notes=client.notes, remembers=remembers, seconds=cost())
    except (Interrupted, BudgetExhausted):
        raise
    except Exception as error:  # a client that fails in any way is counted, named and left out
        return Answer(number, error=reason_of(error), seconds=cost())


def _absent(method: Method, head: Head, held: Holding) -> bool:
    """Whether there is nothing to ask about. That a client has no images is private, if anything is."""
    if head.verb == "evaluate":
        return held.test is None
    return not method.private and not len(held.train)
