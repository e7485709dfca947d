"""One exchange between the server and its clients: send a request to each, check the replies, and fold them.

A round consists of one or more exchanges, such as training and then evaluation.
"""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from distillkit.privacy import BudgetExhausted, Secret
from fl._codec import digest
from fl.aggregation import Aggregator, BadReply, Schema
from fl.engine._client_records import ClientRecords
from fl.engine._contract import ChangedInput, Unchanged, checked_message, declared
from fl.engine._devices import placed
from fl.engine._outliers import LEAST_REPLIES, Compared, HeldReplies, compared, dominant, too_large
from fl.engine._reply_checks import validate
from fl.engine._round_stats import RoundStats
from fl.engine._threads import ServerThread
from fl.engine._transport import ClientRequest, RequestError, RequestHeader, Transport, noise_of
from fl.engine.store import Restored, Store
from fl.message import Message, payload_bytes
from fl.method import Method
from fl.participants import Interrupted, Server

_DIGEST_BYTES = 16


@dataclass(frozen=True)
class Reply:
    """A client's part of an exchange, with the `reason` why its reply is not used, or with the checked reply.

    Attributes:
        client: index of the client.
        reason: reason why the reply is not used; None if it is valid.
        message: the valid reply, with the entries that `Method.read_reply` computed; empty otherwise.
        schema: schema of the reply.
        sent: keys of the entries that the client itself sent.
        notes: numbers that the client reports for the history.
        request: the request; None if it could not be built.
        memory: name of the new version of the client's memory; "" if it stored none.
    """

    client: int
    reason: str | None
    message: Message
    schema: Schema
    sent: Sequence[str]
    notes: Mapping[str, Any]
    request: ClientRequest | None
    memory: str


class Exchanger:
    """Sender of all requests of a run, and receiver of the clients' replies.

    An entry that the method declares as cached is sent to a client only if its value differs from the value that this
    client got last.

    Args:
        method: method that builds the messages (`send`) and states what replies must look like (`expect`).
        server: the run's server, with its state.
        transport: connection to the clients.
        thread: thread on which the method's server functions run.
        secret: the run's seed for the noise of a private method; None for noise from the operating system.
        transcript: folder of the run, in which every message that the server sends or accepts is saved; None for none.

    Attributes:
        entries: declarations of the message entries that the method may send, by key.
        records: what each client has stored.
        resent: number of bytes of cached values that were sent again in this round, because a client had lost them.
        report: function that is called with a short progress text for each client, unless clients are drawn in secret.
    """

    def __init__(
        self, method: Method, server: Server, transport: Transport, thread: ServerThread, secret: int | None = None,
        transcript: Store | None = None,
    ) -> None:  # fmt: skip
        self.method, self.server, self.transport, self.thread = method, server, transport, thread
        self.entries, self.records, self.resent = declared(method), ClientRecords(), 0
        self.report: Callable[[str], object] = lambda text: None
        self._secret, self._transcript = secret, transcript
        self._session, self._exchanges = secrets.token_hex(4), itertools.count()
        self._digests: dict[str, tuple[Any, str]] = {}

    def secret(self) -> Secret:
        """Return the random source from which the server draws a private method's noise in this round."""
        return noise_of(self._secret, self.server.round, "server")

    def collect(self, verb: str, clients: Sequence[int], stats: RoundStats, *, after_local: bool = False) -> Aggregator:
        """Run an exchange with `clients`, and fold the valid replies in the order of `clients`."""
        aggregator, replies = Aggregator(self.entries), self.replies(verb, clients, stats)
        visible = not (self.method.private or self.method.sealed)
        for one in self._alike(replies, stats) if visible and len(clients) >= LEAST_REPLIES else replies:
            reason = one.reason or self.thread.run(partial(_fold, aggregator, one))
            accepted = Message.unchecked({k: v for k, v in one.message.items() if k in one.sent})
            self._record(verb, one, stats, accepted if reason is None else None)
            if reason is not None:
                stats.fail(verb, one.client, reason, after_local=after_local)
                continue
            stats.note(one.notes)
            if verb != "answer":
                self.accept(one)
        return aggregator

    def replies(self, verb: str, clients: Sequence[int], stats: RoundStats) -> Iterator[Reply]:
        """Send a request to each client, and yield the replies, each checked on its own, in the order of `clients`."""
        server = self.server
        attempt = f"{self._session}-{next(self._exchanges)}"
        header = RequestHeader(verb, server.round, attempt, server.seed, self._secret)
        requests: dict[int, ClientRequest] = {}

        def build_request(client: int) -> ClientRequest:
            try:
                requests[client] = request = self.thread.run(partial(self._build_request, verb, client))
            except (Interrupted, BudgetExhausted, ChangedInput):
                raise
            except Exception as error:  # the error may concern this client alone, such as a missing architecture
                raise RequestError from error
            return request

        for i, result in enumerate(self.transport.exchange(header, clients, build_request), start=1):
            self.resent += result.resent
            request = requests.pop(result.client, None)
            if verb not in ("answer", "evaluate") and not self.method.draws_clients:
                self.report(f"client {i} of {len(clients)}" + ("" if verb == "local" else f", {verb}"))
            if result.absent:
                stats.empty.append(result.client)
                continue
            stats.seconds += result.seconds
            reason, message, schema = result.error, Message(), Schema()
            if reason is None:
                stats.replied.add(result.client)
                work = partial(validate, self.method, self.entries, server, verb, result)
                reason, message, schema = self.thread.run(work)
            sent = [key for key, _ in result.reply.items()] if reason is None and result.reply is not None else []
            memory = header.version if result.remembers else ""
            yield Reply(result.client, reason, message, schema, sent, result.notes, request, memory)

    def _build_request(self, verb: str, client: int) -> ClientRequest:
        method, server = self.method, self.server
        additional = verb in method.exchanges and verb != "local"
        function = "send_exchange" if additional else "send"
        with Unchanged(method, function, {}, server):
            sent = method.send_exchange(server, verb, client) if additional else method.send(server, client)
        message = checked_message(method, function, sent)
        undeclared = [key for key, _ in message.items() if key not in self.entries]
        if undeclared:
            raise ValueError(
                f"{type(method).__name__} sends {undeclared[0]}, which it does not declare: make it an Entry of the "
                "class"
            )
        digests = {key: self._digest(key, value) for key, value in message.items() if self.entries[key].cached}
        record = self.records[client]
        cached = frozenset(key for key, value in digests.items() if record.cached.get(key) == value)
        return ClientRequest(message, record.memory, digests, cached)

    def _digest(self, key: str, value: Any) -> str:
        last = self._digests.get(key)
        if last is None or last[0] is not value:
            last = self._digests[key] = (value, digest(key, value))
        return last[1]

    def _alike(self, replies: Iterable[Reply], stats: RoundStats) -> Iterator[Reply]:
        """Wait for all replies, and yield them; those that are far larger than most are refused.

        Clients whose replies make up most of an aggregate are recorded in `stats.dominant`.
        """
        found, held, waiting = dict[int, Compared](), HeldReplies(), list[Reply]()
        for one in replies:
            if one.reason is None:
                found[one.client] = self.thread.run(partial(compared, one.message, self.entries, one.schema))
                held.put(one.client, one.message)
            waiting.append(replace(one, message=Message()))
        refused = too_large(found)
        stats.dominant |= dominant({client: size for client, size in found.items() if client not in refused})
        for one in waiting:
            if one.client in found:
                message = placed(held.take(one.client), self.server.device)
                yield replace(one, message=message, reason=refused.get(one.client))
            else:
                yield one

    def _record(self, verb: str, one: Reply, stats: RoundStats, accepted: Message | None) -> None:
        """Count the bytes of a request and of an accepted reply, and save both if the run keeps a transcript."""
        up = payload_bytes(accepted) if accepted is not None else {}
        stats.count(one.client, up, self.request_sizes(one))
        if self._transcript is not None:
            request = one.request.message if one.request is not None else None
            for direction, message in (("down", request), ("up", accepted)):
                if message is not None and (direction == "down" or len(message)):
                    self._transcript.record(self.server.round, one.client, direction, message, verb)

    def request_sizes(self, one: Reply) -> dict[str, int]:
        """Return the bytes of the request to a client, by entry key. A cached entry costs only its digest."""
        if one.request is None:
            return {}
        sizes, cached = payload_bytes(one.request.message), self.records[one.client].cached
        for key, value in one.request.digests.items():
            if cached.get(key) == value:
                sizes = {name: size for name, size in sizes.items() if name.split(":")[0] != key}
            sizes[f"{key}:digest"] = _DIGEST_BYTES
        return sizes

    def accept(self, one: Reply) -> None:
        """Record that the client of a valid reply has stored the request's cached entries and its memory."""
        self.records.update(one.client, one.request.digests if one.request is not None else {}, one.memory)

    def commit(self) -> None:
        """Commit what clients stored in this round. Call this after the checkpoint of the round is written."""
        self.transport.commit(self.records.commit())

    def rollback(self) -> None:
        """Discard what clients stored in a failed round."""
        self.records.rollback()
        self.transport.rollback()

    def restore(self, found: Restored | None) -> None:
        """In a resumed run, restore the records of what each client has stored."""
        for changes in found.changes if found is not None else ():
            self.records.restore(changes)
        self.transport.restore(found.metadata if found is not None else {}, self.records.versions())


def _fold(aggregator: Aggregator, one: Reply) -> str | None:
    """Add a reply to the aggregate; return the reason if its form differs from that of other replies."""
    try:
        aggregator.fold(one.client, one.message)
    except BadReply as error:
        return str(error)[:300]
    return None
