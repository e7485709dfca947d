"""A ledger and its copies on disk and at a client, compared with the definitions over the list of all that was done."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from copy import copy
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from distillkit.privacy import (
    ALL_CLIENTS,
    PUBLIC_INPUTS,
    REPLACE_RECORD,
    BudgetExhausted,
    Event,
    Guarantee,
    Ledger,
    PrivacyError,
    compose,
)
from distillkit.privacy._child_ledger import ChildLedger, child_state, ledger_lines, mirror_lines
from tests.refused import refused

CLIENTS = ["0", "2", "a", ALL_CLIENTS]
SCALE = 1 + 1e-9


@dataclass
class Book:
    """What was done to a ledger, in order, and what follows from it; slow and obvious."""

    options: dict[str, Any]
    events: list[Event] = field(default_factory=list)
    mirrored: list[Event] = field(default_factory=list)
    reasons: dict[str, str] = field(default_factory=dict)
    owners: list[str] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)
    assumed: dict[str, tuple[str, ...]] = field(default_factory=dict)
    numbered: int = 0
    names: set[str] = field(default_factory=set)

    def add(self, event: Event, mirrored: bool = False) -> None:
        self.events.append(event)
        self.mirrored += [event] if mirrored else []
        self.owners.append(str(event.client))
        if event.sigma == 0:
            self.reasons.setdefault(str(event.client), f"{event.mechanism} was released without noise")
        elif event.seeded:
            self.reasons.setdefault(str(event.client), f"the noise of {event.mechanism} was seeded, so it is known")

    @property
    def clients(self) -> list[str]:
        return [c for c in dict.fromkeys(self.owners) if c != ALL_CLIENTS] or [ALL_CLIENTS]

    def touching(self, client: str | None) -> list[str]:
        alone = self.options["disjoint"] and client is not None
        return [o for o in ((client, ALL_CLIENTS) if alone else dict.fromkeys(self.owners)) if o in self.owners]

    def spends(self, client: str | None, more: list[Event]) -> list[tuple[float, float, int]]:
        alone = self.options["disjoint"] and client is not None
        own = [e for e in (*self.events, *more) if not alone or e.client in (client, ALL_CLIENTS)]
        return [(e.sigma, e.rate, e.count) for e in own]

    def cost(self, client: str, more: list[Event]) -> float:
        order = self.options["renyi_order"]
        how = {} if order is None else {"accountant": "rdp", "order": order}
        return compose(self.spends(client, more), 1e-5, **how).epsilon

    def allows(self, *more: Event) -> bool:
        return self.options["budget"] is None or self.after(*more) <= self.options["budget"] * SCALE

    def after(self, *more: Event) -> float:
        charged = [str(e.client) for e in more]
        asked = {*self.clients, *charged} if ALL_CLIENTS in charged or not self.options["disjoint"] else {*charged}
        return max(self.cost(c, list(more)) for c in asked)

    @property
    def named(self) -> set[str]:
        return {*self.owners, *self.names, *map(str, range(self.numbered))}

    def knows(self, client: str) -> bool:
        return client in self.named or self.named == {ALL_CLIENTS}

    def guarantee(self, client: str | None, delta: float) -> tuple[Guarantee, list[str]]:
        """Return the guarantee, without its reason, and the reasons in order; the first one is stated."""
        asked = self.clients if client in (None, ALL_CLIENTS) else [client]
        bounds = [compose(self.spends(c, []), delta) for c in asked]
        worst = max(bounds, key=lambda bound: bound.epsilon)
        own = [e.relation for e in self.events if e not in self.mirrored]
        relation = (own or [e.relation for e in self.events] or [""])[0]
        touching = [owner for c in asked for owner in self.touching(c)]
        reasons = [self.reasons[o] for o in touching if o in self.reasons]
        if not reasons:
            for owner in touching:
                found = sorted({relation, *(e.relation for e in self.events if e.client == owner)})
                if len(found) > 1:
                    words = f"releases are charged under {' and under '.join(found)} (client {owner}), which one "
                    reasons.append(words + "epsilon cannot cover")
        facts = {by: tuple(f for f in facts if f != "disjoint" or self.options["disjoint"])
                 for by, facts in self.assumed.items()}  # fmt: skip
        several = len({*self.owners, *self.names, *map(str, range(self.numbered))} - {ALL_CLIENTS}) > 1
        ledgers = ["disjoint"] if self.options["disjoint"] and several else []
        kinds = {(e.sigma, e.rate) for e in self.events}
        planned = len(kinds) > 1 and any(rate < 1 for _, rate in kinds) and self.options["renyi_order"] is None
        ledgers += ["schedule"] if planned else []
        ledgers += ["records", "accuracies"] if self.events and not facts else []
        budget = self.options["budget"]
        kept = budget is not None and delta >= 1e-5 and all(self.cost(c, []) <= budget * SCALE for c in asked)
        return Guarantee(
            epsilon=None if reasons else worst.epsilon, delta=delta, relation=relation, nominal=worst.epsilon,
            accountant=worst.accountant, remarks=tuple(self.remarks),
            assumptions=facts | ({"Ledger": tuple(ledgers)} if ledgers else {}), budget=budget if kept else None,
        ), reasons or [""]  # fmt: skip


def draw_event(draw: random.Random) -> Event:
    """Return an event, in most cases one that keeps a guarantee."""
    sigma, rate = draw.choices([2.0, 3.0, 9.0, 0.0], [4, 3, 4, 0.5])[0], draw.choice([1.0, 0.5])
    seeded, client = draw.random() < (0.07 if sigma else 0.5), draw.choice([*CLIENTS[:3], *CLIENTS])
    return Event(
        draw.choice(["sum", "steps"]), sigma, rate, draw.choice([1, 2, 3, 7]), client, draw.randint(0, 2), seeded=seeded
    )


DRAW: dict[str, Callable[[random.Random], Any]] = {
    "spend": lambda draw: [draw_event(draw) for _ in range(draw.randint(1, 2))],
    "void": lambda draw: (draw.choice(["shown", "sent"]), draw.choice(CLIENTS)),
    "remark": lambda draw: draw.choice(["tuned", "again"]),
    "assume": lambda draw: (draw.choice("fg"), draw.sample(["disjoint", "size", "clip"], draw.randint(0, 2))),
    "register": lambda draw: draw.choice([1, 2, 3, ["a"], ["b", "2"], ["0", "b", "a"]]),
    "mirror": lambda draw: (draw.choice(["lost", *(draw_event(draw) for _ in range(6))]), draw.choice(["near", "far"]),
                            draw.random() < 0.4),
}  # fmt: skip
"""What may be done to a ledger -> how a test draws its arguments."""


def act(ledger: Ledger, book: Book, lines: dict[str, list[Any]], what: str, how: Any) -> None:
    """Do the same to the ledger and in the book."""
    if what == "spend":
        first = how[0]
        fit = [n for n in range(1, first.count + 1) if book.allows(replace(first, count=n))]
        if len(book.events) % 2:  # otherwise `check` is the first to see what the other ledger charged
            assert ledger.remaining(first) == len(fit)
        for call in (ledger.check, ledger.spend):
            if book.allows(*how):
                call(*how)
            else:
                names = dict.fromkeys("everyone" if e.client == ALL_CLIENTS else f"client '{e.client}'" for e in how)
                words = rf"{' and '.join(e.mechanism for e in how)} for {' and '.join(names)} would bring epsilon to "
                words += rf"{book.after(*how):.4g}, over the budget of {book.options['budget']:g} "
                words += rf"\(delta 1e-05\)\. {len(fit)} of {first.count} releases of {first.mechanism} fit"
                with pytest.raises(BudgetExhausted, match=words) as caught:
                    call(*how)
                for error in (caught.value, copy(caught.value)):  # as it returns from another process
                    assert (vars(error), str(error)) == (
                        {"remaining": len(fit), "_ledger": id(ledger)}, str(caught.value)
                    )  # fmt: skip
        for event in how if book.allows(*how) else ():
            book.add(event)
    elif what == "void":
        ledger.void(how[0], client=how[1])
        book.reasons.setdefault(how[1], how[0])
        book.owners.append(how[1])
    elif what == "remark":
        ledger.add_remark(how)
        book.remarks += [how] if how not in book.remarks else []
    elif what == "assume":
        ledger.assume(*how)
        book.assumed[how[0]] = tuple(how[1])
    elif what == "register":
        ledger.register(how)
        if isinstance(how, int):
            book.numbered = max(book.numbered, how)
        else:
            book.names |= {*how} - book.named
    else:
        event, source, replaces = how
        if event == "lost":
            line, client = {"void": event}, "a"
            book.reasons.setdefault(client, event)
            book.owners.append(client)
        else:
            event = replace(event, relation=REPLACE_RECORD if replaces and event.rate == 1 else event.relation)
            line, client = {"event": asdict(event)}, event.client
            book.add(event, mirrored=True)
        lines[source].append((2 * len(lines[source]) + 3, line))
        mirror_lines(ledger, source, client, lines[source])  # those that were copied before are skipped
        assert ledger.mirrored(source) == lines[source][-1][0]


@pytest.mark.parametrize("seed", range(45))
def test_ledger_follows_its_definitions_in_memory_on_disk_and_at_a_client(seed: int, tmp_path: Path) -> None:
    draw, path = random.Random(seed), tmp_path / "l"
    options: dict[str, Any] = {"disjoint": seed % 3 > 0, "budget": draw.choice([None, None, 2.5, 3.5, 6.0])}
    options["renyi_order"] = draw.choice([None, None, 8.0, 40.0])
    acts = [
        (what, DRAW[what](draw))
        for what in draw.choices([*DRAW], [5, 0.4, 1.5, 1.5, 0.7, 3], k=4 + seed % 5 if seed else 0)
    ]
    ledger, book = Ledger(path, **options), Book(options)
    other = Ledger(path, **options)
    lines: dict[str, list[Any]] = {"near": [], "far": []}
    for number, (what, how) in enumerate(acts):
        act((ledger, other)[number % 2], book, lines, what, how)
    for one in (other, Ledger(path, **options)):
        assert one.events == tuple(book.events)
        for client in (None, *CLIENTS, "1", "b", "01", "\u00b2"):
            merged: dict[Any, int] = {}
            for sigma, rate, count in book.spends(client, []):
                merged[sigma, rate] = merged.get((sigma, rate), 0) + count
            assert {(s, q): n for s, q, n in one.spends(client)} == merged
            if client not in (None, ALL_CLIENTS) and not book.knows(client):
                refused(lambda one=one, c=client: one.guarantee(c), PrivacyError, f"client '{client}' was neither")
                continue
            for delta in (1e-5, 1e-3 if seed % 2 else 1e-7):
                found = one.guarantee(client, delta=delta)
                wanted, reasons = book.guarantee(client, delta)
                assert found.reason == reasons[0]
                assert replace(found, reason="") == wanted
                assert one.epsilon(client, delta=delta) == wanted.epsilon
    for client in CLIENTS[:3] if ledger.relation else ():
        child = ChildLedger(json.loads(json.dumps(child_state(ledger, client))))
        wanted, reasons = book.guarantee(client, 1e-5)
        found = child.guarantee(client)
        assert found.reason in reasons
        known = {by: facts for by, facts in found.assumptions.items() if by != "Ledger"}
        assert known == {by: facts for by, facts in wanted.assumptions.items() if by != "Ledger"}
        assert replace(found, reason="", assumptions={}) == replace(wanted, assumptions={})
        kinds: dict[Event, int] = {}
        for event in (e for e in book.events if not options["disjoint"] or e.client in (client, ALL_CLIENTS)):
            kind = replace(event, round=0, count=1)
            kinds[kind] = kinds.get(kind, 0) + event.count
        assert {replace(event, count=1): event.count for event in child.events} == kinds
        for event in (Event("x", 2.0, client=client, count=4), Event("x", 9.0, 0.5, client=client, count=2)):
            assert child.remaining(event) == ledger.remaining(event)
        assert child.charged == []


def test_lines_for_a_run_are_cut_and_name_its_client(tmp_path: Path) -> None:
    """What another machine says has bounds, and unknown fields are left out."""
    event, long = {"event": asdict(Event("x" * 1000, 2.0, 0.5, 3, "z", 10**9 - 1, seeded=True))}, "x" * 2000
    facts = [f"{k}{long}" for k in range(len(PUBLIC_INPUTS) + 3)]
    given = [
        {"event": event["event"] | {"sampling": ""}, "more": 1}, {"void": long, "remark": "x"},
        {"remark": long, "client": "z"}, {"assumed": facts, "by": long, "client": "z"},
    ]  # fmt: skip
    ledger = Ledger(tmp_path / "l")
    mirror_lines(ledger, "n", 7, list(enumerate(given, start=4)))
    mirror_lines(ledger, "m", 7, [(10, {"void": "later"}), (9, {"remark": "other"})])
    for change, words in (
        ({"seeded": 1}, "^not a line of a ledger"), ({"round": 1.5}, "^not a line of a ledger"),
        ({"mechanism": 3}, "^not a line of a ledger"),
        ({"round": -1}, "round or mechanism of an event is out of range"),
        ({"round": 10**9}, "is out of range"), ({"mechanism": long[:1001]}, "is out of range"),
    ):  # fmt: skip
        odd = {"event": {**event["event"], **change}}
        words = rf"{words}: {re.escape(str(odd)[:80])}$"
        refused(lambda one=odd: mirror_lines(ledger, "o", 7, [(1, one)]), ValueError, words)
    wanted = [
        {"event": {**event["event"], "client": "7"}}, {"void": long[:1000], "client": "7"}, {"remark": long[:1000]},
        {"assumed": [fact[:1000] for fact in facts[: len(PUBLIC_INPUTS)]], "by": long[:1000]},
    ]  # fmt: skip
    more = [{"void": "later", "client": "7"}, {"remark": "other"}]
    places = [["n", 4], ["n", 5], ["n", 6], ["n", 7], ["m", 10], ["m", 9]]
    wanted = [{**line, "from": place} for line, place in zip([*wanted, *more], places)]
    ledger.register(["b"])
    assert ledger_lines(ledger) == list(enumerate(wanted, start=2))
    assert ledger_lines(ledger, 4) == list(enumerate(wanted[3:], start=5))
    assert [ledger.mirrored(source) for source in "nmo"] == [7, 10, 0]
    reasons = [one.guarantee(7).reason for one in (ledger, Ledger(tmp_path / "l"))]
    assert reasons == [f"the noise of {long[:1000]} was seeded, so it is known"] * 2  # the first one
    first = json.loads((tmp_path / "l").read_text(encoding="utf-8").splitlines()[0])
    assert first["relation"] is None  # that of another ledger does not bind this one


def test_lines_of_a_child_ledger_are_seen_before_they_count() -> None:
    seen: list[Any] = []
    event = Event("x", 2.0, client=1, round=3)
    child = ChildLedger(child_state(Ledger(delta=1e-6), 1), lambda lines: seen.append((list(lines), child.charged)))
    child.spend(event, event)
    child.spend()
    child.add_remark("new")
    assert seen == [([{"event": asdict(event)}] * 2, []), ([{"remark": "new"}], [{"event": asdict(event)}] * 2)]
    assert child.charged == [*seen[0][0], *seen[1][0]]
    assert child.epsilon(1) == compose([(2.0, 1.0, 2)], 1e-6).epsilon
    changes = {"seeded": True, "mechanism": "y", "sampling": "poisson", "sigma": 3.0, "client": ALL_CLIENTS}
    kinds, trunk = [event, *(replace(event, **{name: value}) for name, value in changes.items())], Ledger()
    trunk.spend(*kinds, *(replace(kind, count=4, round=9) for kind in kinds), replace(event, client=2))
    merged = {replace(kind, round=0, count=5) for kind in kinds}
    assert {*ChildLedger(child_state(trunk, 1)).events} == merged

    wrong = {**child_state(Ledger(), 1), "lines": [{"clients": ["1"]}, {"x": 1}]}
    refused(lambda: ChildLedger(wrong), ValueError, "line 2 of None is not a line")

    def refuse(lines: Any) -> None:
        raise OSError("disk full")

    child = ChildLedger(child_state(Ledger(), 1), refuse)
    refused(lambda: child.spend(event), OSError, "disk full")
    assert (child.charged, child.events) == ([], ())
