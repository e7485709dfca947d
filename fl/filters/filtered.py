"""A method with filters around it: an ordered chain, on the client from the method outwards, on the server back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

from distillkit.privacy import PrivacyError
from fl._components import KeyedObject, require_distinct, require_own_entries, require_plain_options
from fl.aggregation import AggregatedReplies, Schema
from fl.filters.filter import Filter
from fl.message import Message
from fl.method import Method, Predictor, require_method
from fl.participants import Client, Server

__all__ = ["Filtered"]


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
                raise TypeError(
                    f"Filtered takes a method and then one or more filters, got the class {one.__name__}: "
                    f"{one.__name__}(...)"
                )
        if not filters or not all(isinstance(one, Filter) for one in filters):
            given = ", ".join(type(x).__name__ for x in (method, *filters))
            raise TypeError(f"Filtered takes a method and then one or more filters, got {given}")
        for one in filters:
            require_plain_options(one, Filter)
        require_distinct(filters, "a filter may stand in a chain once")
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

    def _owner(self, verb: str) -> Method | Filter:
        """Who plays a further exchange."""
        return next((one for one in self.filters if verb in (*one.before, *one.after)), self.method)

    def send_exchange(self, server: Server, verb: str, client: int) -> Message:
        """What the client is told in a further exchange, by whose it is."""
        return self._owner(verb).send_exchange(server, verb, client)

    def expect_exchange(self, server: Server, verb: str, client: int) -> Schema:
        """What the answer in a further exchange must look like, by whose it is."""
        return self._owner(verb).expect_exchange(server, verb, client)

    def receive_exchange(self, server: Server, verb: str, replies: AggregatedReplies) -> Mapping[int, str]:
        """Give the answers of a further exchange to whose it is; those of the training to all."""
        links = self._links if verb == "local" else (self._owner(verb),)
        found: dict[int, str] = {}
        for one in links:
            found |= one.receive_exchange(server, verb, replies)
        return found

    def run_on_client(self, verb: str, client: Client, message: Message) -> Message:
        """What the method answers, or a filter in an exchange of its own."""
        owner = self._owner(verb)
        if isinstance(owner, Filter):
            return cast(Message, getattr(owner, verb)(client, message))
        return super().run_on_client(verb, client, message)

    @property
    def draws_clients(self) -> bool:
        """Whether the method draws the clients, or a filter."""
        return any(x.draws_clients for x in self._links)

    def draw(self, server: Server) -> list[int]:
        """The clients of this round, drawn by the method or by the filter that draws."""
        return next(x for x in self._links if x.draws_clients).draw(server)

    @property
    def parts(self) -> tuple[KeyedObject, ...]:
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

    def receive(self, server: Server, replies: AggregatedReplies) -> None:
        """Give the method the replies, through the filters' server halves (`back`) in reverse order."""
        schema, before = self.method.expect(server, 0), list[Schema]()
        for one in self.filters:
            before.append(dict(schema))
            one.expect(server, 0, schema)
        for one, expected in zip(reversed(self.filters), reversed(before)):
            replies = one.back(server, replies, expected)
        self.method.receive(server, replies)

    @property
    def has_query(self) -> bool:
        """Whether the method asks; answers pass no filter, so a filter may refuse such a method."""
        return self.method.has_query

    def answer(self, client: Client, message: Message) -> Message:
        """The method's answer to its question before round 1; no filter changes it."""
        return self.method.answer(client, message)

    def expect_answer(self, server: Server, client: int) -> Schema:
        """What the answer must look like, as the method says."""
        return self.method.expect_answer(server, client)

    def receive_answers(self, server: Server, replies: AggregatedReplies) -> None:
        """Give the clients' answers to the method; no filter sees them."""
        self.method.receive_answers(server, replies)

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
