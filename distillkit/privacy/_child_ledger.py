"""Ledgers of clients on other machines: child ledgers of a run's ledger, and mirrors of a client's own ledger.

A child ledger starts as a copy of the run's ledger. A client's machine keeps a permanent ledger of its own, and the
run's ledger copies ("mirrors") each line of that ledger once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from distillkit.privacy._journal import Journal
from distillkit.privacy.assumptions import PUBLIC_INPUTS
from distillkit.privacy.events import Event, client_id
from distillkit.privacy.ledger import Ledger

Line = dict[str, Any]

_MOST_ROUNDS, _LONGEST_TEXT = 10**9, 1000
"""Bounds of what another machine's ledger may say."""

_OPTIONS = ("delta", "budget", "disjoint", "renyi_order", "relation")
"""Options of a ledger that its child ledgers share."""


def child_state(ledger: Ledger, client: int | str) -> dict[str, Any]:
    """Return an extract of the run's ledger as JSON values. A `ChildLedger` for one client starts from this extract.

    The extract contains the events charged to this client and the events charged to every client. If clients may share
    records, it contains all events. Events that differ only in their round and count are merged into one event.
    """
    return {name: getattr(ledger, name) for name in _OPTIONS} | {"lines": ledger.extract(client)}


class _MemoryJournal(Journal):
    """Journal that keeps its lines in memory."""

    def __init__(self, before: Callable[[Sequence[Line]], None] | None) -> None:
        super().__init__(None)
        self.lines: list[Line] = []
        self._before = before

    def append(self, *lines: Line) -> None:
        if self._before is not None and lines:
            self._before(lines)
        self.lines.extend(lines)


class ChildLedger(Ledger):
    """Ledger in memory for one client that cannot reach the run's ledger, for instance on another machine.

    A child ledger refuses the same charges as the run's ledger. It records each event as a line, a JSON value that a
    ledger file would contain, in the attribute `charged`.

    Args:
        state: state of the run's ledger, as `child_state` returns it.
        before: function that is called with the new lines (one per event) before they are recorded. If the function
            raises an exception, the charge is refused.
    """

    __slots__ = ("_memory",)

    def __init__(self, state: Mapping[str, Any], before: Callable[[Sequence[Line]], None] | None = None) -> None:
        super().__init__(None, **{name: state[name] for name in _OPTIONS})
        for number, line in enumerate(state["lines"], start=1):
            self._read_line(number, line)
        self._journal = self._memory = _MemoryJournal(before)

    @property
    def charged(self) -> list[Line]:
        """Ledger lines that this child ledger recorded, in order, as JSON values.

        The lines of the run's ledger with which the child ledger started are left out.
        """
        return list(self._memory.lines)


def ledger_lines(ledger: Ledger, since: int = 0) -> list[tuple[int, Line]]:
    """Return the lines of a ledger's file after line `since`, each with its line number, counted from 1.

    The lines that contain the ledger's options, or the client ids recorded by `Ledger.register`, are left out.
    """
    journal = Journal(ledger.path)
    with journal.transaction():
        lines = journal.unread()
    return [(number, line) for number, line in lines if number > since and not {"ledger", "clients"} & line.keys()]


def mirror_lines(ledger: Ledger, source: str, client: int | str, lines: Sequence[tuple[int, Line]]) -> None:
    """Copy lines, such as charges, from another ledger that protects the same client's data into `ledger`.

    Lines that were copied by an earlier call are skipped. Lines are copied even if they exceed the budget, because the
    privacy has already been spent. If the neighboring relation of a line differs from that of `ledger`, no guarantee
    holds for the client. The lines are on disk when the function returns.
    """
    owner = client_id(client)
    ledger.mirror(source, [(number, _for_client(line, owner)) for number, line in lines])


def _for_client(line: Line, owner: str) -> Line:
    """Return a copy of a ledger line in which `owner` is the client and unknown fields are left out."""
    try:
        if "event" in line:
            event = Event(**{**line["event"], "client": owner})
            if not 0 <= event.round < _MOST_ROUNDS or len(event.mechanism) > _LONGEST_TEXT:
                raise ValueError(f"round or mechanism of an event is out of range: {str(line)[:80]}")
            return {"event": asdict(event)}
        if "assumed" in line:
            facts = [str(fact)[:_LONGEST_TEXT] for fact in line["assumed"][: len(PUBLIC_INPUTS)]]
            return {"assumed": facts, "by": str(line["by"])[:_LONGEST_TEXT]}
        kind = "void" if "void" in line else "remark"
        return {kind: str(line[kind])[:_LONGEST_TEXT]} | ({"client": owner} if kind == "void" else {})
    except (KeyError, TypeError) as error:
        raise ValueError(f"not a line of a ledger: {str(line)[:80]}") from error
