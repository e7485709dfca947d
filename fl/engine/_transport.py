"""The transport interface: requests to clients, their results, and where clients run."""

from __future__ import annotations

import sysconfig
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, Self

import torch

import distillkit
from distillkit.privacy import Secret
from distillkit.rng import derive
from fl.message import Message

__all__ = [
    "BundledExchange",
    "ClientRequest",
    "ClientResult",
    "RequestBuilder",
    "RequestError",
    "RequestHeader",
    "Transport",
    "noise_of",
    "reason_of",
]


def noise_of(secret: int | None, round_number: int, owner: int | str) -> Secret:
    """Where the private noise of one side comes from in a round.

    Args:
        secret: the run's seed for it; None is the operating system's entropy.
        round_number: the round.
        owner: a client's number, or "server".
    """
    if secret is None:
        return Secret()
    return Secret(int(torch.randint(2**62, (), generator=derive(secret, round_number, owner, "secret"))))


@dataclass(frozen=True)
class RequestHeader:
    """What every client is told in one exchange, beside its own request.

    Attributes:
        verb: the method's verb that is called there, by name: "answer", "local", "evaluate", or one of a method's own.
        round: the round that the exchange belongs to; 0 before the first.
        attempt: a word that no other exchange of the run has, not even the same one when a killed round is run again.
        seed: the run's seed, from which a client derives its generators.
        secret: the run's seed for private noise, which makes a rehearsal repeat; None: the operating system's noise.
        keeps: whether what the client writes into its memory is kept; a question or a test only reads it.
    """

    verb: str
    round: int
    attempt: str
    seed: int
    secret: int | None = None
    keeps: bool = True

    @property
    def version(self) -> str:
        """The name of the memory that this exchange leaves with a client, and the token that its answer bears."""
        return f"{self.round}-{self.attempt}"


@dataclass(frozen=True)
class ClientRequest:
    """What one client is told.

    Attributes:
        message: the message, whole.
        memory: the version of its memory that counts, "" for none: the committed one, or what it wrote earlier in this
            round. All others are of rounds that failed, and the client deletes them.
        digests: the fingerprint of every kept entry in the message, by key.
        cached: the kept entries whose body the client has already, so that only the digest need travel.
    """

    message: Message
    memory: str = ""
    digests: Mapping[str, str] = field(default_factory=dict)
    cached: frozenset[str] = frozenset()


RequestBuilder = Callable[[int], ClientRequest]
"""Writes the request to a client; called once for each that is asked, when its turn comes, from any thread."""


@dataclass(frozen=True)
class ClientResult:
    """What came of asking one client: all that the server's side may know of it.

    Attributes:
        client: its number.
        reply: what it sent; None if it sent nothing.
        error: why there is no usable answer, in words for the history.
        absent: it has nothing to be asked about: no images, or nothing to test on.
        seconds: what it cost there, in CPU seconds.
        notes: its counts for the round's line of the history.
        remembers: whether the exchange left a memory with it, under the header's version.
        resent: bytes of kept entries that it had lost, against what the server knew, and that travelled once more.
        spared: bytes of its request that did not travel, because another request in the same message had them.
    """

    client: int
    reply: Message | None = None
    error: str | None = None
    absent: bool = False
    seconds: float = 0.0
    notes: Mapping[str, Any] = field(default_factory=dict)
    remembers: bool = False
    resent: int = 0
    spared: int = 0


@dataclass(frozen=True)
class BundledExchange:
    """An exchange that has no trip of its own: it rides with another, where clients are reached by messages.

    Attributes:
        header, clients, build_request: as of `Transport.exchange`.
        on_result: called with each result, in any order, before the result of the same client in the other exchange is
            yielded.
    """

    header: RequestHeader
    clients: Sequence[int]
    build_request: RequestBuilder
    on_result: Callable[[ClientResult], None]

    def run_first(self, transport: Transport) -> None:
        """Take place before the other exchange, in a `transport` where a trip costs nothing."""
        for answer in transport.exchange(self.header, self.clients, self.build_request):
            self.on_result(answer)


class Transport(Protocol):
    """Where clients run: threads of this process, other processes, other machines.

    The rounds see no more of the clients than this. A client that fails in any way is an answer with an error; what
    ends the whole exchange is raised by the iterator. It is a context: when that ends, what is under way is stopped.
    """

    def __enter__(self) -> Self:
        """Begin; the transport itself is what `with` gives."""
        ...

    def __exit__(self, *_: Any) -> None:
        """Stop what is under way, and wait for it."""
        ...

    def exchange(
        self,
        header: RequestHeader,
        clients: Sequence[int],
        build_request: RequestBuilder,
        bundled: BundledExchange | None = None,
    ) -> Iterator[ClientResult]:
        """Ask clients, and yield their answers in order; few more are under way than were yielded.

        Whatever the clients charged for privacy stands in the run's ledger before the answer is yielded.

        Args:
            header: what all of them are told.
            clients: their numbers.
            build_request: writes each one's request, when its turn comes.
            bundled: an exchange that rides with this one; it is over when the iterator ends.

        Raises:
            BudgetExhausted: a client's release would exceed the ledger's budget.
            Interrupted: the run is being stopped.
        """
        ...

    def commit(self, versions: Mapping[int, str]) -> None:
        """The round is committed; these clients' memories are now of these versions, and older ones may go.

        Called after the commit, so it may be lost: the next request says the same.
        """
        ...

    def rollback(self) -> None:
        """The round has failed; whatever it left in memories will never be named again."""
        ...

    def metadata(self) -> dict[str, str]:
        """What must stand in the checkpoint for a later `restore`, such as which machine is which client."""
        ...

    def restore(self, facts: Mapping[str, str], versions: Mapping[int, str]) -> None:
        """A run goes on: `facts` are the checkpoint's, and of all memories only `versions`, by client, count."""
        ...


_ENGINE = Path(__file__).parent
_LIBRARIES = (
    _ENGINE.parent,
    Path(distillkit.__file__).parent,
    Path(torch.__file__).parents[1],
    Path(sysconfig.get_path("stdlib")),
)


class RequestError(RuntimeError):
    """The method could not say what a client is to be told; the error is its cause."""


def reason_of(error: Exception) -> str:
    """Why a client has no usable answer: what was raised, by whom, and where in the method's code.

    Args:
        error: what came up while the client was told something or worked.
    """
    if isinstance(error, RequestError) and isinstance(error.__cause__, Exception):
        return f"was told nothing, for the server's send {reason_of(error.__cause__)}"
    return f"raised {type(error).__name__}: {error}{_where(error)}"


def _where(error: Exception) -> str:
    """The last line of the author's own that the error passed, or else of a library outside of this engine."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not Path(f.filename).is_relative_to(_ENGINE)]
    own = [f for f in frames if not any(Path(f.filename).is_relative_to(place) for place in _LIBRARIES)]
    shown = own or frames
    return f" (line {shown[-1].lineno} of {Path(shown[-1].filename).name}, in {shown[-1].name})" if shown else ""
