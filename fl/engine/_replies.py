"""Collection of the clients' replies: request a reply from each client, validate it, and add it to the aggregate.

`ReplyCollector.collect` performs these three steps for one exchange, in which each client gets one request. `validate`
makes all checks that a reply must pass.
"""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from distillkit.privacy import BudgetExhausted
from fl.aggregation import Aggregator, BadReply, EntrySpec, Schema, check_reply
from fl.engine._commit_guard import largest_value
from fl.engine._contract import ChangedInput, Unchanged, checked_message, checked_schema, server_values
from fl.engine._devices import placed
from fl.engine._dispatch import Dispatcher
from fl.engine._transport import ClientRequest, ClientResult
from fl.engine.store import Store
from fl.message import Message, payload_bytes
from fl.participants import Interrupted, Server
from fl.task import LabelTask

__all__ = ["ReplyCollector", "RoundStats", "validate"]


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
        """Request replies from clients, validate each one, and accumulate the valid ones in the order of `clients`.

        Args:
            verb: name of the exchange: "answer" for the query before round 1, "local" for training, or the name of an
                additional exchange of the method.
            clients: indices of the clients.
            stats: counts of the round, to which the bytes, seconds and failures of this exchange are added.
            after_local: whether the exchange comes after the training of the round.

        Returns:
            The aggregator, to which all valid replies were added.
        """
        dispatcher, reducer = self.dispatcher, Aggregator(self.dispatcher.entries)
        exchange = dispatcher.exchange(verb, clients, store_memory=verb == "local")
        for i, (result, request, memory) in enumerate(exchange, start=1):
            if verb != "answer" and not self.method.draws_clients:
                self.report(f"client {i} of {len(clients)}" + ("" if verb == "local" else f", {verb}"))
            if result.absent:
                stats.empty.append(result.client)
                continue
            stats.seconds += result.seconds
            work = partial(validate, dispatcher, self.server, verb, result, reducer)
            reason = result.error or dispatcher.thread.run(work)[0]
            self._record(verb, result, request, stats, valid=reason is None)
            if reason is not None:
                stats.fail(verb, result.client, reason, after_local=after_local)
                continue
            stats.note(result.notes)
            if verb == "local" and result.reply is not None and not (self.method.private or self.method.sealed):
                stats.largest[result.client] = dispatcher.thread.run(partial(largest_value, result.reply))
            if verb != "answer":
                dispatcher.cache_index.update(result.client, request, memory)
        return reducer

    def _record(
        self, verb: str, result: ClientResult, request: ClientRequest | None, stats: RoundStats, *, valid: bool
    ) -> None:
        """Count the bytes of a client's request and reply, and save both messages if the run keeps a transcript.

        Args:
            verb: name of the exchange.
            result: the client's result, with its reply.
            request: the request; None if no request was built.
            stats: counts of the round, to which the bytes are added.
            valid: whether the reply is valid. An invalid reply is neither counted nor saved.
        """
        client, reply = result.client, result.reply if valid else None
        sent = payload_bytes(reply) if reply is not None else {}
        stats.count(client, sent, self.dispatcher.request_sizes(request, client))
        if self.transcript is None:
            return
        for direction, message in (("down", request.message if request is not None else None), ("up", reply)):
            if message is not None:
                self.transcript.record(self.server.round, client, direction, message, verb)


def validate(
    dispatcher: Dispatcher, server: Server, verb: str, result: ClientResult, aggregator: Aggregator | None = None
) -> tuple[str | None, Message]:
    """Check a client's reply, and add it to the aggregate if it is valid. Call this function in the server's thread.

    Args:
        dispatcher: dispatcher of the run, which gives access to the method and its declared entries.
        server: the server that receives the reply.
        verb: name of the method's function that ran on the client, such as "local" or "evaluate".
        result: result that the client sent.
        aggregator: aggregator to which a valid reply is added. If it is None, the reply is only returned.

    Returns:
        A pair: the reason why the reply is invalid, or None if it is valid; and the reply, with additional entries that
        the method computes from it on the server (`Method.read_reply`). The second item is an empty message if the
        reply is invalid.
    """
    method, client = dispatcher.method, result.client
    function = {"answer": "expect_answer", "local": "expect", "evaluate": "expect_evaluation"}.get(verb)
    with Unchanged(method, function or "expect_exchange", server_values(server)):
        found = getattr(method, function)(server, client) if function else method.expect_exchange(server, verb, client)
    schema = checked_schema(method, function or "expect_exchange", found)
    try:
        reply = _checked_reply(dispatcher, server, verb, result, schema)
        if aggregator is not None:
            aggregator.require(reply)
    except BadReply as error:
        return str(error)[:300], Message()
    except (Interrupted, BudgetExhausted, ChangedInput):
        raise
    except Exception as error:  # a reply may hold anything, so any error in a check means an invalid reply
        return f"cannot be used: {type(error).__name__}: {error}"[:300], Message()
    if aggregator is not None:
        aggregator.fold(client, reply)
    return None, reply


def _checked_reply(dispatcher: Dispatcher, server: Server, verb: str, result: ClientResult, schema: Schema) -> Message:
    """Check a client's reply against its schema, and return it with the entries that `Method.read_reply` computes.

    A reply to an evaluation request may be empty.

    Args:
        dispatcher: dispatcher of the run, which gives access to the method and its declared entries.
        server: the server that receives the reply.
        verb: name of the method's function that ran on the client, such as "local" or "evaluate".
        result: result that the client sent.
        schema: specification of each entry that the reply must have.

    Raises:
        BadReply: an entry is missing or undeclared, or has a wrong type, shape or range (see `fl.schema.check_reply`);
            or a value in `result.notes` is not a finite number.
    """
    entries, reply = dispatcher.entries, result.reply
    if verb == "evaluate" and (reply is None or (isinstance(reply, Message) and not len(reply))):
        return Message()
    wrong = [k for k, n in result.notes.items() if not isinstance(n, int | float) or not math.isfinite(n)]
    if wrong and verb != "evaluate":
        raise BadReply(f"its note {wrong[0]!r} is not a finite number")
    reply = check_reply(placed(reply, server.device), entries, schema)
    if verb == "evaluate":
        _check_sums(reply, server.task)
    if verb != "local":
        return reply
    with Unchanged(dispatcher.method, "read_reply", {"reply": reply, **server_values(server)}):
        read = dispatcher.method.read_reply(server, reply)
    derived = checked_message(dispatcher.method, "read_reply", read)
    if not len(derived):
        return reply
    reply = Message.unchecked({**dict(reply.items()), **dict(derived.items())})
    return check_reply(reply, entries, {**schema, **{key: EntrySpec.finite(value) for key, value in derived.items()}})


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
        largest: largest absolute value in each client's "local" reply; empty for private methods and secure sums.
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
    largest: dict[int, float] = field(default_factory=dict)
    empty: list[int] = field(default_factory=list)
    seconds: float = 0.0
    server_seconds: float = 0.0

    def count(self, client: int, sent: Mapping[str, int], received: Mapping[str, int]) -> None:
        """Add the sizes in bytes of one client's request and reply to the counts of the round.

        Args:
            client: index of the client.
            sent: bytes of the reply, which the client sent, by entry key.
            received: bytes of the request, which the client received, by entry key.
        """
        for total, part in ((self.up, sent), (self.down, received)):
            for key, size in part.items():
                total[key] = total.get(key, 0) + size
        name = sys.intern(str(client))
        up, down = self.by_client.get(name, (0, 0))
        up, down = up + sum(sent.values()), down + sum(received.values())
        self.by_client[name] = [self.integer_pool.setdefault(up, up), self.integer_pool.setdefault(down, down)]

    def fail(self, verb: str, client: int, reason: str, *, after_local: bool) -> None:
        """Record that a client failed. Such a client is left out of the rest of the round.

        Args:
            verb: name of the exchange in which the client failed: "local" for the training, or another name.
            client: index of the client.
            reason: reason of the failure, as text for the history.
            after_local: whether the exchange comes after the training of the round.
        """
        if after_local:
            self.failed_after.setdefault(verb, {})[str(client)] = reason
        else:
            self.failed[str(client)] = reason if verb in ("answer", "local") else f"{verb}: {reason}"

    def note(self, counts: Mapping[str, Any]) -> None:
        """Add one client's `counts` (the numbers in its `Client.notes`, by name) to the sums over all clients."""
        for key, count in counts.items():
            self.noted[key] = self.noted.get(key, 0) + count

    def outliers(self) -> list[int]:
        """Return the indices of clients whose replies have far larger values than those of most clients.

        A client is returned if the largest value in its reply is more than ten times the median over all clients.
        """
        usual = statistics.median(self.largest.values()) if self.largest else 0.0
        return [client for client, value in self.largest.items() if value > 10 * usual]

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
        """Return the round's bytes, failures and times as a row for the history, by column name.

        Args:
            drawn: indices of the clients that were drawn in the round.
        """
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
            **({"noted": self.noted} if self.noted else {}),
            "client_seconds": self.seconds,
            "server_seconds": self.server_seconds,
        }
