"""The server's side of exchanges: build requests, send them, and account for what each client then has."""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from distillkit.privacy import BudgetExhausted, Secret
from fl._codec import digest
from fl.engine._backends import ServerThread
from fl.engine._client_cache_index import ClientCacheIndex
from fl.engine._failures import RequestError
from fl.engine._transport import (
    BundledExchange,
    ClientRequest,
    ClientResult,
    RequestBuilder,
    RequestHeader,
    Transport,
    noise_of,
)
from fl.engine.store import Restored
from fl.message import payload_bytes
from fl.method import Method
from fl.participants import Interrupted, Server

__all__ = ["Dispatcher"]

_DIGEST_BYTES = 16


class Dispatcher:
    """The server's half of every exchange: writes requests, has them delivered, and hands on the answers.

    One for a run. A round may have several exchanges, one after the other: training, then a test, say.

    Args:
        method: says what every client is told (`send`).
        server: its side of the run.
        transport: where clients run.
        thread: where the server's side of the method runs.
        secret: the run's seed for private noise; None: the operating system's noise.

    Attributes:
        method, server, transport, thread: as given.
        entries: what the method declares, by key.
        known: what each client has.
        resent: bytes of kept entries that travelled once more, in this round.
    """

    def __init__(
        self, method: Method, server: Server, transport: Transport, thread: ServerThread, secret: int | None = None
    ) -> None:
        self.method, self.server, self.transport, self.thread, self.known = (
            method,
            server,
            transport,
            thread,
            ClientCacheIndex(),
        )
        self.entries = {e.key: e for e in method.entries()}
        self._secret, self.resent = secret, 0
        self._session, self._asked = secrets.token_hex(4), itertools.count()
        self._digests: dict[str, tuple[Any, str]] = {}

    def secret(self) -> Secret:
        """Where the private noise of the server comes from in this round."""
        return noise_of(self._secret, self.server.round, "server")

    def exchange(
        self, verb: str, numbers: Sequence[int], *, keeps: bool, bundled: BundledExchange | None = None
    ) -> Iterator[tuple[ClientResult, ClientRequest | None, str]]:
        """Ask clients, and yield their answers in order.

        Args:
            verb: what is called there, by name: "answer", "local", "evaluate", or a further exchange of the method's.
            numbers: which clients.
            keeps: whether what they write into their memories is kept.
            bundled: an exchange that rides with it.

        Yields:
            The result, its request if one was built, and the version of the memory it left, or "".

        Raises:
            BudgetExhausted, Interrupted: see `Transport.exchange`.
        """
        header, build_request, sent = self._prepare(self.server, verb, keeps)
        for answer in self.transport.exchange(header, numbers, build_request, bundled):
            self.resent += answer.resent
            yield answer, sent.pop(answer.client, None), header.version if answer.remembers else ""

    def bundled(
        self, server: Server, numbers: Sequence[int], take: Callable[[ClientResult, ClientRequest | None], None]
    ) -> BundledExchange:
        """An exchange of tests that rides with another, or goes ahead alone.

        Args:
            server: as it was after the round that is tested.
            numbers: which clients.
            take: gets every answer, and the request that it answers, if one was written.
        """
        header, build_request, sent = self._prepare(server, "evaluate", False)
        return BundledExchange(
            header, numbers, build_request, lambda answer: take(answer, sent.pop(answer.client, None))
        )

    def _prepare(
        self, server: Server, verb: str, keeps: bool
    ) -> tuple[RequestHeader, RequestBuilder, dict[int, ClientRequest]]:
        """Return the header of an exchange, the builder of its requests, and the requests built so far by client."""
        header = RequestHeader(
            verb, server.round, f"{self._session}-{next(self._asked)}", server.seed, self._secret, keeps
        )
        sent: dict[int, ClientRequest] = {}

        def build_request(number: int) -> ClientRequest:
            try:
                sent[number] = request = self.thread.run(lambda: self._build_request(server, verb, number))
            except (Interrupted, BudgetExhausted):
                raise
            except Exception as error:  # it may concern this client alone, as an architecture that it has not got
                raise RequestError from error
            return request

        return header, build_request, sent

    def weight(self, request: ClientRequest | None, client: int) -> dict[str, int]:
        """Bytes of a `request` on its way to a client, by entry's key: of a kept entry that it has, only the digest."""
        if request is None:
            return {}
        cost, held = payload_bytes(request.message), self.known.of(client).payloads
        for key, found in request.digests.items():
            if held.get(key) == found:
                cost = {k: n for k, n in cost.items() if k.split(":")[0] != key}
            cost[f"{key}:digest"] = _DIGEST_BYTES
        return cost

    def commit(self) -> None:
        """The round is committed: what clients were told and remember counts from now on."""
        self.transport.commit(self.known.commit())

    def rollback(self) -> None:
        """The round has failed: what clients were told and remember in it never counts."""
        self.known.rollback()
        self.transport.rollback()

    def restore(self, found: Restored | None) -> None:
        """A run goes on: the records of clients are what the checkpoint says, and no other memory counts.

        Args:
            found: the checkpoint; None if no round was ever completed, so that the run begins anew.
        """
        for changes in found.changes if found is not None else ():
            self.known.restore(changes)
        self.transport.restore(found.facts if found is not None else {}, self.known.versions())

    def _build_request(self, server: Server, verb: str, client: int) -> ClientRequest:
        further = verb in self.method.exchanges and verb != "local"
        message = self.method.send_exchange(server, verb, client) if further else self.method.send(server, client)
        unknown = [key for key, _ in message.items() if key not in self.entries]
        if unknown:
            raise ValueError(
                f"{type(self.method).__name__} sends {unknown[0]}, which it does not declare: make it an Entry of the "
                "class"
            )
        digests = {key: self._digest(key, value) for key, value in message.items() if self.entries[key].cached}
        record = self.known.of(client)
        held = frozenset(key for key, found in digests.items() if record.payloads.get(key) == found)
        return ClientRequest(message, record.memory, digests, held)

    def _digest(self, key: str, value: Any) -> str:
        known = self._digests.get(key)
        if known is None or known[0] is not value:
            known = self._digests[key] = (value, digest(key, value))
        return known[1]
