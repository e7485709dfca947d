"""Filters: what stands between a method and the wire, as an ordered chain with a client half and a server half."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from distillkit.privacy import PrivacyError
from fl.message import Message
from fl.method import Client, Method, Predictor, Server, require_method
from fl.parts import Keyed, Part, require_own_entries, require_plain_options
from fl.reduce import Reduced, Schema

__all__ = ["Filter", "Filtered"]


class Filter(Part):
    """One link of the chain: clipping, noise, secure sums. It overrides only what it needs.

    Like a method it is frozen and lives on the server and on every client alike; it may declare entries of its own, as
    class attributes. What it was built with is part of the run's identity: a frozen dataclass says it.

    Attributes:
        exact: whether `out` and `back` together leave every sum over clients as it was, number for number, as the masks
            of a secure sum do. Nothing else may change replies once a private filter has bounded them.
    """

    exact: ClassVar[bool] = False

    @classmethod
    def in_a_method(cls, part: str) -> str:
        """Around a method."""
        return f"Filtered(FedAvg(factory=...), {part})"

    @property
    def private(self) -> bool:
        """Whether it charges a ledger; see `Method.private`."""
        return False

    @property
    def draws_clients(self) -> bool:
        """Whether `draw` says who takes part in a round."""
        return type(self).draw is not Filter.draw

    def draw(self, server: Server) -> list[int]:
        """The clients that take part in this round; see `Method.draw`."""
        raise LookupError(f"{self.name} leaves the draw to the engine")

    def check(self, method: Method) -> None:
        """Raise ValueError, naming the entry and what to do, if the method cannot stand inside; when it is built."""

    def start(self, server: Server, expected: Schema) -> None:
        """Prepare the filter's own state, after the method's.

        `expected` says what the method's own replies hold, before any filter (client 0's).
        """

    def send(self, server: Server, client: int, message: Message) -> None:
        """Add to what this client is told. Pure."""

    def expect(self, server: Server, client: int, schema: Schema) -> None:
        """Say how replies look once `out` has changed them."""

    def out(self, client: Client, message: Message, reply: Message) -> Message:
        """The client half: the reply as it goes on."""
        return reply

    def back(self, server: Server, replies: Reduced, expected: Schema) -> Reduced:
        """The server half: undo `out` on the reduced replies, or add noise to them; `expected` as in `start`."""
        return replies


class Filtered(Method):
    """A method with filters around it.

    On the client a reply passes the filters in their order, the first one nearest to the method; on the server the
    reduced replies pass them in reverse. All else is the method's own. `Filtered(Filtered(m, a), b)` is
    `Filtered(m, a, b)`.

    Args:
        method: any method.
        filters: at least one, each kind once.

    Raises:
        ValueError: a filter given twice, two that draw the clients, or a method that a filter refuses.
        PrivacyError: a filter that changes replies after a private one has bounded them.
    """

    key = "Filtered"

    def __init__(self, method: Method, *filters: Filter) -> None:
        if isinstance(method, Filtered):
            filters = (*method.filters, *filters)
            method = method.method
        wrong = [f for f in filters if not isinstance(f, Filter)]
        require_method(method)
        if wrong or not filters:
            given = ", ".join(type(x).__name__ for x in (method, *filters))
            raise TypeError(f"Filtered takes a method and then one or more filters, got {given}")
        for one in filters:
            require_plain_options(one, Filter)
        for first, second in itertools.combinations(filters, 2):
            if type(first) is type(second):
                raise ValueError(f"{first.name} is given twice; a filter may stand in a chain once")
            if first.key == second.key:
                raise ValueError(f"{first.name} and {second.name} have the same key, {first.key!r}: state another")
        self.method: Method = method
        self.filters: tuple[Filter, ...] = filters
        self._links: tuple[Method | Filter, ...] = (method, *filters)
        drawing = [type(x).__name__ for x in self._links if x.draws_clients]
        if len(drawing) > 1:
            raise ValueError(f"{' and '.join(drawing)} cannot be combined: both draw the clients")
        for one in filters:
            one.check(method)
        _require_bounds_kept(filters)
        require_own_entries(self.parts)

    def arguments(self) -> tuple[Sequence[Any], Mapping[str, Any]]:
        """The method and the filters."""
        return self._links, {}

    @property
    def inner(self) -> Method:
        """The method itself."""
        return self.method.inner

    @property
    def private(self) -> bool:
        """Whether the method is, or a filter."""
        return any(x.private for x in self._links)

    @property
    def draws_clients(self) -> bool:
        """Whether the method draws the clients, or a filter."""
        return any(x.draws_clients for x in self._links)

    def draw(self, server: Server) -> list[int]:
        """The draw of the one that draws."""
        return next(x for x in self._links if x.draws_clients).draw(server)

    @property
    def parts(self) -> tuple[Keyed, ...]:
        """The method's, and the filters."""
        return (*self.method.parts, *self.filters)

    def check_run(self, server: Server, rounds: int) -> None:
        """The method's check."""
        self.method.check_run(server, rounds)

    def start(self, server: Server) -> None:
        """First the method, then the filters."""
        self.method.start(server)
        for one in self.filters:
            one.start(server, self.method.expect(server, 0))

    def send(self, server: Server, client: int) -> Message:
        """What the method says, and the filters."""
        message = self.method.send(server, client)
        for one in self.filters:
            one.send(server, client, message)
        return message

    def expect(self, server: Server, client: int) -> Schema:
        """The method's reply as the filters change it."""
        schema = self.method.expect(server, client)
        for one in self.filters:
            one.expect(server, client, schema)
        return schema

    def local(self, client: Client, message: Message) -> Message:
        """The method's reply, through the client halves in order."""
        reply = self.method.local(client, message)
        for one in self.filters:
            reply = one.out(client, message, reply)
        return reply

    def receive(self, server: Server, replies: Reduced) -> None:
        """The replies, through the server halves in reverse, to the method."""
        for one in reversed(self.filters):
            replies = one.back(server, replies, self.method.expect(server, 0))
        self.method.receive(server, replies)

    @property
    def asks(self) -> bool:
        """Whether the method asks; answers pass no filter, so a filter may refuse such a method."""
        return self.method.asks

    def answer(self, client: Client, message: Message) -> Message:
        """The method's answer."""
        return self.method.answer(client, message)

    def expect_answer(self, server: Server, client: int) -> Schema:
        """As the method says."""
        return self.method.expect_answer(server, client)

    def answered(self, server: Server, replies: Reduced) -> None:
        """Give the answers to the method."""
        self.method.answered(server, replies)

    def read_reply(self, server: Server, reply: Message) -> Message:
        """What the method derives from one reply as it arrived."""
        return self.method.read_reply(server, reply)

    def evaluate(self, client: Client, message: Message) -> Message:
        """The method's test."""
        return self.method.evaluate(client, message)

    def expect_evaluation(self, server: Server, client: int) -> Schema:
        """As the method says."""
        return self.method.expect_evaluation(server, client)

    def predictors(self, server: Server) -> Mapping[str, Predictor]:
        """The method's models."""
        return self.method.predictors(server)


def _require_bounds_kept(filters: tuple[Filter, ...]) -> None:
    """Refuse what would change a reply after it was clipped: noise that was scaled to the clip would not cover it."""
    private = next((i for i, one in enumerate(filters) if one.private), len(filters))
    for later in filters[private + 1 :]:
        changes = type(later).out is not Filter.out or type(later).back is not Filter.back
        if changes and not later.exact:
            raise PrivacyError(
                f"{later.name} changes replies after {filters[private].name} has bounded them, so its noise would not "
                f"cover what arrives: give {later.name} first. (The masks of a secure sum, which leave every sum as it "
                "was, say `exact = True`.)"
            )
