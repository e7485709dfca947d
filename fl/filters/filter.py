"""Filters: what stands between a method and the wire, as an ordered chain with a client half and a server half."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from distillkit.privacy import PrivacyError
from fl.message import Entry, Message
from fl.method import Method, Predictor, require_method
from fl.parts import Keyed, Part, require_own_entries, require_plain_options
from fl.reduce import Reduced, Schema
from fl.sides import Client, Server

__all__ = ["Filter", "Filtered"]


class Filter(Part):
    """One link of the chain: clipping, noise, secure sums. It overrides only what it needs.

    Like a method it is frozen and lives on the server and on every client alike; it may declare entries of its own, as
    class attributes. What it was built with is part of the run's identity: a frozen dataclass says it.

    Attributes:
        exact: whether `out` and `back` together leave every sum over clients as it was, number for number, as the masks
            of a secure sum do. Nothing else may change replies once a private filter has bounded them.
        before, after: what drawn clients are asked for in every round besides the training, by the names of methods of
            this filter: called as `Method.local`, where the client is; see `Method.exchanges`. Its verbs are `send_in`,
            `expect_in` and `receive_in`.
    """

    exact: ClassVar[bool] = False
    before: ClassVar[tuple[str, ...]] = ()
    after: ClassVar[tuple[str, ...]] = ()

    @classmethod
    def in_a_method(cls, part: str) -> str:
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

    def send_in(self, server: Server, verb: str, client: int) -> Message:
        """What the `client` is told in one of the filter's own exchanges, named by its `verb`.

        Called on the `server`; pure, as `Method.send_in`.
        """
        return Message()

    def expect_in(self, server: Server, verb: str, client: int) -> Schema:
        """How the `client` answers in one of the filter's own exchanges, by its `verb`. Called on the `server`."""
        return {}

    def receive_in(self, server: Server, verb: str, replies: Reduced) -> Mapping[int, str]:
        """Take the answers of one of the filter's own exchanges, or of "local"; see `Method.receive_in`.

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

    def back(self, server: Server, replies: Reduced, expected: Schema) -> Reduced:
        """The server half: undo `out` on the reduced replies, or add noise to them. Called once a round.

        Args:
            server: its state holds what the method and the filters keep.
            replies: combined as their entries say, or as the filter after this one gives them.
            expected: what a reply holds before this filter (client 0's).

        Returns:
            The replies as the filter before this one, or the method, receives them.
        """
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
        PrivacyError: a filter that changes replies after a private one has bounded them, or after one that seals them.
    """

    key = "Filtered"

    def __init__(self, method: Method, *filters: Filter) -> None:
        if isinstance(method, Filtered):
            filters = (*method.filters, *filters)
            method = method.method
        require_method(method)
        for one in filters:
            if isinstance(one, type) and issubclass(one, Filter):
                raise TypeError(f"a filter must be an object, got the class {one.__name__}: {one.__name__}(...)")
        if not filters or not all(isinstance(one, Filter) for one in filters):
            given = ", ".join(type(x).__name__ for x in (method, *filters))
            raise TypeError(f"Filtered takes a method and then one or more filters, got {given}")
        for one in filters:
            require_plain_options(one, Filter)
        for first, second in itertools.combinations(filters, 2):
            if type(first) is type(second):
                raise ValueError(f"{first.name} is given twice; a filter may stand in a chain once: leave one out")
            if first.key == second.key:
                raise ValueError(
                    f"{first.name} and {second.name} have the same key, {first.key!r}: state another in one"
                )
        self.method: Method = method
        self.filters: tuple[Filter, ...] = filters
        self._links: tuple[Method | Filter, ...] = (method, *filters)
        drawing = [type(x).__name__ for x in self._links if x.draws_clients]
        if len(drawing) > 1:
            raise ValueError(f"{' and '.join(drawing)} cannot be combined: both draw the clients; leave one out")
        for one in filters:
            one.check(method)
        _require_bounds_kept(filters)
        _require_sealed_last(filters)
        require_own_entries(self.parts)

    def arguments(self) -> tuple[Sequence[Any], Mapping[str, Any]]:
        """What `repr` and the record of a run say: the method, and the filters in their order."""
        return self._links, {}

    @property
    def inner(self) -> Method:
        """The method itself, without the filters."""
        return self.method.inner

    @property
    def private(self) -> bool:
        """Whether the method noises what is released and charges a ledger for it, or a filter does."""
        return any(x.private for x in self._links)

    @property
    def sealed(self) -> bool:
        """Whether the server learns sums alone, by the method or by a filter."""
        return any(x.sealed for x in self._links)

    @property
    def exchanges(self) -> tuple[str, ...]:
        """Those of the method, between those of the filters."""
        before = [verb for one in self.filters for verb in one.before]
        return (*before, *self.method.exchanges, *(verb for one in self.filters for verb in one.after))

    def _whose(self, verb: str) -> Method | Filter:
        """Who plays a further exchange."""
        return next((one for one in self.filters if verb in (*one.before, *one.after)), self.method)

    def send_in(self, server: Server, verb: str, client: int) -> Message:
        """What the client is told in a further exchange, by whose it is."""
        return self._whose(verb).send_in(server, verb, client)

    def expect_in(self, server: Server, verb: str, client: int) -> Schema:
        """What the answer in a further exchange must look like, by whose it is."""
        return self._whose(verb).expect_in(server, verb, client)

    def receive_in(self, server: Server, verb: str, replies: Reduced) -> Mapping[int, str]:
        """Give the answers of a further exchange to whose it is; those of the training to all."""
        links = self._links if verb == "local" else (self._whose(verb),)
        found: dict[int, str] = {}
        for one in links:
            found |= one.receive_in(server, verb, replies)
        return found

    def act(self, verb: str, client: Client, message: Message) -> Message:
        """What the method answers, or a filter in an exchange of its own."""
        whose = self._whose(verb)
        return (
            getattr(whose, verb)(client, message) if isinstance(whose, Filter) else super().act(verb, client, message)
        )

    @property
    def draws_clients(self) -> bool:
        """Whether the method draws the clients, or a filter."""
        return any(x.draws_clients for x in self._links)

    def draw(self, server: Server) -> list[int]:
        """The clients of this round, drawn by the method or by the filter that draws."""
        return next(x for x in self._links if x.draws_clients).draw(server)

    @property
    def parts(self) -> tuple[Keyed, ...]:
        """The parts of the method, and the filters: whose entries may travel or be kept."""
        return (*self.method.parts, *self.filters)

    def check_run(self, server: Server, rounds: int) -> None:
        """As the method does: filters have looked at it when they were put around it."""
        self.method.check_run(server, rounds)

    def start(self, server: Server) -> None:
        """Prepare the state of the method first, then that of the filters in their order."""
        self.method.start(server)
        entries, schema = {e.key: e for e in self.entries()}, self.method.expect(server, 0)
        for one in self.filters:
            one.start(server, dict(schema), entries)
            one.expect(server, 0, schema)

    def send(self, server: Server, client: int) -> Message:
        """What the method tells the client, and what the filters add."""
        message = self.method.send(server, client)
        for one in self.filters:
            one.send(server, client, message)
        return message

    def expect(self, server: Server, client: int) -> Schema:
        """What a reply must look like: the method's own, as the filters change it."""
        schema = self.method.expect(server, client)
        for one in self.filters:
            one.expect(server, client, schema)
        return schema

    def local(self, client: Client, message: Message) -> Message:
        """The method's reply, through the filters' client halves (`out`) in their order."""
        reply = self.method.local(client, message)
        for one in self.filters:
            reply = one.out(client, message, reply)
        return reply

    def receive(self, server: Server, replies: Reduced) -> None:
        """Give the method the replies, through the filters' server halves (`back`) in reverse order."""
        schema, before = self.method.expect(server, 0), list[Schema]()
        for one in self.filters:
            before.append(dict(schema))
            one.expect(server, 0, schema)
        for one, expected in zip(reversed(self.filters), reversed(before)):
            replies = one.back(server, replies, expected)
        self.method.receive(server, replies)

    @property
    def asks(self) -> bool:
        """Whether the method asks; answers pass no filter, so a filter may refuse such a method."""
        return self.method.asks

    def answer(self, client: Client, message: Message) -> Message:
        """The method's answer to its question before round 1; no filter changes it."""
        return self.method.answer(client, message)

    def expect_answer(self, server: Server, client: int) -> Schema:
        """What the answer must look like, as the method says."""
        return self.method.expect_answer(server, client)

    def answered(self, server: Server, replies: Reduced) -> None:
        """Give the clients' answers to the method; no filter sees them."""
        self.method.answered(server, replies)

    def read_reply(self, server: Server, reply: Message) -> Message:
        """What the method derives from one reply as it arrived."""
        return self.method.read_reply(server, reply)

    def evaluate(self, client: Client, message: Message) -> Message:
        """Test a client's models as the method does; no filter changes the results."""
        return self.method.evaluate(client, message)

    def expect_evaluation(self, server: Server, client: int) -> Schema:
        """What the results of `evaluate` must look like, as the method says."""
        return self.method.expect_evaluation(server, client)

    def predictors(self, server: Server) -> Mapping[str, Predictor]:
        """The global models of the method, to be tested and saved."""
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


def _require_sealed_last(filters: tuple[Filter, ...]) -> None:
    """Refuse what would have to look at sealed replies, and a secret draw, of which nobody may know the others."""
    sealed = next((i for i, one in enumerate(filters) if one.sealed), None)
    if sealed is None:
        return
    for other in filters:
        if other.draws_clients:
            raise PrivacyError(
                f"{other.name} draws its clients in secret, and may draw nobody; {filters[sealed].name} is over "
                "clients that know of each other: take either"
            )
    if filters[sealed + 1 :]:
        raise PrivacyError(
            f"{filters[sealed].name} seals replies, so that {filters[-1].name} behind it could not read them: give "
            f"{filters[sealed].name} last"
        )
