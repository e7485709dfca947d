"""The base of every filter: what stands between a method and the wire, with a client half and a server half."""

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
    """One link of the chain: clipping, noise, secure sums. It overrides only what it needs.

    Like a method it is frozen and lives on the server and on every client alike; it may declare entries of its own, as
    class attributes. What it was built with is part of the run's identity: a frozen dataclass says it.

    Attributes:
        exact: whether `out` and `back` together leave every sum over clients as it was, number for number, as the masks
            of a secure sum do. Nothing else may change replies once a private filter has bounded them.
        before, after: what drawn clients are asked for in every round besides the training, by the names of methods of
            this filter: called as `Method.local`, where the client is; see `Method.exchanges`. Their server side is
            `send_exchange`, `expect_exchange` and `receive_exchange`.
    """

    exact: ClassVar[bool] = False
    before: ClassVar[tuple[str, ...]] = ()
    after: ClassVar[tuple[str, ...]] = ()

    @classmethod
    def usage_example(cls, part: str) -> str:
        """How a method with this filter, written as `part`, is written; for the error where it is given alone."""
        return f"Filtered(FedAvg(factory=...), {part})"

    @property
    def private(self) -> bool:
        """Whether it noises what the clients release and charges a ledger for it; see `Method.private`."""
        return False

    @property
    def sealed(self) -> bool:
        """Whether the server learns sums alone of what leaves `out`; it must be the last; see `Method.sealed`."""
        return False

    @property
    def draws_clients(self) -> bool:
        """Whether `draw` says who takes part in a round, and not the engine; yes if it writes `draw`."""
        return type(self).draw is not Filter.draw

    def draw(self, server: Server) -> list[int]:
        """The clients that take part in this round, ascending; see `Method.draw`. Called on the `server`."""
        raise LookupError(f"{self.name} leaves the draw to the engine: ask it only if `draws_clients`")

    def check(self, method: Method) -> None:
        """Refuse a `method` that cannot stand inside, with a ValueError that names the entry and the remedy.

        Called when `Filtered(method, ...)` is built.
        """

    def start(self, server: Server, expected: Schema, entries: Mapping[str, Entry[Any]]) -> None:
        """Prepare the filter's own state, after the method's. Called on the server, once, before round 1.

        Args:
            server: its state holds what the method put there.
            expected: what a reply holds before this filter (client 0's).
            entries: what the method and the filters declare, by key: the rules by which replies combine.
        """

    def send(self, server: Server, client: int, message: Message) -> None:
        """Add to the `message` what this `client` is told. Called on the `server`; pure, as `Method.send`."""

    def expect(self, server: Server, client: int, schema: Schema) -> None:
        """Say how replies look once `out` has changed them, so that nothing else is let in. Called on the server.

        Args:
            server: its state holds what the method and the filters keep.
            client: whose reply it is.
            schema: what the reply holds before this filter; to change in place.
        """

    def send_exchange(self, server: Server, verb: str, client: int) -> Message:
        """What the `client` is told in one of the filter's own exchanges, named by its `verb`.

        Called on the `server`; pure, as `Method.send_exchange`.
        """
        return Message()

    def expect_exchange(self, server: Server, verb: str, client: int) -> Schema:
        """How the `client` answers in one of the filter's own exchanges, by its `verb`. Called on the `server`."""
        return {}

    def receive_exchange(self, server: Server, verb: str, replies: AggregatedReplies) -> Mapping[int, str]:
        """Take the answers of one of the filter's own exchanges, or of "local"; see `Method.receive_exchange`.

        Args:
            server: its state holds what the method and the filters keep.
            verb: of the exchange.
            replies: combined as their entries say; those of "local" as they arrived, before any `back`.
        """
        return {}

    def out(self, client: Client, message: Message, reply: Message) -> Message:
        """The client half: the reply as it goes on, to the next filter or to the wire. Called once a training.

        Args:
            client: where it runs; what it writes into `client.memory` is kept if the reply is used.
            message: what the server said.
            reply: as the method, or the filter before, gives it.
        """
        return reply

    def back(self, server: Server, replies: AggregatedReplies, expected: Schema) -> AggregatedReplies:
        """The server half: undo `out` on the reduced replies, or add noise to them. Called once a round.

        Args:
            server: its state holds what the method and the filters keep.
            replies: combined as their entries say, or as the filter after this one gives them.
            expected: what a reply holds before this filter (client 0's).

        Returns:
            The replies as the filter before this one, or the method, receives them.
        """
        return replies
