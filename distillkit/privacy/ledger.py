"""An append-only record of what was spent: written before a release is used, and never rolled back."""

from __future__ import annotations

import json
import os
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

from distillkit._utils import check
from distillkit.privacy._clients import ALL_CLIENTS, client_id
from distillkit.privacy._journal import Journal
from distillkit.privacy.accounting.composition import Bound, Spend, compose
from distillkit.privacy.assumptions import ASSUMPTIONS
from distillkit.privacy.errors import BudgetExhausted, NotAccountable
from distillkit.privacy.events import Event, Guarantee
from distillkit.privacy.validation._delta import check_delta

__all__ = ["Ledger"]

_ROUNDING = 1 + 1e-9
_RDP_REMARK = (
    "by RDP: an upper bound, 5 to 26 % above the truth in the settings compared; distillkit[pld] brings a tight one"
)


class Ledger:
    """What every client's records have paid.

    The account book of a data set's privacy: every noised release of its records is charged here, and `guarantee` says
    what all of them cost together. Give every call on the same records the same ledger.

    `spend` writes an event and syncs it to disk *before* it returns, so call it before the noise is drawn: whatever
    happens to the run afterwards, the event counts. A round that is run again is charged again. A line that a crash
    tore counts as the costliest event of the ledger, to everyone, although its release can never have been used.

    Epsilon composes over the events of a client and is the *maximum* over clients: their records are disjoint, so one
    record is touched by one client's events only, and by those of `ALL_CLIENTS`. It covers what was charged to *this*
    ledger: releases from the same records that were charged to another one, or to none, come on top.

    Args:
        path: a file of JSON lines, continued if it exists; None keeps the ledger in memory, for trying things out.
        delta: in (0, 1), well below one over the number of records of the largest client.
        budget: epsilon that no client may exceed; None for no limit. Compared with the nominal epsilon, so that a
            seeded rehearsal stops where the real run will.
        disjoint: whether no record lies with two clients, which is assumed and cannot be seen here. If False the events
            of all clients compose.

    Threads and processes may share a ledger file: a charge reads what others wrote and appends in one step. A run owns
    its ledger (`owned`): while it goes on, what other processes would charge is refused by name, and they may read.

    Raises:
        NotAccountable: delta out of range.
        ValueError: the file is damaged, or is no ledger.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        delta: float = 1e-5,
        budget: float | None = None,
        disjoint: bool = True,
    ) -> None:
        self.delta, self.disjoint = check_delta(delta), check.boolean(disjoint, "disjoint")
        self.budget = None if budget is None else check.real_number(budget, "budget", above=0.0)
        self.path = None if path is None else Path(path)
        self._journal = Journal(self.path)
        self._lock = threading.Lock()
        self._events: list[Event] = []
        self._of: dict[int | str, list[Event]] = {}
        self._totals: dict[int | str, dict[tuple[float, float], int]] = {}
        self._reasons: dict[int | str, str] = {}
        self._remarks: list[str] = []
        self._assumed: dict[str, tuple[str, ...]] = {}
        self._mirrored: dict[str, int] = {}
        self._untaken: deque[tuple[int, dict[str, Any]]] = deque()
        self._torn = 0
        with self._current():
            pass

    def __repr__(self) -> str:
        """What it holds in memory; the file is not looked at, and no epsilon computed."""
        where = "in memory" if self.path is None else repr(str(self.path))
        limit = "" if self.budget is None else f", budget={self.budget:g}"
        shared = "" if self.disjoint else ", disjoint=False"
        payers = len({e.client for e in self._events})
        known = f"{len(self._events)} events of {payers} payers" if self._events else "nothing spent"
        return f"Ledger({where}, delta={self.delta:g}{limit}{shared}: {known})"

    @property
    def events(self) -> tuple[Event, ...]:
        """All that was charged so far, in the order in which it was charged, by other processes too."""
        with self._current():
            return tuple(self._events)

    def check(self, *events: Event) -> None:
        """See whether a run can be paid for before it begins: raise what `spend` would, and charge nothing.

        Args:
            events: all that the run will charge, taken together.

        Raises:
            BudgetExhausted, NotAccountable: as `spend`.
        """
        with self._current():
            self._admit(events)

    def spend(self, *events: Event) -> None:
        """Charge `events`, all or none; call it before their noise is drawn.

        Args:
            events: what will be released; on disk when this returns.

        Raises:
            BudgetExhausted: the budget does not allow it; nothing was written. `.remaining` of the first event's
                `count` would do.
            NotAccountable: a relation that differs from that of the events before it.
            distillkit.locking.InUse: another process owns the ledger.
        """
        with self._current():
            self._admit(events)
            self._journal.append(*({"event": asdict(event)} for event in events))
            for event in events:
                self._add(event)

    def remaining(self, event: Event) -> int:
        """How many of the event's `count` releases the budget still allows, 0 to `count`; nothing is charged.

        Args:
            event: what would be released; without a budget all of it fits.
        """
        with self._current():
            return self._remaining(event)

    def owned(self) -> AbstractContextManager[None]:
        """A `with` block for the length of a run, in which no other process may charge; the threads of this one may.

        Raises:
            distillkit.locking.InUse: another process does so already; it is named.
        """
        return self._journal.owned()

    def void(self, reason: str, *, client: int | str = ALL_CLIENTS) -> None:
        """Record that no guarantee holds for somebody any more, for instance because its raw images took part.

        Args:
            reason: why, in words that complete "no guarantee: ..."; the first one given is the one shown.
            client: whose records; `ALL_CLIENTS` by default.

        Raises:
            distillkit.locking.InUse: another process owns the ledger.
        """
        with self._current():
            self._journal.append({"void": reason, "client": client_id(client)})
            self._reasons.setdefault(client_id(client), reason)

    def add_remark(self, text: str) -> None:
        """Record, once, what epsilon does not cover, such as options that were tuned on the private data.

        Args:
            text: a sentence that every later guarantee carries (`Guarantee.remarks`).
        """
        with self._current():
            if text not in self._remarks:
                self._journal.append({"remark": text})
                self._remarks.append(text)

    def assume(self, entry: str, facts: Sequence[str] | None = None) -> None:
        """Record, once, what an entry point takes to be public; every later guarantee lists it (`Guarantee.assumed`).

        Args:
            entry: the entry point's name.
            facts: names in `PUBLIC_INPUTS`; default the line of `ASSUMPTIONS` with the entry's name.
        """
        found = tuple(ASSUMPTIONS[entry] if facts is None else facts)
        with self._current():
            if self._assumed.get(entry) != found:
                self._journal.append({"assumed": list(found), "by": entry})
                self._assumed[entry] = found

    def spends(self, client: int | str | None = None) -> list[Spend]:
        """List what has been spent on a client's records: (sigma, rate, count) each, as `compose` takes it.

        Args:
            client: whose records; events of `ALL_CLIENTS` touch them too. None: the events of all clients.
        """
        with self._current():
            return self._spends(None if client is None else client_id(client))

    def guarantee(self, client: int | str | None = None, *, delta: float | None = None) -> Guarantee:
        """What can be promised for somebody's records after all that was charged, or why nothing can.

        Args:
            client: whose records; None or `ALL_CLIENTS` for whoever paid most.
            delta: in (0, 1); default the ledger's.

        Raises:
            NotAccountable: delta outside (0, 1).
        """
        client = None if client in (None, ALL_CLIENTS) else client_id(client)
        with self._current():
            delta = self.delta if delta is None else delta
            clients = self._clients() if client is None else [client]
            bounds = [compose(self._spends(c), delta) for c in clients]
            worst = max(bounds, key=lambda b: b.epsilon, default=Bound(0.0, "exact"))
            owners = [o for c in clients for o in self._touching(c)]
            reason = next((self._reasons[o] for o in owners if o in self._reasons), "")
            return Guarantee(
                epsilon=None if reason else worst.epsilon,
                delta=delta,
                relation=self._events[0].relation if self._events else "",
                nominal=worst.epsilon,
                accountant=worst.accountant,
                reason=reason,
                remarks=(*self._remarks, *([_RDP_REMARK] if worst.accountant == "rdp" and not reason else [])),
                assumed=dict(self._assumed),
            )

    def epsilon(self, client: int | str | None = None, *, delta: float | None = None) -> float | None:
        """The epsilon that can be promised, None where none can: `guarantee(client, delta=delta).epsilon`.

        Args:
            client, delta: as for `guarantee`.
        """
        return self.guarantee(client, delta=delta).epsilon

    def _add(self, event: Event) -> None:
        self._events.append(event)
        self._of.setdefault(event.client, []).append(event)
        totals = self._totals.setdefault(event.client, {})
        totals[event.sigma, event.rate] = totals.get((event.sigma, event.rate), 0) + event.count
        if event.sigma == 0:
            self._reasons.setdefault(event.client, f"{event.mechanism} was released without noise")
        elif event.seeded:
            self._reasons.setdefault(event.client, f"the noise of {event.mechanism} was seeded, so it is known")

    def _clients(self) -> list[int | str]:
        owners = dict.fromkeys([*self._totals, *self._reasons])
        return [c for c in owners if c != ALL_CLIENTS] or [ALL_CLIENTS]

    def _touching(self, client: int | str | None) -> list[int | str]:
        """Whose events touch the records of `client`."""
        owners = list(dict.fromkeys([*self._totals, *self._reasons]))
        return [o for o in owners if not self.disjoint or client is None or o in (client, ALL_CLIENTS)]

    def _spends(self, client: int | str | None) -> list[Spend]:
        owners = self._touching(client)
        spends = [(s, q, n) for o in owners for (s, q), n in self._totals.get(o, {}).items()]
        if self._torn and self._events:
            every = {(e.sigma, e.rate, e.count) for e in self._events}
            sigma, rate, count = max(every, key=lambda s: compose([s], self.delta, accountant="rdp").epsilon)
            spends.append((sigma, rate, count * self._torn))
        return spends

    def _after(self, events: Sequence[Event]) -> float:
        """The largest nominal epsilon of any client whom `events` touch."""
        owners = [e.client for e in events]
        clients = self._clients() + [c for c in owners if c != ALL_CLIENTS] if ALL_CLIENTS in owners else owners

        def all_of(client: int | str) -> list[Spend]:
            own = [e for e in events if not self.disjoint or e.client in (client, ALL_CLIENTS)]
            return [*self._spends(client), *((e.sigma, e.rate, e.count) for e in own)]

        return max(compose(all_of(c), self.delta).epsilon for c in dict.fromkeys(clients))

    def _remaining(self, event: Event) -> int:
        def within(count: int) -> bool:
            return self.budget is None or self._after([replace(event, count=count)]) <= self.budget * _ROUNDING

        low, high = 0, event.count + 1
        if within(event.count):
            return event.count
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if within(middle) else (low, middle)
        return low

    def _admit(self, events: Sequence[Event]) -> None:
        relations = [self._events[0], *events] if self._events else list(events)
        for event in events:
            if event.relation != relations[0].relation:
                raise NotAccountable(
                    f"{event.mechanism} is private under {event.relation!r}, but the ledger holds "
                    f"{relations[0].mechanism} under {relations[0].relation!r}; one epsilon cannot cover both: keep "
                    "two ledgers"
                )
        if not events or self.budget is None or (after := self._after(events)) <= self.budget * _ROUNDING:
            return
        first, remaining = events[0], self._remaining(events[0])
        raise BudgetExhausted(
            f"{' and '.join(e.mechanism for e in events)} for {_who(events)} would bring epsilon to "
            f"{after:.4g}, over the budget of {self.budget:g} (delta {self.delta:g}). {remaining} of {first.count} "
            f"releases of {first.mechanism} fit; or raise sigma, or stop here",
            remaining=remaining,
        )

    @contextmanager
    def _current(self) -> Iterator[None]:
        """Hold the ledger, having read what other processes wrote."""
        with self._lock, self._journal.locked():
            lines, torn = self._journal.unread()
            self._torn += torn
            self._untaken.extend(lines)
            while self._untaken:  # a line at which this was interrupted, or that is refused, is not passed over later
                self._take(*self._untaken[0])
                self._untaken.popleft()
            yield

    def _take(self, number: int, line: dict[str, Any]) -> None:
        try:
            self._enter(line)
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f"line {number} of {self.path} is not a ledger's: {json.dumps(line)[:80]} ({error}); give the path of "
                "a ledger, or of a file that does not exist yet"
            ) from error

    def _enter(self, line: dict[str, Any]) -> None:
        known = {f.name for f in fields(Event)}
        if "from" in line:  # see `distillkit.privacy._child_ledger.mirror`
            source, place = line["from"]
            self._mirrored[source] = max(place, self._mirrored.get(source, 0))
        if isinstance(line.get("event"), dict) and set(line["event"]) <= known:
            self._add(Event(**line["event"]))
        elif "void" in line:
            self._reasons.setdefault(client_id(line.get("client", ALL_CLIENTS)), line["void"])
        elif "remark" in line:
            if line["remark"] not in self._remarks:
                self._remarks.append(line["remark"])
        elif "assumed" in line:
            self._assumed[line["by"]] = tuple(line["assumed"])
        else:
            raise ValueError("it says nothing that was spent, noted or assumed")


def _who(events: Sequence[Event]) -> str:
    names = ["everyone" if e.client == ALL_CLIENTS else f"client {e.client!r}" for e in events]
    return " and ".join(dict.fromkeys(names))
