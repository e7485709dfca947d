"""Sending of the server's requests, with an index of the values that each client has stored.

An exchange is one request of the server to each of several clients, and their replies. A message consists of entries.
An entry that the method declares as cached is sent to a client only if its value differs from the value that this
client got last.
"""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from distillkit.privacy import BudgetExhausted, Secret
from fl._codec import digest
from fl.engine._contract import ChangedInput, Unchanged, checked_message, declared
from fl.engine._threads import ServerThread
from fl.engine._transport import (
    ClientRequest,
    ClientResult,
    Exchange,
    RequestBuilder,
    RequestError,
    RequestHeader,
    Transport,
    noise_of,
)
from fl.engine.store import Restored
from fl.message import payload_bytes
from fl.method import Method
from fl.participants import Interrupted, Server

__all__ = ["ClientCacheIndex", "ClientRecord", "Dispatcher"]

_DIGEST_BYTES = 16


class Dispatcher:
    """Sender of all requests of a run to its clients.

    A round consists of one or more exchanges, such as training and then evaluation. In an exchange, the server sends
    one request to each of several clients and gets their results.

    Args:
        method: method that builds the messages (`send`).
        server: the run's server, with its state.
        transport: connection to the clients.
        thread: thread on which the method's server functions run.
        secret: the run's seed for the noise of a private method; None for noise from the operating system.

    Attributes:
        method, server, transport, thread: arguments of the constructor.
        entries: declarations of the message entries that the method may send, by key.
        cache_index: for each client, digests of the values in its cache, and the name of the latest version of its
            memory.
        resent: number of bytes of cached values that were sent again in this round, because a client had lost them.
    """

    def __init__(
        self, method: Method, server: Server, transport: Transport, thread: ServerThread, secret: int | None = None
    ) -> None:
        self.method, self.server, self.transport, self.thread = method, server, transport, thread
        self.entries, self.cache_index = declared(method), ClientCacheIndex()
        self._secret, self.resent = secret, 0
        self._session, self._exchanges = secrets.token_hex(4), itertools.count()
        self._digests: dict[str, tuple[Any, str]] = {}

    def secret(self) -> Secret:
        """Return the random source from which the server draws a private method's noise in this round."""
        return noise_of(self._secret, self.server.round, "server")

    def exchange(
        self, verb: str, clients: Sequence[int], *, store_memory: bool = False
    ) -> Iterator[tuple[ClientResult, ClientRequest | None, str]]:
        """Send a request to each client, and yield the results in the order of `clients`."""
        header, build_request, sent = self._prepare(verb, store_memory)
        for result in self.transport.exchange(Exchange(header, clients, build_request)):
            self.resent += result.resent
            yield result, sent.pop(result.client, None), header.version if result.remembers else ""

    def _prepare(self, verb: str, store_memory: bool) -> tuple[RequestHeader, RequestBuilder, dict[int, ClientRequest]]:
        """Prepare the requests of an exchange, and return the function that builds each of them."""
        attempt = f"{self._session}-{next(self._exchanges)}"
        server = self.server
        header = RequestHeader(verb, server.round, attempt, server.seed, self._secret, store_memory)
        sent: dict[int, ClientRequest] = {}

        def build_request(client: int) -> ClientRequest:
            try:
                sent[client] = request = self.thread.run(lambda: self._build_request(server, verb, client))
            except (Interrupted, BudgetExhausted, ChangedInput):
                raise
            except Exception as error:  # the error may concern this client alone, such as a missing architecture
                raise RequestError from error
            return request

        return header, build_request, sent

    def _build_request(self, server: Server, verb: str, client: int) -> ClientRequest:
        additional = verb in self.method.exchanges and verb != "local"
        function = "send_exchange" if additional else "send"
        with Unchanged(self.method, function, {}, server):
            sent = self.method.send_exchange(server, verb, client) if additional else self.method.send(server, client)
        message = checked_message(self.method, function, sent)
        undeclared = [key for key, _ in message.items() if key not in self.entries]
        if undeclared:
            raise ValueError(
                f"{type(self.method).__name__} sends {undeclared[0]}, which it does not declare: make it an Entry of "
                "the class"
            )
        digests = {key: self._digest(key, value) for key, value in message.items() if self.entries[key].cached}
        record = self.cache_index.record(client)
        cached = frozenset(key for key, value in digests.items() if record.payloads.get(key) == value)
        return ClientRequest(message, record.memory, digests, cached)

    def _digest(self, key: str, value: Any) -> str:
        last = self._digests.get(key)
        if last is None or last[0] is not value:
            last = self._digests[key] = (value, digest(key, value))
        return last[1]

    def request_sizes(self, request: ClientRequest | None, client: int) -> dict[str, int]:
        """Return the bytes that a request to a client costs, by entry key.

        An entry whose value the client has in its cache costs only the bytes of its digest.
        """
        if request is None:
            return {}
        cost, cached = payload_bytes(request.message), self.cache_index.record(client).payloads
        for key, value in request.digests.items():
            if cached.get(key) == value:
                cost = {k: n for k, n in cost.items() if k.split(":")[0] != key}
            cost[f"{key}:digest"] = _DIGEST_BYTES
        return cost

    def commit(self) -> None:
        """Commit the changes that this round made to the clients' memories and caches.

        Call this after the checkpoint of the round is written.

        A client's memory holds the values that a method keeps on the client between rounds.
        """
        self.transport.commit(self.cache_index.commit())

    def rollback(self) -> None:
        """Discard the changes that a failed round made to clients' memories and caches."""
        self.cache_index.rollback()
        self.transport.rollback()

    def restore(self, found: Restored | None) -> None:
        """In a resumed run, restore the server's record (`ClientRecord`) of the values that each client has stored.

        A record contains the name of the latest version of the client's memory, and a digest of each value in the
        client's cache.
        """
        for changes in found.changes if found is not None else ():
            self.cache_index.restore(changes)
        self.transport.restore(found.metadata if found is not None else {}, self.cache_index.versions())


@dataclass(frozen=True)
class ClientRecord:
    """The server's record of the values that one client keeps between requests.

    Attributes:
        memory: name of the latest stored version of the client's memory; "" if the client
            has no memory.
        payloads: digest of each message entry that the client has in its cache, by the entry's key.
    """

    memory: str = ""
    payloads: Mapping[str, str] = field(default_factory=dict)


class ClientCacheIndex:
    """Index of the values that each client has stored, with one `ClientRecord` for each client.

    A client stores a memory and a cache (values that it has received, which the
    server need not send again). A `ClientRecord` contains the name of the current version of the memory, and digests of
    the values in the cache.

    The changes of a round are pending until `commit` or `rollback`. The index keeps a record of every client that has
    ever been drawn. The checkpoint of a round stores only the records that changed in this round.
    """

    def __init__(self) -> None:
        self._committed: dict[int, ClientRecord] = {}
        self._pending: dict[int, ClientRecord] = {}

    def record(self, client: int) -> ClientRecord:
        """Return the `ClientRecord` of a client, which states the values that the client has stored.

        Pending changes of this round are included.
        """
        return self._pending.get(client) or self._committed.get(client, ClientRecord())

    def update(self, client: int, request: ClientRequest | None, memory: str = "") -> None:
        """Update a client's record after a valid reply: the client now has the request's values in its cache."""
        before, digests = self.record(client), request.digests if request is not None else {}
        after = ClientRecord(memory or before.memory, {**before.payloads, **digests})
        if after != before:
            self._pending[client] = after

    def changes(self) -> dict[str, Any]:
        """Return the `ClientRecord`s that changed in this round as JSON values by client index, for the checkpoint."""
        return {str(client): {"memory": r.memory, "bodies": dict(r.payloads)} for client, r in self._pending.items()}

    def commit(self) -> dict[int, str]:
        """Commit the changes of `ClientRecord`s that were made in this round."""
        self._committed |= self._pending
        versions = {client: record.memory for client, record in self._pending.items() if record.memory}
        self._pending.clear()
        return versions

    def rollback(self) -> None:
        """Discard the changes of `ClientRecord`s that were made in a failed round."""
        self._pending.clear()

    def restore(self, changes: Mapping[str, Any]) -> None:
        """When a run is resumed, restore the records (`ClientRecord`) that changed in one round.

        A record describes the values that one client has stored.
        """
        for client, record in changes.items():
            self._committed[int(client)] = ClientRecord(record["memory"], record.get("bodies", {}))

    def versions(self) -> dict[int, str]:
        """Return the name of the latest version of each client's memory, by client index.

        The latest version is the one that was stored last in a committed round.
        """
        return {client: record.memory for client, record in self._committed.items() if record.memory}
