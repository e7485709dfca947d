"""Base class of filters, which process replies on the client before sending and on the server after arrival."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from fl._components import Component
from fl.aggregation import AggregatedReplies, Schema
from fl.message import Entry, Message
from fl.method import Method
from fl.participants import Client, Server

__all__ = ["Filter"]


class Filter(Component):
    """One filter of a chain, such as clipping, noise or secure sums. Override only the methods that you need.

    Like a method, a filter is immutable and exists on the server and on every client. It may declare its own entries as
    class attributes. Its constructor arguments are part of the run's identity, so use a frozen dataclass.

    Attributes:
        exact: whether `out` and `back` together leave every sum over clients exactly unchanged, as the masks of a
            secure sum do. After a private filter has bounded the replies, only exact filters may change them.
        before, after: names of additional exchanges with drawn clients in every round, before and after the training.
            Each name is a method of this filter with the signature of `Method.local`, called on the client; see
            `Method.exchanges`. The server side is `send_exchange`, `expect_exchange` and `receive_exchange`.
    """

    exact: ClassVar[bool] = False
    before: ClassVar[tuple[str, ...]] = ()
    after: ClassVar[tuple[str, ...]] = ()

    @classmethod
    def usage_example(cls, part: str) -> str:
        """Return example code that builds a method with this filter, for error messages. `part` is the filter's
        code."""
        return f"Filtered(FedAvg(factory=...), {part})"

    @property
    def private(self) -> bool:
        """Whether the filter adds noise to the clients' releases and charges a ledger; see `Method.private`."""
        return False

    @property
    def sealed(self) -> bool:
        """Whether the server learns only sums of the replies; such a filter must come last. See `Method.sealed`."""
        return False

    @property
    def draws_clients(self) -> bool:
        """Whether the filter draws the clients of a round instead of the engine, because it overrides `draw`."""
        return type(self).draw is not Filter.draw

    def draw(self, server: Server) -> list[int]:
        """Return the clients of this round in ascending order; see `Method.draw`. Called on the `server`."""
        raise LookupError(f"{self.name} leaves the draw to the engine: ask it only if `draws_clients`")

    def check(self, method: Method) -> None:
        """Refuse a `method` that the filter cannot wrap, with a ValueError that names the entry and the remedy.

        Called when `Filtered(method, ...)` is built.
        """

    def start(self, server: Server, expected: Schema, entries: Mapping[str, Entry[Any]]) -> None:
        """Prepare the filter's state, after the method's state. Called once on the server, before round 1.

        Args:
            server: server whose state holds the method's values.
            expected: schema of a reply before this filter (client 0's).
            entries: entries of the method and the filters, by key, with their aggregation rules.
        """

    def send(self, server: Server, client: int, message: Message) -> None:
        """Add entries to the `message` to this `client`. Called on the `server`; pure, as `Method.send` is."""

    def expect(self, server: Server, client: int, schema: Schema) -> None:
        """Change the schema so that it describes replies after `out`. Called on the server.

        Args:
            server: server whose state holds the values of the method and the filters.
            client: index of the client that sends the reply.
            schema: schema of the reply before this filter; change it in place.
        """

    def send_exchange(self, server: Server, verb: str, client: int) -> Message:
        """Return the message to the `client` in the filter's own exchange `verb`.

        Called on the `server`. The hook must be pure, as `Method.send_exchange` is.
        """
        return Message()

    def expect_exchange(self, server: Server, verb: str, client: int) -> Schema:
        """Return the schema of the `client`'s reply in the filter's own exchange `verb`. Called on the `server`."""
        return {}

    def receive_exchange(self, server: Server, verb: str, replies: AggregatedReplies) -> Mapping[int, str]:
        """Process the replies of one of the filter's own exchanges, or of "local"; see `Method.receive_exchange`.

        Args:
            server: server whose state holds the values of the method and the filters.
            verb: name of the exchange.
            replies: replies, aggregated by the rules of their entries. Replies of "local" are passed before any `back`
                has run.
        """
        return {}

    def out(self, client: Client, message: Message, reply: Message) -> Message:
        """Return the reply for the next filter or for sending. Called on the client, once per training.

        Args:
            client: client that runs the filter; changes to `client.memory` are kept if the reply is used.
            message: message from the server.
            reply: reply of the method, or of the previous filter.
        """
        return reply

    def back(self, server: Server, replies: AggregatedReplies, expected: Schema) -> AggregatedReplies:
        """Undo `out` on the aggregated replies, or add noise. Called on the server, once per round.

        Args:
            server: server whose state holds the values of the method and the filters.
            replies: replies, aggregated by the rules of their entries, or returned by `back` of the next filter.
            expected: schema of a reply before this filter (client 0's).

        Returns:
            The replies for the previous filter, or for the method.
        """
        return replies

    def after_receive(self, server: Server, before: Server, method: Method) -> None:
        """Measure the round after the method has updated its state. Called on the server, once per round.

        Write results into `server.notes`, which become columns of the history; do not change `server.state`.

        Args:
            server: server with the new state.
            before: the same server with the state at the start of the round.
            method: the wrapped method.
        """
