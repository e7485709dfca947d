"""A client's ledger away from the run's: it begins with what the run's knows, and its charges are carried back.

Where the client's own machine keeps a ledger too, the run's mirrors it: line by line, each of them once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from distillkit.privacy._clients import ALL_CLIENTS, client_id
from distillkit.privacy._journal import Journal
from distillkit.privacy.errors import NotAccountable
from distillkit.privacy.events import Event
from distillkit.privacy.ledger import Ledger

__all__ = ["ChildLedger", "child_state", "ledger_lines", "merge_child", "mirror_lines", "mirrored_count"]

Line = dict[str, Any]


def child_state(ledger: Ledger, client: int | str) -> dict[str, Any]:
    """What a `ChildLedger` for one client must know of the run's ledger, as plain values that JSON can write.

    Events of one kind are summed up; where records may lie with several clients, they are those of all clients.

    Args:
        ledger: the run's.
        client: whose records will be charged.
    """
    owners, counts = dict.fromkeys((client_id(client), ALL_CLIENTS)), Counter[Event]()
    with ledger._current():
        touching = [e for k in owners for e in ledger._of.get(k, ())] if ledger.disjoint else list(ledger._events)
    for event in touching:
        counts[replace(event, count=1, round=0)] += event.count
    lines: list[Line] = [{"void": reason, "client": owner} for owner, reason in ledger._reasons.items()]
    lines += [{"remark": remark} for remark in ledger._remarks]
    lines += [{"assumed": list(facts), "by": entry} for entry, facts in ledger._assumed.items()]
    lines += [{"event": asdict(replace(event, count=count))} for event, count in counts.items()]
    return {"delta": ledger.delta, "budget": ledger.budget, "disjoint": ledger.disjoint, "lines": lines}


class _Kept(Journal):
    """Keeps what it is given instead of writing it."""

    def __init__(self, before: Callable[[Sequence[Line]], None] | None) -> None:
        super().__init__(None)
        self.lines: list[Line] = []
        self._before = before

    def append(self, *lines: Line) -> None:
        if self._before is not None and lines:
            self._before(lines)
        self.lines.extend(lines)


class ChildLedger(Ledger):
    """A ledger in memory for one client, where the run's cannot be reached: on another machine, say.

    It refuses what the run's would refuse, and lists what it is charged, for `merge_child` to the run's ledger.

    Args:
        known: see `child_state`.
        before: is called with what is charged or noted before that counts; what it raises refuses the charge.
    """

    def __init__(self, known: Mapping[str, Any], before: Callable[[Sequence[Line]], None] | None = None) -> None:
        super().__init__(None, delta=known["delta"], budget=known["budget"], disjoint=known["disjoint"])
        for number, line in enumerate(known["lines"], start=1):
            self._take(number, line)
        self._journal = self._kept = _Kept(before)

    @property
    def charged(self) -> list[Line]:
        """What was charged and noted here, in order, as plain values."""
        return list(self._kept.lines)


def merge_child(ledger: Ledger, lines: Sequence[Line]) -> None:
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
    return "void" in line and client_id(line["client"]) in ledger._reasons


def ledger_lines(ledger: Ledger, since: int = 0) -> list[tuple[int, Line]]:
    """The lines of a ledger's file behind the first `since`, each with its number from 1.

    Args:
        ledger: one with a file.
        since: how many lines are known.
    """
    with ledger._current():
        lines, _ = Journal(ledger.path).unread()
    return [(number, line) for number, line in lines if number > since]


def mirrored_count(ledger: Ledger, source: str) -> int:
    """How many lines of the ledger called `source` the `ledger` has taken over."""
    with ledger._current():
        return ledger._mirrored.get(source, 0)


def mirror_lines(ledger: Ledger, source: str, client: int | str, lines: Sequence[tuple[int, Line]]) -> None:
    """Take over lines of another ledger of the same records, each once however often it comes.

    Nothing is refused for the budget: it was spent. On disk when this returns.

    Args:
        ledger: of a run, say.
        source: a name of the other ledger, which it keeps.
        client: whose records the other ledger is about, by whatever name it knows them itself.
        lines: of the other ledger, see `ledger_lines`; they may come from anywhere.

    Raises:
        ValueError: no lines of a ledger, or of one under another relation.
    """
    owner = client_id(client)
    with ledger._current():
        seen = ledger._mirrored.get(source, 0)
        new = [{**_owned(line, owner), "from": [source, number]} for number, line in lines if number > seen]
        relations = {line["event"]["relation"] for line in new if "event" in line}
        relations |= {event.relation for event in ledger._events[:1]}
        if len(relations) > 1:
            raise NotAccountable(
                f"client {owner}'s records were released under {' and under '.join(sorted(relations))}, which one "
                "epsilon cannot cover"
            )
        ledger._journal.append(*new)
        for number, line in enumerate(new, start=1):
            ledger._take(number, line)


def _owned(line: Line, owner: str) -> Line:
    """The same line about the records of `owner`, with nothing else in it."""
    try:
        if "event" in line:
            event = Event(**{**line["event"], "client": owner})
            if [type(x) for x in (event.mechanism, event.round, event.seeded)] != [str, int, bool]:
                raise TypeError("its mechanism, round or seeded")
            return {"event": asdict(event)}
        if "assumed" in line:
            return {"assumed": [str(fact) for fact in line["assumed"]], "by": str(line["by"])}
        kind = "void" if "void" in line else "remark"
        return {kind: str(line[kind])} | ({"client": owner} if kind == "void" else {})
    except (KeyError, TypeError) as error:
        raise ValueError(f"not a line of a ledger: {str(line)[:80]}") from error
