"""Base class of filters, which process replies between a method and the wire on both sides."""

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
    """One filter of a chain: clipping, noise or secure sums. Override only what you need.

    Like a method it is immutable and exists on the server and on every client. It may declare entries of its own, as
    class attributes. Its constructor arguments are part of the run's identity: use a frozen dataclass.

    Attributes:
        exact: whether `out` and `back` together leave every sum over clients unchanged, number for number, as the masks
            of a secure sum do. After a private filter has bounded the replies, only exact filters may change them.
        before, after: names of further exchanges with drawn clients in every round, before and after the training. They
            are methods of this filter with the signature of `Method.local`, called on the client; see
            `Method.exchanges`. Their server side is `send_exchange`, `expect_exchange` and `receive_exchange`.
    """

    exact: ClassVar[bool] = False
    before: ClassVar[tuple[str, ...]] = ()
    after: ClassVar[tuple[str, ...]] = ()

    @classmethod
    def usage_example(cls, part: str) -> str:
        """Return the code of a method with this filter, written as `part`, for error messages."""
        return f"Filtered(FedAvg(factory=...), {part})"

    @property
    def private(self) -> bool:
        """Whether it adds noise to what the clients release and charges a ledger for it; see `Method.private`."""
        return False

    @property
    def sealed(self) -> bool:
        """Whether the server learns sums alone of what leaves `out`; it must be the last; see `Method.sealed`."""
        return False

    @property
    def draws_clients(self) -> bool:
        """Whether it draws the clients of a round instead of the engine: whether it overrides `draw`."""
        return type(self).draw is not Filter.draw

    def draw(self, server: Server) -> list[int]:
        """Return the clients of this round, ascending; see `Method.draw`. Called on the `server`."""
        raise LookupError(f"{self.name} leaves the draw to the engine: ask it only if `draws_clients`")

    def check(self, method: Method) -> None:
        """Refuse a `method` that the filter cannot wrap, with a ValueError that names the entry and the remedy.

        Called when `Filtered(method, ...)` is built.
        """

    def start(self, server: Server, expected: Schema, entries: Mapping[str, Entry[Any]]) -> None:
        """Prepare the filter's own state, after the method's. Called on the server, once, before round 1.

        Args:
            server: its state holds the method's values.
            expected: schema of a reply before this filter (client 0's).
            entries: entries of the method and the filters, by key, with their aggregation rules.
        """

    def send(self, server: Server, client: int, message: Message) -> None:
        """Add entries to the `message` to this `client`. Called on the `server`; pure, as `Method.send`."""

    def expect(self, server: Server, client: int, schema: Schema) -> None:
        """Change the schema to that of replies after `out`. Called on the server.

        Args:
            server: its state holds the values of the method and the filters.
            client: whose reply it is.
            schema: of the reply before this filter; to change in place.
        """

    def send_exchange(self, server: Server, verb: str, client: int) -> Message:
        """Return the message to the `client` in one of the filter's own exchanges, called `verb`.

        Called on the `server`; pure, as `Method.send_exchange`.
        """
        return Message()

    def expect_exchange(self, server: Server, verb: str, client: int) -> Schema:
        """Return the schema of the `client`'s reply in the filter's own exchange `verb`. Called on the `server`."""
        return {}

    def receive_exchange(self, server: Server, verb: str, replies: AggregatedReplies) -> Mapping[int, str]:
        """Take the replies of one of the filter's own exchanges, or of "local"; see `Method.receive_exchange`.

        Args:
            server: its state holds the values of the method and the filters.
            verb: name of the exchange.
            replies: aggregated by their entries' rules; those of "local" as they arrived, before any `back`.
        """
        return {}

    def out(self, client: Client, message: Message, reply: Message) -> Message:
        """Return the reply for the next filter or the wire: the client side of the filter. Called once per training.

        Args:
            client: where it runs; changes of `client.memory` are kept if the reply is used.
            message: from the server.
            reply: of the method, or of the filter before.
        """
        return reply

    def back(self, server: Server, replies: AggregatedReplies, expected: Schema) -> AggregatedReplies:
        """Undo `out` on the aggregated replies, or add noise: the server side of the filter. Called once a round.

        Args:
            server: its state holds the values of the method and the filters.
            replies: aggregated by their entries' rules, or as the filter after this one returns them.
            expected: schema of a reply before this filter (client 0's).

        Returns:
            The replies for the filter before this one, or for the method.
        """
        return replies
