"""Base class of filters, which change replies on the client and the aggregated replies on the server."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from fl._components import Component
from fl.aggregation import AggregatedReplies, Schema
from fl.message import Entry, Message
from fl.method import Method
from fl.participants import Client, Server


class Filter(Component):
    """Base class of filters, which change replies on the client and the aggregated replies on the server.

    Filters clip, add noise or compute secure sums; `Filtered(method, filter, ...)` applies them to a federated method.
    Override only the functions that you need.

    Like a federated method, a filter is immutable and exists on the server and on every client. For values that it adds
    to messages or keeps on the server, it may declare `Entry` objects as class attributes. A run can be resumed only
    with equal constructor arguments, so use a frozen dataclass.

    Attributes:
        before, after: names of additional exchanges (a request and its reply) with drawn clients in every round, before
            and after the training. On the client, the filter's function of this name runs, with the signature of
            `Method.local`. On the server, `send_exchange`, `expect_exchange` and `receive_exchange` handle the
            exchange.
    """

    before: ClassVar[tuple[str, ...]] = ()
    after: ClassVar[tuple[str, ...]] = ()
    _usage = "Filtered(FedAvg(factory=...), {})"

    @property
    def private(self) -> bool:
        """True if the filter adds noise to the clients' releases and charges their privacy cost to a ledger.

        No other filter of the method may then override a function that sees replies, or add exchanges.
        """
        return False

    @property
    def sealed(self) -> bool:
        """True if the filter hides single replies from the server, which learns only sums.

        Such a filter must be the last filter of a method.
        """
        return False

    @property
    def draws_clients(self) -> bool:
        """True if the filter overrides `draw`, and so draws the clients of each round itself."""
        return type(self).draw is not Filter.draw

    def draw(self, server: Server) -> list[int]:
        """Return the indices of the clients of this round, in ascending order. Called on the `server`, once per round.

        By default, the engine that runs the rounds draws the clients. Override this function if a privacy guarantee
        depends on the draw, and use the random numbers of `server.secret`.
        """
        raise LookupError(f"{self.name} leaves the draw to the engine: call `draw` only if `draws_clients` is true")

    def check(self, method: Method) -> None:
        """Raise ValueError if the filter cannot be applied to a `method`.

        The error message must say what in the method prevents the use of the filter, and what to do instead. Called
        when `Filtered(method, ...)` is built.
        """

    def start(self, server: Server, expected: Schema, entries: Mapping[str, Entry[Any]]) -> None:
        """Store the filter's initial values in `server.state`. Called once on the server, before round 1.

        Args:
            server: server of the run. Its state already holds the method's values.
            expected: schema of a reply before this filter changes it. The schema of client 0 is used as an example.
            entries: declared entries (`Entry`) of the messages and the state of the method and its filters, by key.
        """

    def send(self, server: Server, client: int, message: Message) -> None:
        """Add entries of the filter to the `message` that the server sends to this `client`. Called on the `server`.

        The hook may be called any number of times, for any client, so it must not change any state.
        """

    def expect(self, server: Server, client: int, schema: Schema) -> None:
        """Change the schema of a reply in the same way as the method `out` changes the reply. Called on the server.

        Args:
            server: server of the run.
            client: index of the client that sends the reply.
            schema: schema of the reply before `out` changes the reply. Change the schema in place.
        """

    def send_exchange(self, server: Server, verb: str, client: int) -> Message:
        """Return the message to the `client` in the exchange called `verb`.

        `verb` is a name in this filter's attribute `before` or `after` (exchanges before or after the training).

        Called on the `server` any number of times. The hook must not change any state.
        """
        return Message()

    def expect_exchange(self, server: Server, verb: str, client: int) -> Schema:
        """Return the schema of the `client`'s reply in the exchange called `verb`.

        `verb` is a name in this filter's attribute `before` or `after` (exchanges before or after the training).

        Called on the `server`.
        """
        return {}

    def receive_exchange(self, server: Server, verb: str, replies: AggregatedReplies) -> Mapping[int, str]:
        """Process the replies of one exchange.

        Called on the server after each exchange that this filter declares, and after "local", the exchange in which
        clients train.

        Args:
            server: server of the run.
            verb: name of the exchange.
            replies: replies of the exchange, before any filter changes them by its method `back`. The values of each
                entry are aggregated over the clients by the entry's rule (see `Entry`).

        Returns:
            The clients whose replies cannot be used: a mapping, client index -> reason.
        """
        return {}

    def out(self, client: Client, message: Message, reply: Message) -> Message:
        """Change a reply before it is sent, and return the changed reply.

        The next filter in `Filtered(method, ...)` gets the changed reply. After the last filter, the client sends it.

        Called on the client after training.

        Args:
            client: client that replies. Changes to its memory (`client.memory`, the values that it keeps between
                rounds) are stored if the server uses the reply.
            message: message from the server.
            reply: reply of the method, or of the previous filter.
        """
        return reply

    def back(self, server: Server, replies: AggregatedReplies, expected: Schema) -> AggregatedReplies:
        """Change the aggregated replies, for example add noise, or undo the changes that `out` made on the clients.

        Called on the server, once per round.

        Args:
            server: server of the run.
            replies: aggregated replies: for each entry, the aggregate of the clients' values by the entry's rule (see
                `Entry`). `back` of the filters that come later in `Filtered(method, ...)` has already changed them.
            expected: schema of a reply before `out` of this filter changes it. It is made for client 0, which stands
                for all clients.

        Returns:
            The changed replies. The filter that comes before this one in `Filtered(method, ...)` gets them or, if there
            is none, the method.
        """
        return replies

    def after_receive(self, server: Server, before: Server, method: Method) -> None:
        """Measure the result of the round, after the method has updated the server's state.

        Called on the server, once per round. Write measurements to `server.notes`; they become columns of the history.
        Do not change `server.state`.

        Args:
            server: server with the new state.
            before: the same server with the state at the start of the round.
            method: the method, without its filters.
        """
