"""A client's ledger away from the run's: it begins with what the run's knows, and its charges are carried back."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from distillkit.privacy.events import EVERYONE, Event, identity
from distillkit.privacy.journal import Journal
from distillkit.privacy.ledger import Ledger

__all__ = ["Branch", "carry_back", "known_of"]

Line = dict[str, Any]


def known_of(ledger: Ledger, client: int | str) -> dict[str, Any]:
    """What a `Branch` for one client must know of the run's ledger, as plain values that JSON can write.

    Events of one kind are summed up; where records may lie with several clients, they are those of all clients.

    Args:
        ledger: the run's.
        client: whose records will be charged.
    """
    owners, counts = (identity(client), EVERYONE), Counter[Event]()
    for event in ledger.events:
        if not ledger.disjoint or event.client in owners:
            counts[replace(event, count=1, round=0)] += event.count
    lines: list[Line] = [{"void": reason, "client": owner} for owner, reason in ledger._reasons.items()]
    lines += [{"remark": remark} for remark in ledger._remarks]
    lines += [{"assumed": list(facts), "by": entry} for entry, facts in ledger._assumed.items()]
    lines += [{"event": asdict(replace(event, count=count))} for event, count in counts.items()]
    return {"delta": ledger.delta, "budget": ledger.budget, "disjoint": ledger.disjoint, "lines": lines}


class _Kept(Journal):
    """Keeps what it is given instead of writing it."""

    def __init__(self) -> None:
        super().__init__(None)
        self.lines: list[Line] = []

    def append(self, *lines: Line) -> None:
        self.lines.extend(lines)


class Branch(Ledger):
    """A ledger in memory for one client, where the run's cannot be reached: on another machine, say.

    It refuses what the run's would refuse, and lists what it is charged, for `carry_back` to the run's ledger.

    Args:
        known: see `known_of`.
    """

    def __init__(self, known: Mapping[str, Any]) -> None:
        super().__init__(None, delta=known["delta"], budget=known["budget"], disjoint=known["disjoint"])
        for number, line in enumerate(known["lines"], start=1):
            self._take(number, line)
        self._journal = self._kept = _Kept()

    @property
    def charged(self) -> list[Line]:
        """What was charged and noted here, in order, as plain values."""
        return list(self._kept.lines)


def carry_back(ledger: Ledger, lines: Sequence[Line]) -> None:
    """Record in the run's ledger what was charged to a branch of it; it is on disk when this returns.

    Nothing is refused, whatever the budget: it was spent. What is known already is not noted again.

    Args:
        ledger: the run's.
        lines: a branch's `charged`.
    """
    with ledger._current():
        new = [line for line in lines if not _known(ledger, line)]
        ledger._journal.append(*new)
        for number, line in enumerate(new, start=1):
            ledger._take(number, line)


def _known(ledger: Ledger, line: Line) -> bool:
    if "remark" in line:
        return line["remark"] in ledger._remarks
    if "assumed" in line:
        return ledger._assumed.get(line["by"]) == tuple(line["assumed"])
    return "void" in line and identity(line["client"]) in ledger._reasons
