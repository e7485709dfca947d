"""The path of a reply: request it from a client, validate it, accumulate it.

`ReplyCollector.collect` plays one exchange of a round in these three steps, and `ReplyCollector.validate` holds every
check that a reply must pass before anything of it counts.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from distillkit.privacy import BudgetExhausted
from fl.aggregation import Aggregator, BadReply, EntrySpec, Schema, check_reply
from fl.engine._devices import placed
from fl.engine._dispatch import Dispatcher
from fl.engine._transport import BundledExchange, ClientRequest, ClientResult
from fl.engine.store import Store
from fl.message import Message, payload_bytes
from fl.participants import Interrupted

__all__ = ["ReplyCollector", "RoundStats"]


class ReplyCollector:
    """Collector of the clients' replies in one exchange after the other.

    Args:
        dispatcher: sends the requests, and knows the method and the server.
        transcript: where every message that the server sees is kept, if it is.

    Attributes:
        report: called with a few words on the progress; not where the clients are drawn in secret.
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
        bundled: BundledExchange | None = None,
        late: bool = False,
    ) -> Aggregator:
        """Request replies from clients, validate each one, and accumulate the valid ones in the order of `clients`.

        Args:
            verb: the exchange: "answer" before round 1, "local", or an additional one of the method.
            clients: their numbers.
            stats: counts bytes, seconds and failures.
            bundled: an exchange that is sent with this one.
            late: whether the round's "local" replies are accumulated already.

        Returns:
            The accumulated replies.
        """
        dispatcher, reducer = self.dispatcher, Aggregator(self.dispatcher.entries)
        exchange = dispatcher.exchange(verb, clients, keeps=verb == "local", bundled=bundled)
        for i, (result, request, memory) in enumerate(exchange, start=1):
            if verb != "answer" and not self.method.draws_clients:
                self.report(f"client {i} of {len(clients)}" + ("" if verb == "local" else f", {verb}"))
            if result.absent:
                stats.empty.append(result.client)
                continue
            stats.seconds += result.seconds
            reason = result.error or dispatcher.thread.run(partial(self._accumulate, reducer, verb, result))
            self._record(verb, result, request, stats, valid=reason is None)
            if reason is not None:
                stats.fail(verb, result.client, reason, late=late)
                continue
            stats.note(result.notes)
            if verb != "answer":
                dispatcher.cache_index.update(result.client, request, memory)
        return reducer

    def _accumulate(self, reducer: Aggregator, verb: str, result: ClientResult) -> str | None:
        """Validate one reply and accumulate it, or return why it cannot be used; nothing of such a reply counts."""
        schema = self._schema(verb, result.client)
        try:
            reply = self.validate(verb, result, schema)
            reducer.require(reply)
        except BadReply as error:
            return str(error)[:300]
        except (Interrupted, BudgetExhausted):
            raise
        except Exception as error:  # a reply may hold anything: however its check fails, this reply has failed
            return f"cannot be used: {type(error).__name__}: {error}"[:300]
        reducer.fold(result.client, reply)
        return None

    def _schema(self, verb: str, client: int) -> Schema:
        if verb == "answer":
            return self.method.expect_answer(self.server, client)
        if verb == "local":
            return self.method.expect(self.server, client)
        return self.method.expect_exchange(self.server, verb, client)

    def validate(self, verb: str, result: ClientResult, schema: Schema) -> Message:
        """Check a client's reply and notes, and return the reply with what the server derives from it.

        Args:
            verb: the exchange.
            result: what the client sent.
            schema: entries, shapes and bounds of the reply; see `fl.aggregation.check_reply`.

        Raises:
            BadReply: an entry is missing, undeclared, or out of its type, shape or bounds.
        """
        wrong = [k for k, n in result.notes.items() if not isinstance(n, int | float) or not math.isfinite(n)]
        if wrong:
            raise BadReply(f"its note {wrong[0]!r} is no finite number")
        entries = self.dispatcher.entries
        reply = check_reply(placed(result.reply, self.server.device), entries, schema)
        derived = self.method.read_reply(self.server, reply) if verb == "local" else Message()
        if not len(derived):
            return reply
        reply = Message.unchecked({**dict(reply.items()), **dict(derived.items())})
        return check_reply(reply, entries, {**schema, **{key: EntrySpec(value) for key, value in derived.items()}})

    def _record(
        self, verb: str, result: ClientResult, request: ClientRequest | None, stats: RoundStats, *, valid: bool
    ) -> None:
        """Count the bytes of a request and of a valid reply, and keep both in the transcript."""
        client, reply = result.client, result.reply if valid else None
        sent = payload_bytes(reply) if reply is not None else {}
        stats.count(client, sent, self.dispatcher.request_sizes(request, client))
        if self.transcript is None:
            return
        for direction, message in (("down", request.message if request is not None else None), ("up", reply)):
            if message is not None:
                self.transcript.record(self.server.round, client, direction, message, verb)


@dataclass
class RoundStats:
    """Counts of one round, over all its exchanges.

    Attributes:
        up, down: bytes of the replies that counted, and of the requests, by entry key.
        by_client: both together, [up, down] by client.
        failed: why a client's reply is not in the round, by client.
        failed_after: why a client whose reply is in the round failed in a later exchange, by verb and client.
        noted: the clients' notes, summed.
        empty: clients without images.
        same: the numbers in `by_client`; equal numbers are one object, because the rows of all rounds stay in memory.
        seconds, server_seconds: CPU seconds of the clients, and of the server between the exchanges.
    """

    up: dict[str, int] = field(default_factory=dict)
    down: dict[str, int] = field(default_factory=dict)
    by_client: dict[str, list[int]] = field(default_factory=dict)
    same: dict[int, int] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    failed_after: dict[str, dict[str, str]] = field(default_factory=dict)
    noted: dict[str, float] = field(default_factory=dict)
    empty: list[int] = field(default_factory=list)
    seconds: float = 0.0
    server_seconds: float = 0.0

    def count(self, client: int, sent: Mapping[str, int], received: Mapping[str, int]) -> None:
        """Add the bytes of one exchange with a client.

        Args:
            client: its number.
            sent, received: bytes of its reply, and of its request, by entry key.
        """
        for total, part in ((self.up, sent), (self.down, received)):
            for key, size in part.items():
                total[key] = total.get(key, 0) + size
        name = sys.intern(str(client))
        up, down = self.by_client.get(name, (0, 0))
        up, down = up + sum(sent.values()), down + sum(received.values())
        self.by_client[name] = [self.same.setdefault(up, up), self.same.setdefault(down, down)]

    def fail(self, verb: str, client: int, reason: str, *, late: bool) -> None:
        """Record why a client is left out of the rest of the round.

        Args:
            verb: the exchange in which it failed.
            client: its number.
            reason: text for the history.
            late: whether its "local" reply is accumulated already.
        """
        if late:
            self.failed_after.setdefault(verb, {})[str(client)] = reason
        else:
            self.failed[str(client)] = reason if verb in ("answer", "local") else f"{verb}: {reason}"

    def note(self, counts: Mapping[str, Any]) -> None:
        """Add one client's notes, by name (`counts`)."""
        for key, count in counts.items():
            self.noted[key] = self.noted.get(key, 0) + count

    def reasons(self) -> str:
        """Return the first five reasons why clients failed, in one line."""
        found = [*self.failed.items(), *(pair for failed in self.failed_after.values() for pair in failed.items())]
        return "; ".join(f"client {client} {reason}" for client, reason in found[:5])

    def row(self, drawn: list[int]) -> dict[str, Any]:
        """Return the columns of the history's row, for the clients that were `drawn`."""
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
