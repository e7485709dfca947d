"""The two sides of a run, as a method sees them: the server, and one client."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from distillkit.normalization import Normalization
from distillkit.privacy import Event, Ledger, PrivacyError, Secret
from distillkit.rng import derive
from distillkit.sets import LabeledImages
from fl.message import Message
from fl.task import LabelTask

__all__ = ["Client", "Interrupted", "Participant", "Server"]


class Interrupted(RuntimeError):
    """A computation was asked to stop because the run is being stopped; raised by `check_running`, and not an error."""


class Participant:
    """Base of the server and a client: a participant that long loops ask whether the run is being stopped.

    Attributes:
        stop: set when the run is being stopped.
    """

    stop: threading.Event

    def check_running(self) -> None:
        """Raise `Interrupted` if the run is being stopped; long loops call it now and then."""
        if self.stop.is_set():
            raise Interrupted


@dataclass
class Server(Participant):
    """The server's side of a run, as a method sees it: the argument of everything that a method does on the server.

    The engine makes one for a run and gives the same one to every call. What a method keeps goes to `state`.

    Attributes:
        task: what the labels mean.
        shape: (C, H, W) of an image.
        normalization: how the clients' images were normalised (a set in another space is refused).
        clients: how many clients exist (not how many are drawn).
        seed: the run's seed; draw from `generator`.
        data: sets that only the server holds, by name ("proxy", "validation", ...).
        state: what the method keeps between rounds; it is checkpointed, and put back if a round fails.
        round: the round being prepared or run, from 1; 0 while the method starts.
        drawn: the clients drawn in this round, ascending.
        present: of these, whose answers to all exchanges of the round so far can be used.
        notes: numbers and strings that a method adds to this round's line of the history, by name.
        device: where the server computes; what messages hold lies there already.
        stop: is set when the run is being stopped; see `check_running`.
        ledger, secret: where a private run charges what it releases, and where its noise comes from.
        dtype: of the clients' images.
    """

    task: LabelTask
    shape: tuple[int, int, int]
    normalization: Normalization
    clients: int
    seed: int
    data: Mapping[str, LabeledImages] = field(default_factory=dict)
    state: Message = field(default_factory=Message)
    round: int = 0
    drawn: list[int] = field(default_factory=list)
    present: list[int] = field(default_factory=list)
    notes: dict[str, Any] = field(default_factory=dict)
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    stop: threading.Event = field(default_factory=threading.Event)
    ledger: Ledger | None = None
    secret: Secret = field(default_factory=Secret)
    dtype: torch.dtype = torch.float32

    def generator(self, purpose: str) -> torch.Generator:
        """A generator for one thing that the server draws in this round, named by `purpose`.

        A pure function of (seed, round, "server", purpose), so that a resumed run draws the same again.
        """
        return derive(self.seed, self.round, "server", purpose)


@dataclass
class Client(Participant):
    """One client's side, as a method sees it: all that `local`, `answer` and `evaluate` can reach but the message.

    Attributes:
        id: its number, 0 to the number of clients - 1.
        data: its training images.
        test: its own test images, if it has some.
        task: what the labels mean.
        round: the round being run, from 1; 0 for the question before it.
        seed: the run's seed; draw from `generator`.
        memory: what it keeps between the rounds in which it is drawn. A pending copy: what `local` writes becomes the
            client's memory only if its reply is folded, what others write is lost.
        stop: is set when the run is being stopped; see `check_running`.
        device: where the client computes; its data and what it is told lie there already.
        notes: counts for the round's line of the history, name -> number, summed over the clients as "noted"; they are
            no part of the reply.
        ledger, secret: in a private run what is charged (`spend`) before anything is released, and where the noise
            comes from.
    """

    id: int
    data: LabeledImages
    test: LabeledImages | None
    task: LabelTask
    round: int
    seed: int
    memory: Message = field(default_factory=Message)
    stop: threading.Event = field(default_factory=threading.Event)
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    notes: dict[str, Any] = field(default_factory=dict)
    ledger: Ledger | None = None
    secret: Secret = field(default_factory=Secret)

    def generator(self, purpose: str) -> torch.Generator:
        """A generator for one thing that this client draws in this round, named by `purpose`.

        A pure function of (seed, round, client, purpose): neither workers nor a resumption change a draw.
        """
        return derive(self.seed, self.round, self.id, purpose)

    def spend(self, mechanism: str, sigma: float, *, rate: float = 1.0, count: int = 1) -> Ledger:
        """Charge this client's records for Gaussian releases (see `privacy.Event`); call it before drawing the noise.

        Args:
            mechanism: what is released, for the reader of the ledger.
            sigma: noise standard deviation / sensitivity.
            rate: probability with which a record takes part; below 1 the records are a Poisson draw.
            count: how many releases.

        Returns:
            The ledger.

        Raises:
            BudgetExhausted: they would exceed the budget; the run ends with its last round.
            PrivacyError: the run has no ledger, because the method does not say that it is `private`.
        """
        if self.ledger is None:
            raise PrivacyError(f"{mechanism}: there is no ledger to charge; the method must say `private = True`")
        self.ledger.spend(Event(mechanism, sigma, rate, count, self.id, self.round, seeded=self.secret.seeded))
        return self.ledger
