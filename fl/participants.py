"""The participants of a run, `Server` and `Client`, which the functions of a method get as arguments."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from distillkit.normalization import Normalization
from distillkit.privacy import Event, Ledger, PrivacyError, Secret, as_secret
from distillkit.rng import derive
from distillkit.sets import LabeledImages
from fl.message import Message
from fl.task import LabelTask


class Interrupted(RuntimeError):
    """Exception that `check_running` raises when the run is being stopped. It does not indicate an error."""


@dataclass(frozen=True)
class Scratch:
    """Folder for intermediate states of a long computation, so that an interrupted run can continue the computation.

    When a resumed run repeats the interrupted round, the computation continues from the files in the folder. The files
    are deleted once the result of the round has been saved.

    Attributes:
        folder: path of the folder, which may not exist yet.
        deadline: time (`time.time()`) after which the computation stops as soon as its state is saved; None: no limit.
        cache: folder of results that runs with equal inputs share. It is not deleted. None: no results are shared.
    """

    folder: Path
    deadline: float | None = None
    cache: Path | None = None

    @property
    def late(self) -> bool:
        """True if the attribute `deadline`, the time after which unfinished work stops, has passed."""
        return self.deadline is not None and time.time() >= self.deadline


class Participant:
    """Base class of `Server` and `Client`.

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
    """The server of a run. All functions of a method that run on the server get this object as argument.

    The engine makes one object for a run and passes it to every call. A method keeps its values in `state`.

    Attributes:
        task: classification task, which defines the form of the labels, the loss and the metrics.
        shape: (C, H, W) of an image.
        normalization: normalization of the clients' images. Sets with another normalization are refused.
        clients: total number of clients, whether drawn in this round or not.
        seed: the run's seed. Draw random values from `generator` instead of using the seed directly.
        data: sets that only the server holds, by name ("proxy", "validation", ...).
        state: values that the method keeps between rounds. They are part of the checkpoint, and are restored if a round
            fails.
        round: index of the round being prepared or run, from 1; 0 while the method starts.
        drawn: indices of the clients drawn in this round, in ascending order; empty if the method draws them itself
            (`Method.draw`), because its draw is secret.
        present: indices of the drawn clients that have sent a usable reply in every exchange of this round so far;
            empty if `drawn` is.
        notes: JSON values by name, which are written to this round's row of the history. A method may add to them.
        device: device on which the server computes; the tensors of messages are already on it.
        stop: event that is set when the run is being stopped; `check_running` tests it.
        ledger: in a private run, the ledger that records the privacy cost of releases.
        secret: in a private run, the source of random noise. A method that draws a round's clients in secret
            uses it, too.
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
        """Return a generator for random draws of the server in this round.

        The draws depend only on the run's seed, the round and `purpose`, so a resumed run draws the same values again.

        Args:
            purpose: name of the draws. Use different names for independent draws in the same round.
        """
        return derive(self.seed, self.round, "server", purpose)


@dataclass
class Client(Participant):
    """One client of a run. A method's functions that run on the client can access only this object and the message.

    Attributes:
        id: index of the client, from 0 to the number of clients - 1.
        data: training images of the client.
        test: the client's own test images, if any.
        task: classification task, which defines the form of the labels, the loss and the metrics.
        round: index of the round being run; 0 for the query before round 1.
        seed: the run's seed. Draw random values from `generator` instead of using the seed directly.
        memory: values that the client keeps between the rounds in which it is drawn. Changes by `Method.local` are kept
            only if the client's reply is used. Changes by other functions are discarded.
        stop: event that is set when the run is being stopped; `check_running` tests it.
        device: device on which the client computes; its data and the message are already on it.
        notes: at most 100 numbers, by name, which are not part of the reply and are dropped in private runs and under
            secure sums. Their sums over the clients are written to the column "noted" of the round's row of the
            history.
        ledger: in a private run, the ledger that records the privacy cost of releases. Call `spend` before each
            release.
        secret: in a private run, the source of random noise.
        scratch: folder for the state of unfinished work; None if the run has no folder, or is private.
        seconds: CPU seconds that went into saved work before this request, for example into a condensation that was
            interrupted. Set if the client loads the saved work in this request, instead of doing the work again. The
            column `client_seconds` of the history includes these seconds.
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
    scratch: Scratch | None = None
    seconds: float = 0.0

    def generator(self, purpose: str) -> torch.Generator:
        """Return a generator for random draws of this client in this round.

        The draws depend only on the run's seed, the round, the client and `purpose`. They are the same with any number
        of workers, and in a resumed run.

        Args:
            purpose: name of the draws. Use different names for independent draws in the same round.
        """
        return derive(self.seed, self.round, self.id, purpose)

    def without_records(self) -> Client:
        """Return a copy of this client without training and test images, for code that must not read them."""
        return replace(self, data=self.data[torch.arange(0)], test=None)

    def spend(self, mechanism: str, sigma: float, *, rate: float = 1.0, count: int = 1) -> Ledger:
        """Charge the privacy cost of noised releases of this client's records to the ledger.

        Call it before noise is drawn.

        Args:
            mechanism: name of the mechanism that releases the values, for readers of the ledger.
            sigma: noise multiplier, that is, the noise's standard deviation divided by the sensitivity.
            rate: probability with which each record takes part in a release (Poisson sampling); 1: all records take
                part.
            count: number of releases.

        Returns:
            The ledger.

        Raises:
            BudgetExhausted: the releases would exceed the budget; the run ends after the last completed round.
            PrivacyError: the run has no ledger, because the method is not `private`.
        """
        if self.ledger is None:
            raise PrivacyError(f"{mechanism}: the run has no ledger to charge; the method must have `private = True`")
        seeded = as_secret(self.secret).seeded
        self.ledger.spend(Event(mechanism, sigma, rate, count, self.id, self.round, seeded=seeded))
        return self.ledger
