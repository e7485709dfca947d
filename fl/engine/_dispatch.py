"""The server's side of every exchange: build requests, send them, and record the cached entries of each client."""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from distillkit.privacy import BudgetExhausted, Secret
from fl._codec import digest
from fl.engine._backends import ServerThread
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
    """Sender of the server's requests, which also counts their bytes. Each run has one dispatcher.

    A round may consist of several exchanges in a row, such as training and then evaluation.

    Args:
        method: method that builds the messages (`send`).
        server: the server's side of the run.
        transport: connection to the clients.
        thread: thread that runs the server's side of the method.
        secret: the run's seed for private noise; None for noise from the operating system.

    Attributes:
        method, server, transport, thread: arguments of the constructor.
        entries: the entries that the method declares, by key.
        cache_index: index of each client's cached entries and memory version.
        resent: bytes of cached entries that were sent again in this round.
    """

    def __init__(
        self, method: Method, server: Server, transport: Transport, thread: ServerThread, secret: int | None = None
    ) -> None:
        self.method, self.server, self.transport, self.thread = method, server, transport, thread
        self.entries, self.cache_index = {e.key: e for e in method.entries()}, ClientCacheIndex()
        self._secret, self.resent = secret, 0
        self._session, self._exchanges = secrets.token_hex(4), itertools.count()
        self._digests: dict[str, tuple[Any, str]] = {}

    def secret(self) -> Secret:
        """Return the source of the server's private noise for this round."""
        return noise_of(self._secret, self.server.round, "server")

    def exchange(
        self, verb: str, clients: Sequence[int], *, keeps: bool, bundled: Exchange | None = None
    ) -> Iterator[tuple[ClientResult, ClientRequest | None, str]]:
        """Send a request to each client, and yield the results in the order of `clients`.

        Args:
            verb: name of the method's function that the clients call: "answer", "local", "evaluate", or an additional
                exchange of the method.
            clients: indices of the clients.
            keeps: whether memories that clients write in this exchange are kept.
            bundled: exchange that is sent together with this one, if any.

        Yields:
            A triple for each client: the result; the request, or None if no request was built; and the version of the
            memory that the client wrote, or "" if it wrote none.

        Raises:
            BudgetExhausted, Interrupted: see `Transport.exchange`.
        """
        header, build_request, sent = self._prepare(self.server, verb, keeps)
        for result in self.transport.exchange(Exchange(header, clients, build_request), bundled):
            self.resent += result.resent
            yield result, sent.pop(result.client, None), header.version if result.remembers else ""

    def evaluation(
        self, server: Server, clients: Sequence[int], on_result: Callable[[ClientResult, ClientRequest | None], None]
    ) -> Exchange:
        """Return an exchange with evaluation requests, which can be sent with another exchange or alone.

        Args:
            server: state of the server after the round that is evaluated.
            clients: indices of the clients.
            on_result: function that is called with every result and its request (None if no request was built).
        """
        header, build_request, sent = self._prepare(server, "evaluate", False)
        return Exchange(header, clients, build_request, lambda r: on_result(r, sent.pop(r.client, None)))

    def _prepare(
        self, server: Server, verb: str, keeps: bool
    ) -> tuple[RequestHeader, RequestBuilder, dict[int, ClientRequest]]:
        """Return the header of an exchange, the builder of its requests, and the requests built so far by client."""
        attempt = f"{self._session}-{next(self._exchanges)}"
        header = RequestHeader(verb, server.round, attempt, server.seed, self._secret, keeps)
        sent: dict[int, ClientRequest] = {}

        def build_request(client: int) -> ClientRequest:
            try:
                sent[client] = request = self.thread.run(lambda: self._build_request(server, verb, client))
            except (Interrupted, BudgetExhausted):
                raise
            except Exception as error:  # the error may concern this client alone, such as a missing architecture
                raise RequestError from error
            return request

        return header, build_request, sent

    def _build_request(self, server: Server, verb: str, client: int) -> ClientRequest:
        additional = verb in self.method.exchanges and verb != "local"
        message = self.method.send_exchange(server, verb, client) if additional else self.method.send(server, client)
        undeclared = [key for key, _ in message.items() if key not in self.entries]
        if undeclared:
            raise ValueError(
                f"{type(self.method).__name__} sends {undeclared[0]}, which it does not declare: make it an Entry of "
                "the class"
            )
        digests = {key: self._digest(key, value) for key, value in message.items() if self.entries[key].cached}
        record = self.cache_index.of(client)
        cached = frozenset(key for key, value in digests.items() if record.payloads.get(key) == value)
        return ClientRequest(message, record.memory, digests, cached)

    def _digest(self, key: str, value: Any) -> str:
        last = self._digests.get(key)
        if last is None or last[0] is not value:
            last = self._digests[key] = (value, digest(key, value))
        return last[1]

    def request_sizes(self, request: ClientRequest | None, client: int) -> dict[str, int]:
        """Return the bytes of a `request` to a client by entry key. A cached entry counts only as its digest."""
        if request is None:
            return {}
        cost, cached = payload_bytes(request.message), self.cache_index.of(client).payloads
        for key, value in request.digests.items():
            if cached.get(key) == value:
                cost = {k: n for k, n in cost.items() if k.split(":")[0] != key}
            cost[f"{key}:digest"] = _DIGEST_BYTES
        return cost

    def commit(self) -> None:
        """Commit this round's memories and cached entries, after the round itself is committed."""
        self.transport.commit(self.cache_index.commit())

    def rollback(self) -> None:
        """Discard this round's memories and cached entries after a failed round."""
        self.cache_index.rollback()
        self.transport.rollback()

    def restore(self, found: Restored | None) -> None:
        """Restore the clients' records when a run is resumed.

        Args:
            found: the checkpoint; None if no round was completed, so the run starts again.
        """
        for changes in found.changes if found is not None else ():
            self.cache_index.restore(changes)
        self.transport.restore(found.metadata if found is not None else {}, self.cache_index.versions())


@dataclass(frozen=True)
class ClientRecord:
    """The server's record of one client's state.

    Attributes:
        memory: version of the client's committed memory; "" if the client has no memory.
        payloads: digests of the client's cached entries, by key.
    """

    memory: str = ""
    payloads: Mapping[str, str] = field(default_factory=dict)


class ClientCacheIndex:
    """Index of each client's memory version and cached entries. A round's changes are committed or discarded together.

    The index has a record of every client that has ever been drawn. A checkpoint stores only the changes of one round.
    """

    def __init__(self) -> None:
        self._committed: dict[int, ClientRecord] = {}
        self._pending: dict[int, ClientRecord] = {}

    def of(self, client: int) -> ClientRecord:
        """Return the record of a `client`, including the changes of this round."""
        return self._pending.get(client) or self._committed.get(client, ClientRecord())

    def update(self, client: int, request: ClientRequest | None, memory: str = "") -> None:
        """Record that a client received a request and that its reply was valid.

        Args:
            client: index of the client.
            request: the request; None if no request was built.
            memory: version of the memory that the client wrote; "" if it wrote none.
        """
        before, digests = self.of(client), request.digests if request is not None else {}
        after = ClientRecord(memory or before.memory, {**before.payloads, **digests})
        if after != before:
            self._pending[client] = after

    def changes(self) -> dict[str, Any]:
        """Return this round's changed records by client, for the checkpoint."""
        return {str(client): {"memory": r.memory, "bodies": dict(r.payloads)} for client, r in self._pending.items()}

    def commit(self) -> dict[int, str]:
        """Commit the changes, and return the memory versions that were written in this round, by client."""
        self._committed |= self._pending
        versions = {client: record.memory for client, record in self._pending.items() if record.memory}
        self._pending.clear()
        return versions

    def rollback(self) -> None:
        """Discard this round's changes after a failed round."""
        self._pending.clear()

    def restore(self, changes: Mapping[str, Any]) -> None:
        """Apply one round's `changes` from a checkpoint."""
        for client, record in changes.items():
            self._committed[int(client)] = ClientRecord(record["memory"], record.get("bodies", {}))

    def versions(self) -> dict[int, str]:
        """Return the committed memory versions, by client."""
        return {client: record.memory for client, record in self._committed.items() if record.memory}
