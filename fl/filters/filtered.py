"""Method to which a chain of filters is applied, in order on the client, and in reverse order on the server."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

from distillkit.privacy import PrivacyError
from fl._components import KeyedObject, require_distinct, require_own_entries, require_plain_options
from fl.aggregation import AggregatedReplies, Schema
from fl.filters.filter import Filter
from fl.message import Message
from fl.method import Method, Predictor, require_method
from fl.participants import Client, Server


class Filtered(Method):
    """Method whose replies pass through filters.

    On the client, a reply of the method passes through `out` of each filter in order. On the server, the aggregated
    replies pass through `back` of each filter in reverse order. In all other respects, the object works like the
    method. `Filtered(Filtered(m, a), b)` is the same as `Filtered(m, a, b)`.

    Args:
        method: any method.
        filters: one or more filters, at most one of each class.

    Raises:
        TypeError: `method` is not a method, or `filters` is empty or contains another object.
        ValueError: two filters have the same class or key, a filter refuses the method, or two or more of these objects
            (the method and the filters) override `draw`, the drawing of clients.
        PrivacyError: a filter beside a private filter (`Filter.private`) would see replies without noise, or a filter
            comes after one that lets the server see only sums of replies (`Filter.sealed`).
    """

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
        require_distinct(filters, "a method can have each filter only once")
        self.method: Method = method
        self.filters: tuple[Filter, ...] = filters
        self._links: tuple[Method | Filter, ...] = (method, *filters)
        drawing = [type(x).__name__ for x in self._links if x.draws_clients]
        if len(drawing) > 1:
            raise ValueError(f"{' and '.join(drawing)} cannot be combined: both draw the clients; leave one out")
        for one in filters:
            one.check(method)
        _require_private_alone(filters)
        _require_sealed_last(filters)
        require_own_entries(self.parts)

    def arguments(self) -> tuple[Sequence[Any], Mapping[str, Any]]:
        """Return the method and the filters, for `repr` and the record of a run."""
        return self._links, {}

    @property
    def inner(self) -> Method:
        """The method without its filters."""
        return self.method.inner

    @property
    def private(self) -> bool:
        """True if the method or a filter adds noise to the releases and charges a ledger."""
        return any(x.private for x in self._links)

    @property
    def sealed(self) -> bool:
        """True if the server learns only sums of the replies, because of the method or of a filter."""
        return any(x.sealed for x in self._links)

    @property
    def exchanges(self) -> tuple[str, ...]:
        """Names of all exchanges in a round: first those in `Filter.before`, then the method's, then `Filter.after`."""
        before = [verb for one in self.filters for verb in one.before]
        return (*before, *self.method.exchanges, *(verb for one in self.filters for verb in one.after))

    def _owner(self, verb: str) -> Method | Filter:
        """Return the filter that declares the exchange called `verb`, or the method."""
        return next((one for one in self.filters if verb in (*one.before, *one.after)), self.method)

    def send_exchange(self, server: Server, verb: str, client: int) -> Message:
        """Return the owner's message to a client in the exchange called `verb`."""
        return self._owner(verb).send_exchange(server, verb, client)

    def expect_exchange(self, server: Server, verb: str, client: int) -> Schema:
        """Return the owner's schema of a reply in the exchange called `verb`."""
        return self._owner(verb).expect_exchange(server, verb, client)

    def receive_exchange(self, server: Server, verb: str, replies: AggregatedReplies) -> Mapping[int, str]:
        """Pass the replies of an exchange to the filter or method that declares the exchange.

        The replies of the exchange "local" are passed to the method and to all filters.

        Returns:
            The clients whose replies cannot be used: a mapping, client index -> reason.
        """
        links = self._links if verb == "local" else (self._owner(verb),)
        found: dict[int, str] = {}
        for one in links:
            found |= one.receive_exchange(server, verb, replies)
        return found

    def run_on_client(self, verb: str, client: Client, message: Message) -> Message:
        """Run the function called `verb` on a client, and return its reply.

        If a filter declares an exchange of this name, the filter's function runs. Otherwise, the function of this
        object runs.
        """
        owner = self._owner(verb)
        if isinstance(owner, Filter):
            if self.method.private:  # what the method keeps on the client may depend on records
                client = replace(client, memory=Message())
            return cast(Message, getattr(owner, verb)(self._seen(client), message))
        return super().run_on_client(verb, client, message)

    @property
    def draws_clients(self) -> bool:
        """True if the method or a filter overrides `draw`, and so draws the clients of each round itself."""
        return any(x.draws_clients for x in self._links)

    def draw(self, server: Server) -> list[int]:
        """Return the clients that the method or filter with a `draw` of its own draws."""
        return next(x for x in self._links if x.draws_clients).draw(server)

    @property
    def parts(self) -> tuple[KeyedObject, ...]:
        """The method, its add-ons and the filters. Each may declare message entries (`Entry`)."""
        return (*self.method.parts, *self.filters)

    def check_run(self, server: Server, rounds: int) -> None:
        """Call the method's own `check_run`. Filters have no such check."""
        self.method.check_run(server, rounds)

    def start(self, server: Server) -> None:
        """Store the initial values of the method in the server's state, and then those of each filter in order."""
        self.method.start(server)
        entries, schema = {e.key: e for e in self.entries()}, self.method.expect(server, 0)
        for one in self.filters:
            one.start(server, dict(schema), entries)
            one.expect(server, 0, schema)

    def send(self, server: Server, client: int) -> Message:
        """Return the method's message to the client, with the entries that the filters have added to it."""
        message = self.method.send(server, client)
        for one in self.filters:
            one.send(server, client, message)
        return message

    def expect(self, server: Server, client: int) -> Schema:
        """Return the schema of a client's reply: the method's schema with the changes that the filters make."""
        schema = self.method.expect(server, client)
        for one in self.filters:
            one.expect(server, client, schema)
        return schema

    def local(self, client: Client, message: Message) -> Message:
        """Return the method's reply, after each filter in turn has changed it with its method `out`."""
        reply = self.method.local(client, message)
        for one in self.filters:
            reply = one.out(self._seen(client), message, reply)
        return reply

    def _seen(self, client: Client) -> Client:
        """Return the client for the filters: without images if the method is private."""
        return client.without_records() if self.method.private else client

    def receive(self, server: Server, replies: AggregatedReplies) -> None:
        """Pass the aggregated replies to the method, after the filters have changed them.

        The filters' functions `back` run first, in reverse order, and their functions `after_receive` last.
        """
        schema, before = self.method.expect(server, 0), list[Schema]()
        old = replace(server, state=server.state.copy())
        for one in self.filters:
            before.append(dict(schema))
            one.expect(server, 0, schema)
        for one, expected in zip(reversed(self.filters), reversed(before)):
            replies = one.back(server, replies, expected)
        self.method.receive(server, replies)
        for one in self.filters:
            one.after_receive(server, old, self.method)

    @property
    def has_query(self) -> bool:
        """True if the method queries the clients before round 1. Filters do not change the clients' answers."""
        return self.method.has_query

    def answer(self, client: Client, message: Message) -> Message:
        """Return the method's answer when the server queries the client before round 1. No filter changes it."""
        return self.method.answer(client, message)

    def expect_answer(self, server: Server, client: int) -> Schema:
        """Return the method's schema of a client's answer to the query before round 1."""
        return self.method.expect_answer(server, client)

    def receive_answers(self, server: Server, replies: AggregatedReplies) -> None:
        """Pass the clients' aggregated answers to the method, unchanged."""
        self.method.receive_answers(server, replies)

    def read_reply(self, server: Server, reply: Message) -> Message:
        """Return the entries that the method's `read_reply` computes from a client's reply. Filters add none."""
        return self.method.read_reply(server, reply)

    def evaluate(self, client: Client, message: Message) -> Message:
        """Test a client's models with the method's `evaluate`. Filters do not change the results."""
        return self.method.evaluate(client, message)

    def expect_evaluation(self, server: Server, client: int) -> Schema:
        """Return the method's schema of the results of `evaluate`."""
        return self.method.expect_evaluation(server, client)

    def predictors(self, server: Server) -> Mapping[str, Predictor]:
        """Return the method's global models, to be tested and saved."""
        return self.method.predictors(server)


_SEEING = ("out", "back", "send_exchange", "expect_exchange", "receive_exchange")


def _require_private_alone(filters: tuple[Filter, ...]) -> None:
    """Refuse a filter beside a private filter (`Filter.private`) if it would see replies that have no noise yet.

    The private filter alone handles replies: values before its clip are raw, values after its clip must not grow, and
    the sum that the server gets has no noise before `back` of the private filter.
    """
    private = next((one for one in filters if one.private), None)
    for other in filters:
        hooks = [hook for hook in _SEEING if getattr(type(other), hook) is not getattr(Filter, hook)]
        hooks += [name for name in ("before", "after") if getattr(other, name)]
        if private is not None and other is not private and hooks:
            raise PrivacyError(
                f"{other.name} cannot be combined with {private.name}: {', '.join(hooks)} would see or change replies "
                f"without noise. Make the change a part of the method, before {private.name} clips its replies; a "
                "filter with `send` and `after_receive` only is accepted"
            )


def _require_sealed_last(filters: tuple[Filter, ...]) -> None:
    """Refuse filters that cannot be combined with a sealed filter, which hides single replies (`Filter.sealed`).

    These are all filters after the sealed filter, and all filters that draw the clients of a round.
    """
    sealed = next((i for i, one in enumerate(filters) if one.sealed), None)
    if sealed is None:
        return
    for other in filters:
        if other.draws_clients:
            raise PrivacyError(
                f"{other.name} draws its clients in secret, and may draw none; the clients of {filters[sealed].name} "
                "know each other: use only one of the two"
            )
    if filters[sealed + 1 :]:
        raise PrivacyError(
            f"{filters[sealed].name} hides single replies, so {filters[-1].name} after it could not read them: pass "
            f"{filters[sealed].name} last"
        )
