"""The two kinds of participants in a run, server and client, as a method sees them."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
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
    """Signal that the run is being stopped. `check_running` raises it; it is not an error."""


class Participant:
    """Base of `Server` and `Client`.

    Attributes:
        stop: event that is set when the run is being stopped.
    """

    stop: threading.Event

    def check_running(self) -> None:
        """Raise `Interrupted` if the run is being stopped. Call it regularly in long loops."""
        if self.stop.is_set():
            raise Interrupted


@dataclass
class Server(Participant):
    """The server of a run, as a method sees it: the argument of all functions that run on the server.

    The engine makes one server for a run and passes it to every call. A method keeps values in `state`.

    Attributes:
        task: meaning of the labels.
        shape: (C, H, W) of an image.
        normalization: normalization of the clients' images; a set with another normalization is refused.
        clients: total number of clients, whether drawn in this round or not.
        seed: the run's seed; draw from `generator`.
        data: sets that only the server holds, by name ("proxy", "validation", ...).
        state: values that the method keeps between rounds; checkpointed, and restored if a round fails.
        round: index of the round being prepared or run, from 1; 0 while the method starts.
        drawn: indices of the clients drawn in this round, in ascending order.
        present: indices of the drawn clients whose replies to all exchanges of the round so far are usable.
        notes: numbers and strings, by name, that a method adds to this round's row of the history.
        device: device on which the server computes; the tensors of messages are already on it.
        stop: event that is set when the run is being stopped; see `check_running`.
        ledger: in a private run, the ledger to which releases are charged.
        secret: in a private run, the source of the noise.
        dtype: dtype of the clients' images.
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
        """Return a generator for one random draw of the server in this round, named by `purpose`.

        The draw is a pure function of (seed, round, "server", purpose), so a resumed run draws the same values again.
        """
        return derive(self.seed, self.round, "server", purpose)


@dataclass
class Client(Participant):
    """One client, as a method sees it. `local`, `answer` and `evaluate` can access only this object and the message.

    Attributes:
        id: index of the client, from 0 to the number of clients - 1.
        data: training images of the client.
        test: the client's own test images, if any.
        task: meaning of the labels.
        round: index of the round being run; 0 for the query before round 1.
        seed: the run's seed; draw from `generator`.
        memory: values that the client keeps between the rounds in which it is drawn. This is a pending copy: changes
            made by `local` become the client's memory only if its reply is used; other changes are discarded.
        stop: event that is set when the run is being stopped; see `check_running`.
        device: device on which the client computes; its data and the message are already on it.
        notes: counts by name, not part of the reply. Their sums over the clients are the column "noted" of the round's
            row of the history.
        ledger: in a private run, the ledger to charge (`spend`) before anything is released.
        secret: in a private run, the source of the noise.
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
        """Return a generator for one random draw of this client in this round, named by `purpose`.

        The draw is a pure function of (seed, round, client, purpose): neither the number of workers nor a resumption
        changes it.
        """
        return derive(self.seed, self.round, self.id, purpose)

    def without_records(self) -> Client:
        """Return a copy of this client with an empty training set, in memory of its own, and without a test set."""
        return replace(self, data=self.data[torch.arange(0)], test=None)

    def spend(self, mechanism: str, sigma: float, *, rate: float = 1.0, count: int = 1) -> Ledger:
        """Charge releases of this client's records to the ledger (see `privacy.Event`), before their noise is drawn.

        Args:
            mechanism: name of the release, for readers of the ledger.
            sigma: noise standard deviation / sensitivity.
            rate: probability with which a record takes part; below 1, the records are a Poisson sample.
            count: number of releases.

        Returns:
            The ledger.

        Raises:
            BudgetExhausted: the releases would exceed the budget; the run ends after the last completed round.
            PrivacyError: the run has no ledger, because the method is not `private`.
        """
        if self.ledger is None:
            raise PrivacyError(f"{mechanism}: there is no ledger to charge; the method must say `private = True`")
        self.ledger.spend(Event(mechanism, sigma, rate, count, self.id, self.round, seeded=self.secret.seeded))
        return self.ledger
