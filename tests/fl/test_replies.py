"""Malformed replies: none ends a run, none is accepted, and other clients' results are as if it had been lost."""

from __future__ import annotations

import itertools
import math
import re
from collections import Counter
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from distillkit import LabeledImages, Normalization
from distillkit.rng import derive
from fl import ClientData, FedAvg, FedDM, Filter, Filtered, Run, simulate
from fl._codec import decode, encode
from fl.addons import SCAFFOLD, FedDF, FedExP, FedGen, FedNova, FineTune
from fl.aggregation import Aggregator
from fl.averaging.addon import AddOn
from fl.message import Entry, Message
from fl.method import Method, NoUsableReply
from fl.methods import FedLGD, FedProto, PrivateFedDM, Real, SingleImage
from fl.participants import Client, Server
from fl.schema import MAX_WEIGHT, BadReply, EntrySpec, Schema, check_reply, l2_norm
from tests.fl.federations import Tiny, federation, images, small
from tests.fl.invariances import assert_same, network
from tests.fl.reply_mutants import Mutant, mutants
from tests.refused import refused

PHOTO = torch.rand(1, 24, 30, generator=derive(0))
SMALL: dict[str, Any] = {"lr": 0.05, "batch": 8, "steps": 1}
DM: dict[str, Any] = {"ipc": 2, "steps": 1, "server_epochs": 1, "server_batch": 8, "weights": "samples"}

METHODS: dict[str, Callable[[], Method]] = {
    "FedAvg SCAFFOLD FineTune": lambda: FedAvg(SCAFFOLD(), FineTune(), factory=network, **SMALL),
    "FedAvg FedExP": lambda: FedAvg(FedExP(), factory=Tiny, **SMALL),
    "FedAvg FedNova": lambda: FedAvg(FedNova(), factory=Tiny, weights="uniform", **SMALL),
    "FedAvg FedDF": lambda: FedAvg(FedDF(steps=1), factory=Tiny, **SMALL),
    "FedDM": lambda: FedDM(factory=Tiny, **DM),
    "PrivateFedDM": lambda: PrivateFedDM(
        factory=small, sigma=1.0, sigma_sizes=1.0, num_networks=1, least=0.0, clip=1.0, **{**DM, "lr": 1.0}
    ),
    "FedProto": lambda: FedProto(factory=Tiny),
    "FedGen": lambda: FedAvg(FedGen(steps=1, batch=4, noise=2, hidden=4), factory=Tiny, **SMALL),
    "FedLGD": lambda: FedLGD(
        factory=Tiny, ipc=2, anchors=2, condense_steps=1, refine_steps=1, match_steps=1,
        anchors_init="statistics", **SMALL
    ),
    "single image": lambda: SingleImage(
        PHOTO, factory=Tiny, epochs=1,
        shared={"keep": 6, "count": 8, "steps": 1, "rate": 0.5, "selection": {"clusters": 4}},
    ),
}  # fmt: skip


class Hostile(Filtered):
    """Method whose client 1 replies with `answer(honest reply, schema)`."""

    def __init__(self, method: Method, answer: Callable[[str, Message, Any, Method], Any]) -> None:
        super().__init__(method, Filter())
        self.how = answer
        self.server: Any = None

    def send(self, server: Server, client: int) -> Message:
        self.server = server
        return super().send(server, client)

    def _answer(self, verb: str, client: Client, honest: Message, due: Any) -> Any:
        return self.how(verb, honest, due(self.server, client.id), self) if client.id == 1 else honest

    def local(self, client: Client, message: Message) -> Message:
        return self._answer("local", client, super().local(client, message), self.expect)

    def answer(self, client: Client, message: Message) -> Message:
        return self._answer("setup", client, super().answer(client, message), self.expect_answer)

    def evaluate(self, client: Client, message: Message) -> Message:
        return self._answer("evaluate", client, super().evaluate(client, message), self.expect_evaluation)


def play(method: Method, rounds: int, **options: Any) -> Run:
    held = [ClientData(c, images(6, seed=60 + k)) for k, c in enumerate(federation()[:3])]
    return simulate(
        method, held, rounds=rounds, seed=5, progress=False, secret=1 if method.private else None, test=images(9, 9),
        evaluate="all", server_data={"proxy": images(8, 3)}, **options,
    )  # fmt: skip


def lost(*_: Any) -> None:
    raise RuntimeError("lost")


def rows_of(run: Run) -> list[dict[str, Any]]:
    """Return the history without seconds and reasons of failures."""
    rows = [{k: v for k, v in row.items() if "seconds" not in k} for row in run.rows]
    for row in rows:
        for part in (row, row.get("setup", {})):
            part |= {k: sorted(v) for k, v in part.items() if k.startswith("failed")}
    return rows


def all_mutants(name: str) -> dict[str, tuple[Message, Any, list[Mutant]]]:
    """Return for each request to client 1 in two rounds the honest reply, its schema and every mutant."""
    found: dict[str, Any] = {}

    def keep(verb: str, honest: Message, due: Any, method: Method) -> Message:
        verb = f"{verb} {method.server.round}" if verb == "local" else verb  # type: ignore[attr-defined]
        entries = {e.key: e for e in method.entries()}
        found[verb] = (honest, due, entries, list(mutants(honest, due, entries)))
        return honest

    play(Hostile(METHODS[name](), keep), 2)
    return found


def accepted(reply: Any, entries: Any, due: Any, wire: bool) -> bool:
    """Return whether a reply passes validation, directly or encoded (`wire`). Only refusals are caught."""
    try:
        check_reply(reply, entries, due)
        return True
    except BadReply:
        pass
    try:
        return wire and bool(check_reply(decode(encode(reply))[0], entries, due))
    except (TypeError, ValueError):
        return False


def test_three_thousand_mutants_of_valid_replies_are_refused() -> None:
    """Each is refused by name, before and after encoding; the honest reply passes both."""
    count: Counter[str] = Counter()
    for name in METHODS:
        for verb, (honest, due, entries, wrong) in all_mutants(name).items():
            assert accepted(honest, entries, due, wire=False)
            assert check_reply(decode(encode(honest))[0], entries, due)
            for i, (how, mutant) in enumerate(wrong):
                wire = isinstance(mutant, Message) and i % 4 == 0
                assert not accepted(mutant, entries, due, wire), f"{name}, {verb}: {how}"
                count[f"{name}: {verb}"] += 1
    assert sum(count.values()) >= 3000, count


@pytest.mark.parametrize("name", METHODS)
def test_malformed_replies_equal_lost_ones(name: str) -> None:
    """Every round, evaluation and setup of client 1 returns another mutant."""
    rounds, turn = 4, itertools.count()

    def wrong(verb: str, honest: Message, due: Any, method: Method) -> Any:
        found = list(mutants(honest, due, {e.key: e for e in method.entries()}))
        return found[(next(turn) * 37 + 11) % len(found)][1]

    hostile, absent = (play(Hostile(METHODS[name](), how), rounds) for how in (wrong, lost))
    assert_same(hostile, absent)
    mine, others = rows_of(hostile), rows_of(absent)
    assert [row["failed"] for row in mine] == [["1"]] * rounds
    assert [row["failed_evaluation"] for row in mine] == [["1"]] * rounds
    assert mine == others


# What adversarial use found, one by one, through whole rounds.


def one(change: Callable[[Message], Any]) -> Callable[..., Any]:
    def answer(verb: str, honest: Message, due: Any, method: Method) -> Any:
        return change(honest) if verb == "local" else honest

    return answer


def with_values(**values: Any) -> Callable[[Message], Message]:
    return lambda reply: Message.unchecked(
        {**dict(reply.items()), **{k.replace("__", "."): v for k, v in values.items()}}
    )


def column(reply: Message) -> Message:
    pool = reply[FedDM.images]
    return with_values(FedDM__images=pool.replace(columns={"x": torch.zeros(len(pool))}))(reply)


def gone(key: str) -> Callable[[Message], Message]:
    return lambda reply: Message.unchecked({k: v for k, v in reply.items() if k != key})


def thrice(reply: Message) -> Message:
    one = reply[FedDM.images]
    return with_values(FedDM__images=one[[0] * 3].replace(info=one.info))(reply)


FOUND: list[tuple[str, str, Callable[[Message], Any], str]] = [
    ("an extra column", "FedDM", column, r"FedDM\.images must have the columns \[\]"),
    ("info", "FedDM", lambda r: with_values(FedDM__images=r[FedDM.images].replace(info={"a": 1}))(r), "carries info"),
    ("last", "FedAvg FedExP", with_values(FedAvg__last={"a": torch.zeros(7)}), r"FedAvg\.last is not expected"),
    ("weight -1e4", "FedAvg FedExP", with_values(FedAvg__samples=-1e4), r"must lie in \[0, 1e\+06\], got -10000"),
    ("uniform weight 2", "FedAvg FedNova", with_values(FedAvg__samples=2.0), r"must lie in \[1, 1\], got 2"),
    ("negative rows", "FedProto", with_values(FedProto__count=torch.tensor([-1.0, 2, 2])), r"got -1 to 2"),
    ("10^400", "FedAvg FedExP", with_values(FedAvg__samples=10**400), r"must fit in 64 bits"),
    ("None", "FedAvg FedExP", with_values(FedExP__norm=None), "got NoneType"),
    ("dict", "FedAvg FedExP", with_values(FedExP__norm={}), "is a dict, want a float"),
    ("float8", "FedProto", with_values(FedProto__means=torch.zeros(3, 48).to(torch.float8_e5m2)), "float8_e5m2"),
    ("weight of other rows", "FedProto", with_values(FedProto__count=torch.ones(4)), r"has shape \[4\], want \[3\]"),
    ("no rows' weight", "PrivateFedDM", with_values(FedDM__samples=torch.ones(1)), "must have as many rows as"),
    ("too many of one class", "FedDM", thrice, "one class"),
    ("missing", "FedProto", gone("FedProto.means"), r"FedProto\.means is missing"),
]  # fmt: skip


@cache
def without_client_1(name: str) -> Run:
    return play(Hostile(METHODS[name](), one(lost)), 1)


@pytest.mark.parametrize(("name", "change", "why"), [f[1:] for f in FOUND], ids=[f[0] for f in FOUND])
def test_known_malformed_replies_are_refused(name: str, change: Any, why: str) -> None:
    hostile = play(Hostile(METHODS[name](), one(change)), 1)
    assert_same(hostile, without_client_1(name))
    assert list(hostile.rows[0]["failed"]) == ["1"]
    assert re.search(why, hostile.rows[0]["failed"]["1"])


@pytest.mark.parametrize("other", [torch.tensor(1.0), torch.ones(3), 2.0, "two"], ids=["scalar", "3", "number", "text"])
def test_mismatched_or_missing_rows_are_refused_by_name(other: Any) -> None:
    """In either order in the schema."""

    class Both:
        values, weights = Entry[Any]("first"), Entry[torch.Tensor]("first")

    entries = {entry.key: entry for entry in (Both.values, Both.weights)}
    along = EntrySpec(torch.zeros(1), max_rows=9, same_rows_as=Both.values)
    schema: Schema = {Both.weights.key: along, Both.values.key: EntrySpec(torch.zeros(1), max_rows=9)}
    check_reply(Message({Both.weights: torch.ones(2), Both.values: torch.ones(2)}), entries, schema)
    with pytest.raises(BadReply, match=r"Both\.weights must have as many rows as Both\.values, got 2 and (None|3)"):
        check_reply(Message({Both.weights: torch.ones(2), Both.values: other}), entries, schema)


@pytest.mark.parametrize("place", [0, 1, 3, 9])
def test_impossible_evaluation_is_not_counted(place: int) -> None:
    """One more image, correct answer, true positive or missed image than possible."""

    def answer(change: Callable[[Message], Any]) -> Callable[..., Any]:
        return lambda verb, honest, due, method: change(honest) if verb == "evaluate" else honest

    def more(honest: Message) -> Message:
        sums = honest[FedDM.tested]["global"].clone()
        sums[place] += 1
        return with_values(FedDM__tested={"global": sums})(honest)

    hostile, absent = (play(Hostile(METHODS["FedDM"](), answer(how)), 1) for how in (more, lost))
    assert "correct" in hostile.rows[0]["failed_evaluation"]["1"]
    assert rows_of(hostile) == rows_of(absent)
    assert hostile.rows[0]["accuracy_clients"]["clients"] == 2


class Fragile(FedAvg):
    """Method whose server code fails on some replies."""

    def read_reply(self, server: Server, reply: Message) -> Message:
        if float(reply[FedAvg.update]["classifier.bias"].abs().max()) > 2:
            raise ZeroDivisionError("too far")
        return super().read_reply(server, reply)


def test_reply_on_which_read_reply_fails_is_left_out_by_name() -> None:
    def far(honest: Message) -> Message:
        return with_values(FedAvg__update={n: t + 3.0 for n, t in honest[FedAvg.update].items()})(honest)

    hostile, absent = (play(Hostile(Fragile(factory=Tiny, **SMALL), one(how)), 2) for how in (far, lost))
    assert_same(hostile, absent)
    assert hostile.rows[0]["failed"] == {"1": "cannot be used: ZeroDivisionError: too far"}


def test_values_derived_from_a_reply_are_checked_with_it() -> None:
    """Finite weights so large that the client's model returns NaN on the proxy images."""

    def far(honest: Message) -> Message:
        return with_values(FedAvg__update={n: t + 3e38 for n, t in honest[FedAvg.update].items()})(honest)

    method = FedAvg(FedDF(steps=1), factory=Tiny, max_update_norm=1e50, **SMALL)
    hostile, absent = (play(Hostile(method, one(how)), 2) for how in (far, lost))
    assert_same(hostile, absent)
    assert hostile.rows[0]["failed"] == {"1": "FedDF.logits holds NaN or Inf"}


@pytest.mark.parametrize("note", ["twice", None, math.nan, math.inf, [1.0], 2**1023, 1.1e15, -1.1e15, 1e15, -(10**15)])
def test_note_that_is_no_number_in_range_rejects_the_reply(note: Any) -> None:
    class Noting(AddOn):
        def after_training(self, local: Any, update: Any, reply: Any) -> None:
            if local.client.id == 1:
                local.client.notes["kept"] = note

    row = play(FedAvg(Noting(), factory=Tiny, **SMALL), 1).rows[0]
    in_range = isinstance(note, int | float) and abs(note) == 1e15
    assert row["failed"] == ({} if in_range else {"1": "its note 'kept' is not a finite number of at most 1e+15"})
    assert row.get("noted") == ({"kept": note} if in_range else None)


@pytest.mark.parametrize(("count", "length"), [(100, 100), (101, 4), (1, 101)])
def test_notes_are_few_and_short(count: int, length: int) -> None:
    class Noting(AddOn):
        def after_training(self, local: Any, update: Any, reply: Any) -> None:
            local.client.notes.update({f"{i:0{length}d}": i for i in range(count)})

    clients = federation()[:2]
    if count == length:
        assert len(play(FedAvg(Noting(), factory=Tiny, **SMALL), 1).rows[0]["noted"]) == 100
    else:
        with pytest.raises(NoUsableReply, match="101 notes, at most 100|must have a name of at most 100 characters"):
            simulate(FedAvg(Noting(), factory=Tiny, **SMALL), clients, rounds=1, progress=False)


@pytest.mark.parametrize("weightless", [3, 2])
def test_round_of_weightless_replies_is_refused(weightless: int) -> None:
    """Replies may weigh nothing, but not all of them."""

    class Light(FedAvg):
        def local(self, client: Client, message: Message) -> Message:
            reply = super().local(client, message)
            if client.id < weightless:
                reply[FedAvg.samples] = 0.0
            return reply

    method = Light(factory=Tiny, **SMALL)
    if weightless == 2:
        assert not play(method, 1).rows[0]["failed"]
        return
    refused(lambda: play(method, 1), NoUsableReply, "all weights of the round's replies are zero")


def test_limit_of_client_claims_is_an_option() -> None:
    options: dict[str, Any] = {"factory": Tiny, "max_samples": 15, **SMALL}
    row = play(FedAvg(**options), 1).rows[0]
    why = "FedAvg.samples must lie in [0, 15], got 18; the method sets the largest weight (max_samples)"
    assert row["failed"] == {"2": why}
    assert play(FedProto(factory=Tiny, max_samples=5), 1).rows[0]["failed"].keys() == {"1", "2"}
    assert play(FedDM(factory=Tiny, max_samples=12, **DM), 1).rows[0]["failed"].keys() == {"1", "2"}
    refused(lambda: FedAvg(factory=Tiny, max_samples=0), ValueError, "max_samples must be greater than 0")


def test_replies_need_a_schema() -> None:
    class Asks(AddOn):
        def answer(self, local: Any, reply: Any) -> None:
            """Send a reply to the query before round 1."""

    class Tests(FedDM):
        evaluate = FedDM.evaluate
        expect_evaluation = Method.expect_evaluation

    class Answers(FedDM):
        def answer(self, client: Client, message: Message) -> Message:
            return Message()

    refused(lambda: FedAvg(Asks(), factory=Tiny), ValueError, r"Asks\.answer returns a reply.*write expect_answer")
    for kind, verb, schema in ((Tests, "evaluate", "expect_evaluation"), (Answers, "answer", "expect_answer")):
        said = f"{kind.__name__}.{verb} returns a reply, but the schema of this reply is missing: write {schema}"
        refused(lambda kind=kind: play(kind(factory=Tiny, **DM), 1), ValueError, f"^{said}$")  # type: ignore[misc]


def test_inconsistent_replies_do_not_count_in_part() -> None:
    """With different shapes for each client, the first reply with an entry decides, and no other is partly added."""

    class E:
        a = Entry[torch.Tensor]("sum")
        b = Entry[torch.Tensor]("union")
        c = Entry[Any]("max")
        d = Entry[LabeledImages]("union")

    reducer, pictures = Aggregator({e.key: e for e in (E.a, E.b, E.c, E.d)}), of_class(1)
    reducer.fold(0, Message({E.a: torch.ones(2)}))
    reducer.fold(1, Message({E.a: torch.ones(2), E.b: torch.ones(1, 3), E.c: {"n": torch.tensor(1)}, E.d: pictures}))
    odd: list[dict[Any, Any]] = [
        {E.a: torch.ones(2), E.b: torch.ones(1, 4)},
        {E.a: torch.ones(2), E.b: torch.ones(1, 3).double()},
        {E.a: torch.ones(2), E.c: {"n": torch.ones(2, dtype=torch.int64)}},
        {E.a: torch.ones(2), E.c: torch.tensor(1)},
        {E.a: torch.ones(2), E.c: 3},
        {E.a: {"x": torch.ones(2)}},
        {E.a: torch.ones(3)},
        {E.c: {"m": torch.ones(2)}, E.a: torch.ones(3)},
        {E.a: torch.ones(2), E.d: pictures.replace(normalization=Normalization([0.5], [0.5]))},
        {E.a: torch.ones(2), E.d: pictures.replace(num_classes=4)},
        {E.a: torch.ones(2), E.d: WITH_COLUMN},
        {E.a: torch.ones(2), E.d: LabeledImages(pictures.images, torch.eye(3)[pictures.labels])},
    ]
    for values in odd:
        with pytest.raises(BadReply, match="different type or shape"):
            reducer.fold(2, Message(values))
    assert reducer.clients == [0, 1]
    assert reducer.result()[E.a].tolist() == [2.0, 2.0]
    assert reducer.result()[E.b].shape == (1, 3)
    reducer.fold(2, Message({E.c: {"m": torch.ones(4)}}))


def test_reply_of_another_form_than_earlier_ones_is_left_out_with_a_short_reason() -> None:
    name = "n" * 400

    class Odd(AddOn):
        extra = Entry[dict[str, Tensor]]("sum")

        def after_training(self, local: Any, update: Any, reply: Any) -> None:
            reply[self.extra] = {name: torch.ones(1 + local.client.id % 2)}

        def expect(self, server: Any, client: int, schema: Any) -> None:
            schema[self.extra.key] = EntrySpec({name: torch.ones(1 + client % 2)})

    run = play(FedAvg(Odd(), factory=Tiny, **SMALL), 1)
    assert run.rows[0]["failed"] == {"1": f"Odd.extra[{name}"[:300]}


def test_sets_reveal_only_pixels_and_labels() -> None:
    """Conditions such as an absent class would show in the notes of a condensation or in extra columns."""
    seen: list[Message] = []

    def watch(verb: str, honest: Message, due: Any, method: Method) -> Message:
        seen.extend([honest] if verb == "local" else [])
        return honest

    for make in (METHODS["FedDM"], lambda: Real(factory=Tiny, **DM)):
        held = images(12, 0)
        own = held[held.labels != 1].replace(info={"clinic": "north"})
        own = own.replace(columns={"patient": torch.arange(len(own))})
        simulate(Hostile(make(), watch), [images(9, 1), own], rounds=1, progress=False)
    assert len(seen) == 2
    for reply in seen:
        assert (reply[FedDM.images].info, reply[FedDM.images].columns) == ({}, {})
        assert b"absent" not in encode(reply)
        assert b"north" not in encode(reply)


class Limited:
    share = Entry[float]("sum")
    value = Entry[Tensor]("mean", by=share)
    plain = Entry[Tensor]("sum")
    group = Entry[dict[str, Tensor]]("sum")
    rows = Entry[Tensor]("union")
    pictures = Entry[LabeledImages]("union")
    flags = Entry[Tensor]("first")
    by_row = Entry[Tensor]("mean", by=flags)
    truths = Entry[Tensor]("first")


LIMITED: dict[str, Entry[Any]] = {entry.key: entry for entry in vars(Limited).values() if isinstance(entry, Entry)}
ABOVE = 1 + 1e-6


def of_class(count: int) -> LabeledImages:
    return LabeledImages(torch.zeros(count + 1, 1, 2, 2), torch.tensor([0] * count + [1]), num_classes=3)


WITH_COLUMN = of_class(1).replace(columns={"x": torch.zeros(2)})


def pair(a: float, b: float) -> dict[str, Tensor]:
    return {"a": torch.tensor([a], dtype=torch.float64), "b": torch.tensor([b], dtype=torch.float64)}


def number(value: float) -> Tensor:
    return torch.tensor([value], dtype=torch.float64)


@pytest.mark.parametrize(
    ("entry", "spec", "accepted", "refused"),
    [
        (Limited.share, EntrySpec(1.0), [0.0, MAX_WEIGHT], [-1e-9, MAX_WEIGHT * ABOVE, 1e8]),
        (Limited.share, EntrySpec(1.0, minimum=1.0, maximum=2.0), [1.0, 2.0], [1 / ABOVE, 2 * ABOVE]),
        (Limited.plain, EntrySpec(number(0)), [number(1e4)], [number(-1e4 * ABOVE)]),
        (Limited.plain, EntrySpec(number(-3)), [number(4e4), number(-4e4)], [number(4e4 * ABOVE)]),
        (Limited.group, EntrySpec(pair(0, 9)), [pair(1e5, -1e5)], [pair(1e5 * ABOVE, 0)]),
        (Limited.plain, EntrySpec(number(0), minimum=-2.0, maximum=3.0), [number(-2), number(3)],
         [number(-2 * ABOVE), number(3 * ABOVE)]),
        (Limited.group, EntrySpec(pair(0, 0), max_norm=5.0), [pair(3, -4)], [pair(3, 4 * ABOVE), pair(4, -4)]),
        (Limited.group, EntrySpec(pair(0, 0), nonnegative=["b"]), [pair(-1, 0)], [pair(0, -1e-9)]),
        (Limited.rows, EntrySpec(torch.zeros(0, 2), max_rows=3), [torch.zeros(0, 2), torch.zeros(3, 2)],
         [torch.zeros(4, 2)]),
        (Limited.pictures, EntrySpec(of_class(1)[:0], max_per_class=2, max_rows=9), [of_class(1), of_class(2)],
         [of_class(3)]),
        (Limited.pictures, EntrySpec(of_class(1)[:0], max_rows=3), [of_class(2)], [of_class(3), WITH_COLUMN]),
        (Limited.pictures, EntrySpec(of_class(1), max_rows=0), [of_class(1)[:0]], [of_class(1)[:1]]),
        (Limited.pictures, EntrySpec(WITH_COLUMN[:0], max_rows=3), [WITH_COLUMN],
         [of_class(1), WITH_COLUMN.replace(columns={"x": torch.tensor([0, math.nan])})]),
        (Limited.truths, EntrySpec(torch.tensor([True]), maximum=0.0), [torch.tensor([True])], [torch.tensor([1])]),
        (Limited.flags, EntrySpec(torch.tensor([True])), [], [torch.tensor([True])]),
        (Limited.flags, EntrySpec(torch.tensor([[1.0]])), [], [torch.tensor([[1.0]])]),
    ],
)  # fmt: skip
def test_limits_hold_on_both_sides(entry: Entry[Any], spec: EntrySpec, accepted: list[Any], refused: list[Any]) -> None:
    weighted = {other: number(0) for other in LIMITED.values() if other.by is entry}
    for value in (*accepted, *refused):
        reply = Message({entry: value, **weighted})
        schema: Schema = {entry.key: spec, **{other.key: EntrySpec(number(0)) for other in weighted}}
        if any(value is one for one in accepted):
            check_reply(reply, LIMITED, schema)
        else:
            with pytest.raises(BadReply):
                check_reply(reply, LIMITED, schema)


def test_norm_takes_all_numbers_in_enough_precision() -> None:
    assert l2_norm(-0.1) == (0.1, 1)
    assert l2_norm({"a": torch.tensor([3.0, 0.0]), "b": torch.tensor([4])}) == (5.0, 3)
    assert l2_norm(torch.full((4,), 1e30))[0] == pytest.approx(2e30)  # 1e30 squared is beyond float32
    many = torch.full((4_000_000,), 0.1)
    assert l2_norm(many)[0] == pytest.approx(200.0, rel=1e-7)
    assert l2_norm(many[:4097].reshape(17, 241).T) == (pytest.approx(4097**0.5 / 10, rel=1e-7), 4097)
