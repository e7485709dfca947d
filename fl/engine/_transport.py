"""Interface of transports, and the types of requests and results.

A transport sends requests to clients and returns the results of these requests.
"""

from __future__ import annotations

import sysconfig
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch

import distillkit
from distillkit.privacy import Secret
from distillkit.rng import derive
from distillkit.sets import LabeledImages
from fl.message import Message
from fl.participants import Scratch, Server


def noise_of(secret: int | None, round_number: int, owner: int | str) -> Secret:
    """Return the random source from which a private method draws the noise of one client or the server in a round."""
    if secret is None:
        return Secret()
    return Secret(int(torch.randint(2**62, (), generator=derive(secret, round_number, owner, "secret"))))


@dataclass(frozen=True)
class RequestHeader:
    """The part of a request that is the same for all clients of an exchange.

    Attributes:
        verb: name of the method's function that the clients call, such as "local" or "evaluate".
        round: index of the round, from 1; 0 before round 1.
        attempt: identifier of the exchange. It is new even if a round is repeated after the process was killed.
        seed: the run's seed, from which a client derives its generators.
        secret: the run's seed for the noise of a private method; None for noise from the operating system.
    """

    verb: str
    round: int
    attempt: str
    seed: int
    secret: int | None = None

    @property
    def keeps(self) -> bool:
        """True if the changes that a client makes to its memory are stored, which is so in the training alone."""
        return self.verb == "local"

    @property
    def version(self) -> str:
        """Name under which a client stores its memory after this request."""
        return f"{self.round}-{self.attempt}"


@dataclass(frozen=True)
class ClientRequest:
    """The part of a request that is different for each client.

    Attributes:
        message: the complete message of the method, including entries that the client has in its cache.
        memory: name of the version of the client's memory to load; "" if the client has none. It is the committed
            version, or one that the client stored earlier in this round. The client deletes versions of failed rounds.
        digests: digest of each entry in the message that is declared as cached, by the entry's key.
        cached: keys of the entries that the client has in its cache already. Only their digests are sent.
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
    """Result of a request to one client: its reply, or the reason why it failed, and its costs.

    Attributes:
        client: index of the client.
        reply: message that the client sent; None if there is none.
        error: reason why there is no usable reply, as text for the history; None if the client did not fail.
        absent: whether the client took no part, because it has no images to train or evaluate on.
        seconds: CPU seconds that the client took.
        notes: numbers that the client reports for the round's row of the history (`Client.notes`), by name.
        remembers: whether the client stored a memory.
        resent: number of bytes of message entries that were sent again, because the client no longer had them in its
            cache.
    """

    client: int
    reply: Message | None = None
    error: str | None = None
    absent: bool = False
    seconds: float = 0.0
    notes: Mapping[str, Any] = field(default_factory=dict)
    remembers: bool = False
    resent: int = 0


class Transport(Protocol):
    """Connection of a run to its clients, in threads of this process or on other machines.

    If one client fails, its `ClientResult` contains the error. If the iterator that the method `exchange` returns
    raises an exception, the exchange has failed for all clients.

    Attributes:
        space: set without images, with the image shape, dtype, classes and normalization of the clients' sets.
        clients: number of clients.
    """

    @property
    def space(self) -> LabeledImages: ...

    @property
    def clients(self) -> int: ...

    def fingerprint(self, key: bytes) -> str:
        """Return a fingerprint of the clients' images. Called only if the run writes files.

        Args:
            key: secret key without which the fingerprint reveals nothing about the images; empty for a plain hash.
        """

    def open(self, server: Server, memories: Path | None, scratch: Scratch | None) -> None:
        """Prepare for the run's exchanges.

        Args:
            server: the run's server, whose task, device, stop event and ledger the clients use, too.
            memories: folder for what clients keep between rounds; None if the run writes no files.
            scratch: folder for the state of clients' unfinished work; None if the run writes no files.
        """

    def close(self) -> None:
        """Ask running clients to stop, and wait until they have stopped."""

    def exchange(
        self, header: RequestHeader, clients: Sequence[int], build_request: RequestBuilder
    ) -> Iterator[ClientResult]:
        """Send a request to each client, and yield the results in the order of `clients`.

        Clients are started only while the caller consumes results. Before a result is yielded, the client's charges are
        written to the privacy ledger. A client that misses the transport's deadline has a result with an error.

        Args:
            header: part of the request that is the same for all clients.
            clients: indices of the clients.
            build_request: function that builds the request to a client.

        Raises:
            BudgetExhausted: a client's releases would exceed the privacy ledger's budget.
            Interrupted: the run is being stopped.
        """

    def commit(self, versions: Mapping[int, str]) -> None:
        """Commit the memories that clients stored in a round.

        Older versions can then be deleted. If a client misses this call, its results do not change, because each
        request states the valid version.

        Args:
            versions: name of the new version of each changed memory, by client index.
        """

    def rollback(self) -> None:
        """Discard the memories that clients stored in a failed round."""

    def metadata(self) -> dict[str, str]:
        """Return values that are stored in the checkpoint and passed to `restore` when the run is resumed.

        An example is the assignment of machines to clients.
        """

    def require_memories(self, versions: Mapping[int, str]) -> None:
        """Check, if they are on this machine, that the clients' memories of these versions can be read.

        Args:
            versions: name of the version of each memory, by client index.

        Raises:
            CheckpointError: a memory is missing or damaged. The message names its file.
        """

    def restore(self, metadata: Mapping[str, str], versions: Mapping[int, str]) -> None:
        """Prepare the transport for a resumed run.

        Args:
            metadata: values from the checkpoint, as the method `metadata` returned them.
            versions: by client index, the name of the version of the client's memory after the last completed round.
                All other stored versions are deleted.
        """


# Errors of a request.

_ENGINE = Path(__file__).parent
_OURS = (_ENGINE.parent, Path(distillkit.__file__).parent)
_OTHERS = (Path(torch.__file__).parents[1], Path(sysconfig.get_path("stdlib")))


class RequestError(RuntimeError):
    """Error: the method failed on the server while it built a client's request. `__cause__` is the method's error."""


def reason_of(error: Exception) -> str:
    """Return a text on why a client failed, for the history: the error, and the code line that raised it."""
    if isinstance(error, RequestError) and isinstance(error.__cause__, Exception):
        return f"got no request, because the server's send {reason_of(error.__cause__)}"
    return f"raised {type(error).__name__}: {error}{_location(error)}"


def _location(error: Exception) -> str:
    """Return the file and line in which an error was raised, as text for an error message.

    This is the innermost traceback entry in the user's code or, if there is none, in this library outside the engine.
    """
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not Path(f.filename).is_relative_to(_ENGINE)]

    def within(places: tuple[Path, ...]) -> list[traceback.FrameSummary]:
        return [f for f in frames if any(Path(f.filename).is_relative_to(place) for place in places)]

    known, ours = within((*_OURS, *_OTHERS)), within(_OURS)
    shown = [f for f in frames if f not in known] or ours or frames
    return f" (line {shown[-1].lineno} of {Path(shown[-1].filename).name}, in {shown[-1].name})" if shown else ""
