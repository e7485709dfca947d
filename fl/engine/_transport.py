"""The transport interface, which sends requests to clients and returns their results."""

from __future__ import annotations

import sysconfig
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol, Self

import torch

import distillkit
from distillkit.privacy import Secret
from distillkit.rng import derive
from fl.message import Message

__all__ = [
    "ClientRequest", "ClientResult", "Exchange", "RequestBuilder", "RequestError", "RequestHeader", "Transport",
    "noise_of", "reason_of",
]  # fmt: skip


def noise_of(secret: int | None, round_number: int, owner: int | str) -> Secret:
    """Return the source of the private noise of one client, or of the server, in a round.

    Args:
        secret: the run's seed for private noise; None for the operating system's entropy.
        round_number: index of the round.
        owner: index of the client, or "server".
    """
    if secret is None:
        return Secret()
    return Secret(int(torch.randint(2**62, (), generator=derive(secret, round_number, owner, "secret"))))


@dataclass(frozen=True)
class RequestHeader:
    """The part of a request that is the same for all clients of an exchange.

    Attributes:
        verb: name of the method's function that the clients call: "answer", "local", "evaluate", or an additional
            exchange of the method.
        round: index of the round, from 1; 0 before round 1.
        attempt: identifier of the exchange, unique even if a killed round is repeated.
        seed: the run's seed, from which a client derives its generators.
        secret: the run's seed for private noise, to repeat a run; None for noise from the operating system.
        keeps: whether a memory that a client writes is kept. It is False for queries and evaluations, which only read
            the memory.
    """

    verb: str
    round: int
    attempt: str
    seed: int
    secret: int | None = None
    keeps: bool = True

    @property
    def version(self) -> str:
        """Version name of a memory that a client writes in this exchange. It also identifies the exchange's results."""
        return f"{self.round}-{self.attempt}"


@dataclass(frozen=True)
class ClientRequest:
    """The part of a request that concerns one client.

    Attributes:
        message: the whole message, including entries that the client already has.
        memory: version of the client's memory to use: the committed version, or one that the client wrote earlier in
            this round; "" if the client has no memory. The client deletes all other versions, which belong to failed
            rounds.
        digests: digest of every cacheable entry in the message, by key.
        cached: keys of the entries that the client has in its cache, so that only their digests are sent.
    """

    message: Message
    memory: str = ""
    digests: Mapping[str, str] = field(default_factory=dict)
    cached: frozenset[str] = frozenset()


RequestBuilder = Callable[[int], ClientRequest]
"""Function that builds the request to a client, given the client's index.

It is called once for each client, when the client's turn comes, and may be called on any thread.
"""


@dataclass(frozen=True)
class ClientResult:
    """Result of one request, with all information that the server's side receives about the client's work.

    Attributes:
        client: index of the client.
        reply: message that the client sent, if any.
        error: reason why there is no usable reply, as text for the history; None if the client did not fail.
        absent: whether the client has no images for the request, that is, for training or for evaluation.
        seconds: CPU seconds that the client took.
        notes: the client's counts for the round's row of the history, by name.
        remembers: whether the client wrote a memory; `RequestHeader.version` is the version of this memory.
        resent: bytes of cached entries that were sent again because the client had lost them.
        spared: bytes of the client's request that were not sent, because another request in the same message contained
            them.
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
class Exchange:
    """Requests of one kind to several clients.

    Attributes:
        header: part of the request that is the same for all clients.
        clients: indices of the clients, in the order in which the server uses their results.
        build_request: function that builds the request to a client; see `RequestBuilder`.
        on_result: function that receives the results of a bundled exchange, in any order. It receives a client's result
            before the main exchange yields its own result of that client. For a main exchange, it is None.
    """

    header: RequestHeader
    clients: Sequence[int]
    build_request: RequestBuilder
    on_result: Callable[[ClientResult], None] | None = None

    def run_alone(self, transport: Transport) -> None:
        """Run a bundled exchange by itself over the `transport`, and pass each result to `on_result`."""
        assert self.on_result is not None
        for result in transport.exchange(replace(self, on_result=None)):
            self.on_result(result)


class Transport(Protocol):
    """Connection of a run to its clients: in threads of this process, in other processes, or on other machines.

    The engine reaches the clients only through this interface. If one client fails, its result holds the error; an
    exception from the iterator of `exchange` ends the whole exchange. Use a transport as a context manager: leaving
    the context stops running clients.
    """

    def __enter__(self) -> Self:
        """Open the transport, and return it."""

    def __exit__(self, *_: Any) -> None:
        """Ask running clients to stop, and wait until they have stopped."""

    def exchange(self, exchange: Exchange, bundled: Exchange | None = None) -> Iterator[ClientResult]:
        """Send a request to each client of `exchange`, and yield the results in the order of its clients.

        Only a few clients are started before the caller consumes earlier results. A client's privacy charges are in the
        run's ledger before its result is yielded.

        Args:
            exchange: the main exchange; its results are yielded.
            bundled: second exchange, sent together with the main exchange if this saves messages. Its results are
                passed to its `on_result`, and are complete when the iterator ends.

        Raises:
            BudgetExhausted: a client's release would exceed the ledger's budget.
            Interrupted: the run is being stopped.
        """

    def commit(self, versions: Mapping[int, str]) -> None:
        """Announce the committed `versions` of the clients' memories after a round; older versions may be deleted.

        Losing this announcement does no harm, because the next request names the version, too.
        """

    def rollback(self) -> None:
        """Discard the memories of a failed round."""

    def metadata(self) -> dict[str, str]:
        """Return the values that a checkpoint stores for `restore`, such as the assignment of machines to clients."""

    def restore(self, metadata: Mapping[str, str], versions: Mapping[int, str]) -> None:
        """Continue a run from a checkpoint's `metadata`, and keep only these memory `versions` (one per client)."""


# Errors of a request.

_ENGINE = Path(__file__).parent
_MODULES = (Path(torch.__file__).parents[1], Path(sysconfig.get_path("stdlib")))
_LIBRARIES = (_ENGINE.parent, Path(distillkit.__file__).parent, *_MODULES)


class RequestError(RuntimeError):
    """Error: the method failed to build a client's request. `__cause__` is the method's error."""


def reason_of(error: Exception) -> str:
    """Return the reason why a client has no usable reply: the error, and the line of code that raised it.

    Args:
        error: error raised while the client's request was built, or while the client worked.
    """
    if isinstance(error, RequestError) and isinstance(error.__cause__, Exception):
        return f"got no request, because the server's send {reason_of(error.__cause__)}"
    return f"raised {type(error).__name__}: {error}{_location(error)}"


def _location(error: Exception) -> str:
    """Return the position of the last traceback entry in the user's code or, if there is none, outside the engine."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not Path(f.filename).is_relative_to(_ENGINE)]
    own = [f for f in frames if not any(Path(f.filename).is_relative_to(place) for place in _LIBRARIES)]
    shown = own or frames
    return f" (line {shown[-1].lineno} of {Path(shown[-1].filename).name}, in {shown[-1].name})" if shown else ""
