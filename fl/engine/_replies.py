"""Collection of the clients' replies: request a reply from each client, validate it, and add it to the aggregate.

`ReplyCollector.collect` performs these three steps for one exchange, in which each client gets one request. `validate`
makes all checks that a reply must pass.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from distillkit.privacy import BudgetExhausted
from fl.aggregation import Aggregator, BadReply, EntrySpec, Schema, check_reply
from fl.engine._contract import ChangedInput, Unchanged, checked_message, checked_schema
from fl.engine._devices import placed
from fl.engine._dispatch import Dispatcher
from fl.engine._outliers import LEAST_REPLIES, Compared, HeldReplies, compared, dominant, too_large
from fl.engine._transport import ClientRequest, ClientResult
from fl.engine.store import Store
from fl.message import Message, payload_bytes
from fl.participants import Interrupted, Server
from fl.task import LabelTask

__all__ = ["ReplyCollector", "RoundStats", "validate"]


_MOST_NOTES, _LARGEST_NOTE = 100, 1e15
"""Largest number of a client's notes, and of characters in a name; largest magnitude of a note."""


class ReplyCollector:
    """Object that requests, validates and aggregates the clients' replies in a run.

    Args:
        dispatcher: sender of the requests, with the method and the server as attributes.
        transcript: run folder for the messages that the server sends or accepts; None to save no messages.

    Attributes:
        dispatcher, transcript: arguments of the constructor.
        method, server: attributes of the dispatcher.
        report: function that is called with a short progress text for each client, unless clients are drawn in secret.
    """

    def __init__(self, dispatcher: Dispatcher, transcript: Store | None = None) -> None:
        self.dispatcher, self.method, self.server = dispatcher, dispatcher.method, dispatcher.server
        self.transcript = transcript
        self.report: Callable[[str], object] = lambda text: None

    def collect(
        self,
        verb: str,
        clients: Sequence[int],
        stats: RoundStats,
        *,
        after_local: bool = False,
    ) -> Aggregator:
        """Request replies from clients, validate each one, and accumulate the valid ones in the order of `clients`."""
        dispatcher, reducer = self.dispatcher, Aggregator(self.dispatcher.entries)
        arrived = self._validated(verb, clients, stats)
        visible = not (self.method.private or self.method.sealed)
        for one in self._alike(arrived, stats) if visible and len(clients) >= LEAST_REPLIES else arrived:
            reason = one.reason or dispatcher.thread.run(partial(_fold, reducer, one.client, one.reply))
            self._record(verb, one, stats, valid=reason is None)
            if reason is not None:
                stats.fail(verb, one.client, reason, after_local=after_local)
                continue
            stats.note(one.notes)
            if verb != "answer":
                dispatcher.cache_index.update(one.client, one.request, one.memory)
        return reducer

    def _validated(self, verb: str, clients: Sequence[int], stats: RoundStats) -> Iterator[_Arrived]:
        """Request a reply from each client, and yield the replies, each checked on its own."""
        dispatcher = self.dispatcher
        exchange = dispatcher.exchange(verb, clients, store_memory=verb == "local")
        for i, (result, request, memory) in enumerate(exchange, start=1):
            if verb != "answer" and not self.method.draws_clients:
                self.report(f"client {i} of {len(clients)}" + ("" if verb == "local" else f", {verb}"))
            if result.absent:
                stats.empty.append(result.client)
                continue
            stats.seconds += result.seconds
            reason, reply, schema = result.error, Message(), Schema()
            if reason is None:
                work = partial(validate, dispatcher, self.server, verb, result)
                reason, reply, schema = dispatcher.thread.run(work)
            sent = [key for key, _ in result.reply.items()] if reason is None and result.reply is not None else []
            yield _Arrived(result.client, reason, reply, schema, sent, result.notes, request, memory)

    def _alike(self, arrived: Iterable[_Arrived], stats: RoundStats) -> Iterator[_Arrived]:
        """Wait for all replies, and yield them; those that are far larger than most are refused.

        Clients whose replies make up most of an aggregate are recorded in `stats.dominant`.
        """
        found, held, waiting = dict[int, Compared](), HeldReplies(), list[_Arrived]()
        for one in arrived:
            if one.reason is None:
                measure = partial(compared, one.reply, self.dispatcher.entries, one.schema)
                found[one.client] = self.dispatcher.thread.run(measure)
                held.put(one.client, one.reply)
            waiting.append(replace(one, reply=Message()))
        refused = too_large(found)
        stats.dominant |= dominant({client: size for client, size in found.items() if client not in refused})
        for one in waiting:
            if one.client in found:
                reply = placed(held.take(one.client), self.server.device)
                yield replace(one, reply=reply, reason=refused.get(one.client))
            else:
                yield one

    def _record(self, verb: str, one: _Arrived, stats: RoundStats, *, valid: bool) -> None:
        """Count the bytes of a client's request and valid reply, and save both if the run keeps a transcript."""
        reply = Message.unchecked({k: v for k, v in one.reply.items() if k in one.sent}) if valid and one.sent else None
        stats.count(
            one.client, payload_bytes(reply) if reply is not None else {},
            self.dispatcher.request_sizes(one.request, one.client),
        )  # fmt: skip
        if self.transcript is None:
            return
        for direction, message in (("down", one.request.message if one.request is not None else None), ("up", reply)):
            if message is not None:
                self.transcript.record(self.server.round, one.client, direction, message, verb)


@dataclass(frozen=True)
class _Arrived:
    """Result of one client, with the `reason` why it is not used, or with its valid reply and the schema of this reply.

    `sent` holds the keys of the entries that the client sent; the method may have computed more of them.
    """

    client: int
    reason: str | None
    reply: Message
    schema: Schema
    sent: Sequence[str]
    notes: Mapping[str, Any]
    request: ClientRequest | None
    memory: str


def _fold(aggregator: Aggregator, client: int, reply: Message) -> str | None:
    """Add a reply to the aggregate; return the reason if its form differs from that of other replies."""
    try:
        aggregator.fold(client, reply)
    except BadReply as error:
        return str(error)[:300]
    return None


def validate(
    dispatcher: Dispatcher, server: Server, verb: str, result: ClientResult
) -> tuple[str | None, Message, Schema]:
    """Check a client's reply. Call this function in the server's thread."""
    method, client = dispatcher.method, result.client
    function = {"answer": "expect_answer", "local": "expect", "evaluate": "expect_evaluation"}.get(verb)
    with Unchanged(method, function or "expect_exchange", {}, server):
        found = getattr(method, function)(server, client) if function else method.expect_exchange(server, verb, client)
    schema = checked_schema(method, function or "expect_exchange", found)
    try:
        return None, _checked_reply(dispatcher, server, verb, result, schema), schema
    except BadReply as error:
        return str(error)[:300], Message(), schema
    except (Interrupted, BudgetExhausted, ChangedInput):
        raise
    except Exception as error:  # a reply may hold anything, so any error in a check means an invalid reply
        return f"cannot be used: {type(error).__name__}: {error}"[:300], Message(), schema


def _checked_reply(dispatcher: Dispatcher, server: Server, verb: str, result: ClientResult, schema: Schema) -> Message:
    """Check a client's reply against its schema, and return it with the entries that `Method.read_reply` computes.

    A reply to an evaluation request may be empty.
    """
    entries, reply = dispatcher.entries, result.reply
    if verb == "evaluate" and (reply is None or (isinstance(reply, Message) and not len(reply))):
        return Message()
    if verb != "evaluate":
        _check_notes(result.notes)
    reply = check_reply(placed(reply, server.device), entries, schema)
    if verb == "evaluate":
        _check_sums(reply, server.task)
    if verb != "local":
        return reply
    with Unchanged(dispatcher.method, "read_reply", {"reply": reply}, server):
        read = dispatcher.method.read_reply(server, reply)
    derived = checked_message(dispatcher.method, "read_reply", read)
    if not len(derived):
        return reply
    reply = Message.unchecked({**dict(reply.items()), **dict(derived.items())})
    return check_reply(reply, entries, {**schema, **{key: EntrySpec.finite(value) for key, value in derived.items()}})


def _check_notes(notes: Mapping[str, Any]) -> None:
    if len(notes) > _MOST_NOTES:
        raise BadReply(f"has {len(notes)} notes, at most {_MOST_NOTES} are allowed")
    for name, number in notes.items():
        if not isinstance(name, str) or len(name) > _MOST_NOTES:
            raise BadReply(f"its note {str(name)[:40]!r} must have a name of at most {_MOST_NOTES} characters")
        if not isinstance(number, int | float) or not -_LARGEST_NOTE <= number <= _LARGEST_NOTE:
            raise BadReply(f"its note {name!r} is not a finite number of at most {_LARGEST_NOTE:g}")


def _check_sums(reply: Message, task: LabelTask) -> None:
    for key, group in reply.items():
        if not isinstance(group, dict):
            raise BadReply(f"{key} must map names to `LabelTask.sums` of an evaluation, got {type(group).__name__}")
        for sums in group.values():
            task.check_sums(sums)


@dataclass
class RoundStats:
    """Bytes, times and failures of one round, summed over all its exchanges.

    In an exchange, clients get a request and send a reply. The exchange "local" is the training.

    Attributes:
        up: bytes of the valid replies, by entry key.
        down: bytes of the requests, by entry key.
        by_client: pair [bytes of the replies, bytes of the requests] by client index.
        failed: reasons why clients failed in the "local" exchange or an earlier one, by client index. The replies of
            these clients are not used.
        failed_after: reasons why clients failed in an exchange after "local", by the exchange's name and the client
            index. The "local" replies of these clients are used.
        noted: numbers that clients report in `Client.notes`, summed over the clients, by name.
        dominant: clients that make up most of an aggregate, and its share, if the server sees single replies.
        empty: indices of the clients without images.
        integer_pool: pool of the integers in `by_client`. Equal integers share one object to save memory, because the
            pairs of all rounds stay in memory.
        seconds: CPU seconds of all clients.
        server_seconds: CPU seconds that the server took to process the replies.
    """

    up: dict[str, int] = field(default_factory=dict)
    down: dict[str, int] = field(default_factory=dict)
    by_client: dict[str, list[int]] = field(default_factory=dict)
    integer_pool: dict[int, int] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    failed_after: dict[str, dict[str, str]] = field(default_factory=dict)
    noted: dict[str, float] = field(default_factory=dict)
    dominant: dict[int, str] = field(default_factory=dict)
    empty: list[int] = field(default_factory=list)
    seconds: float = 0.0
    server_seconds: float = 0.0

    def count(self, client: int, sent: Mapping[str, int], received: Mapping[str, int]) -> None:
        """Add the sizes in bytes of one client's request and reply to the counts of the round."""
        for total, part in ((self.up, sent), (self.down, received)):
            for key, size in part.items():
                total[key] = total.get(key, 0) + size
        name = sys.intern(str(client))
        up, down = self.by_client.get(name, (0, 0))
        up, down = up + sum(sent.values()), down + sum(received.values())
        self.by_client[name] = [self.integer_pool.setdefault(up, up), self.integer_pool.setdefault(down, down)]

    def fail(self, verb: str, client: int, reason: str, *, after_local: bool) -> None:
        """Record that a client failed. Such a client is left out of the rest of the round."""
        if after_local:
            self.failed_after.setdefault(verb, {})[str(client)] = reason
        else:
            self.failed[str(client)] = reason if verb in ("answer", "local") else f"{verb}: {reason}"

    def note(self, counts: Mapping[str, Any]) -> None:
        """Add one client's `counts` (the numbers in its `Client.notes`, by name) to the sums over all clients."""
        for key, count in counts.items():
            self.noted[key] = self.noted.get(key, 0) + count

    def reasons(self) -> str:
        """Return one line of text: up to five reasons why clients failed, with the number of clients for each."""
        found = [*self.failed.items(), *(pair for failed in self.failed_after.values() for pair in failed.items())]
        by_reason: dict[str, list[str]] = {}
        for client, reason in found:
            by_reason.setdefault(reason, []).append(client)
        texts = [
            f"{f'client {c[0]}' if len(c) == 1 else f'{len(c)} of {len(self.by_client)} clients'} {reason}"
            for reason, c in by_reason.items()
        ]
        return "; ".join(texts[:5] + [f"and {len(texts) - 5} more"] * (len(texts) > 5))

    def row(self, drawn: list[int]) -> dict[str, Any]:
        """Return the round's bytes, failures and times as a row for the history, by column name."""
        return {
            "bytes_up": sum(self.up.values()),
            "bytes_down": sum(self.down.values()),
            "up": self.up,
            "down": self.down,
            "bytes_by_client": self.by_client,
            "drawn": drawn,
            "failed": self.failed,
            **({"failed_after": self.failed_after} if self.failed_after else {}),
            "empty": self.empty,
            **({"dominant": {str(client): share for client, share in self.dominant.items()}} if self.dominant else {}),
            **({"noted": self.noted} if self.noted else {}),
            "client_seconds": self.seconds,
            "server_seconds": self.server_seconds,
        }
