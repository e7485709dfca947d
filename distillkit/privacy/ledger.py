"""Privacy ledger: an append-only file of charges, written before each release and never rolled back.

An `Account` combines a ledger with the client and round to charge and the source of the noise.
"""

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
from distillkit.privacy._journal import Journal
from distillkit.privacy.accounting.composition import Bound, Spend, compose
from distillkit.privacy.accounting.gaussian import check_delta
from distillkit.privacy.assumptions import ASSUMPTIONS
from distillkit.privacy.errors import BudgetExhausted, NotAccountable
from distillkit.privacy.events import ALL_CLIENTS, Event, Guarantee, client_id
from distillkit.privacy.secret import Secret, as_secret

__all__ = ["Account", "Ledger"]

_ROUNDING = 1 + 1e-9
_RDP_REMARK = (
    "by RDP: an upper bound, 5 to 26 % above the truth in the settings compared; distillkit[pld] brings a tight one"
)


class Ledger:
    """Privacy ledger: the record of what has been spent on every client's records.

    Every noised release is charged here, and `guarantee` returns the guarantee for all of them together. Give every
    call on the same records the same ledger.

    `spend` writes an event and syncs it to disk *before* it returns. Call `spend` before the noise is drawn: the event
    then counts whatever happens to the run afterwards. A repeated round is charged again. A line that was cut off by a
    crash counts as the costliest event of the ledger, for all clients, although the release was never used.

    Epsilon composes over the events of a client and is the *maximum* over clients. The clients' records are assumed to
    be disjoint, so a record is affected only by the events of one client and the events of `ALL_CLIENTS`. Epsilon
    covers the charges to *this* ledger; releases of the same records that were charged elsewhere, or nowhere, increase
    the true epsilon.

    Args:
        path: path of a file of JSON lines; an existing file is continued. None keeps the ledger in memory, for
            experiments.
        delta: delta of the guarantee, in (0, 1), well below one over the number of records of the largest client.
        budget: epsilon that no client may exceed; None for no limit. The budget is compared with the nominal epsilon,
            so a seeded test run stops at the same point as the real run.
        disjoint: whether no two clients hold the same record. This is assumed and cannot be checked here. If False the
            events of all clients compose.

    Threads and processes may share a ledger file: a charge reads the lines of the others and appends its own in one
    step. During a run (`run_lock`), other processes may read the ledger, but their charges are refused.

    Raises:
        NotAccountable: delta is out of range.
        ValueError: the file is damaged, or is not a ledger.
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
        self._events_of: dict[int | str, list[Event]] = {}
        self._totals: dict[int | str, dict[tuple[float, float], int]] = {}
        self._reasons: dict[int | str, str] = {}
        self._remarks: list[str] = []
        self._assumed: dict[str, tuple[str, ...]] = {}
        self._mirrored: dict[str, int] = {}
        self._pending: deque[tuple[int, dict[str, Any]]] = deque()
        self._torn = 0
        with self._synced():
            pass

    def __repr__(self) -> str:
        """Describe the ledger in memory, without reading the file or computing epsilon."""
        where = "in memory" if self.path is None else repr(str(self.path))
        limit = "" if self.budget is None else f", budget={self.budget:g}"
        shared = "" if self.disjoint else ", disjoint=False"
        clients = len({e.client for e in self._events})
        known = f"{len(self._events)} events of {clients} clients" if self._events else "nothing spent"
        return f"Ledger({where}, delta={self.delta:g}{limit}{shared}: {known})"

    @property
    def events(self) -> tuple[Event, ...]:
        """All events so far, in order, including those that other processes charged."""
        with self._synced():
            return tuple(self._events)

    def check(self, *events: Event) -> None:
        """Check whether the budget allows a run before it begins; charge nothing.

        Args:
            events: all events that the run will charge.

        Raises:
            BudgetExhausted, NotAccountable: see `spend`.
        """
        with self._synced():
            self._check_budget(events)

    def spend(self, *events: Event) -> None:
        """Charge all `events` or none of them; call this method before their noise is drawn.

        Args:
            events: the planned releases; the events are on disk when the method returns.

        Raises:
            BudgetExhausted: the budget does not allow the charge, and nothing was written. `.remaining` is the number
                of releases of the first event that are still allowed.
            NotAccountable: the events differ in their relation from each other or from earlier events.
            distillkit.locking.InUse: another process owns the ledger.
        """
        with self._synced():
            self._check_budget(events)
            self._journal.append(*({"event": asdict(event)} for event in events))
            for event in events:
                self._add_event(event)

    def remaining(self, event: Event) -> int:
        """Return how many of the event's `count` releases the budget still allows; charge nothing.

        Args:
            event: event of the planned releases; without a budget all of them are allowed.
        """
        with self._synced():
            return self._remaining(event)

    def run_lock(self) -> AbstractContextManager[None]:
        """Open a `with` block for a run, in which only the threads of this process may charge.

        Raises:
            distillkit.locking.InUse: another process is in such a block; the message names it.
        """
        return self._journal.run_lock()

    def void(self, reason: str, *, client: int | str = ALL_CLIENTS) -> None:
        """Record that no guarantee holds any more for a client, for instance because the client's raw images were sent.

        Args:
            reason: reason that completes the sentence "no guarantee: ..."; guarantees show the first recorded reason.
            client: id of the client; default `ALL_CLIENTS`.

        Raises:
            distillkit.locking.InUse: another process owns the ledger.
        """
        with self._synced():
            self._journal.append({"void": reason, "client": client_id(client)})
            self._reasons.setdefault(client_id(client), reason)

    def add_remark(self, text: str) -> None:
        """Record, once, a limit of the guarantee, such as options that were tuned on the private data.

        Args:
            text: sentence that is added to every later guarantee (`Guarantee.remarks`).
        """
        with self._synced():
            if text not in self._remarks:
                self._journal.append({"remark": text})
                self._remarks.append(text)

    def assume(self, entry: str, facts: Sequence[str] | None = None) -> None:
        """Record, once, the inputs that an entry point assumes to be public; see `Guarantee.assumptions`.

        Args:
            entry: name of the entry point.
            facts: names of the inputs, keys of `PUBLIC_INPUTS`; default: `ASSUMPTIONS[entry]`.
        """
        found = tuple(ASSUMPTIONS[entry] if facts is None else facts)
        with self._synced():
            if self._assumed.get(entry) != found:
                self._journal.append({"assumed": list(found), "by": entry})
                self._assumed[entry] = found

    def spends(self, client: int | str | None = None) -> list[Spend]:
        """List all releases charged to a client's records, as (sigma, rate, count) tuples for `compose`.

        Args:
            client: id of the client; the events of `ALL_CLIENTS` are included. None: the events of all clients.
        """
        with self._synced():
            return self._spends(None if client is None else client_id(client))

    def guarantee(self, client: int | str | None = None, *, delta: float | None = None) -> Guarantee:
        """Return the guarantee for a client's records after all charges, or the reason why none holds.

        Args:
            client: id of the client; None or `ALL_CLIENTS` for the client with the largest epsilon.
            delta: delta of the guarantee, in (0, 1); default: the ledger's delta.

        Raises:
            NotAccountable: delta is outside (0, 1).
        """
        client = None if client in (None, ALL_CLIENTS) else client_id(client)
        with self._synced():
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
                assumptions=dict(self._assumed),
            )

    def epsilon(self, client: int | str | None = None, *, delta: float | None = None) -> float | None:
        """Return `guarantee(client, delta=delta).epsilon`: None if no guarantee holds.

        Args:
            client, delta: arguments of `guarantee`.
        """
        return self.guarantee(client, delta=delta).epsilon

    def _add_event(self, event: Event) -> None:
        self._events.append(event)
        self._events_of.setdefault(event.client, []).append(event)
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
        """Return the clients whose events affect the records of `client`."""
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

    def _epsilon_after(self, events: Sequence[Event]) -> float:
        """Return the largest nominal epsilon, after `events`, of the clients that the events affect."""
        owners = [e.client for e in events]
        clients = self._clients() + [c for c in owners if c != ALL_CLIENTS] if ALL_CLIENTS in owners else owners

        def all_of(client: int | str) -> list[Spend]:
            own = [e for e in events if not self.disjoint or e.client in (client, ALL_CLIENTS)]
            return [*self._spends(client), *((e.sigma, e.rate, e.count) for e in own)]

        return max(compose(all_of(c), self.delta).epsilon for c in dict.fromkeys(clients))

    def _remaining(self, event: Event) -> int:
        def within(count: int) -> bool:
            return self.budget is None or self._epsilon_after([replace(event, count=count)]) <= self.budget * _ROUNDING

        low, high = 0, event.count + 1
        if within(event.count):
            return event.count
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if within(middle) else (low, middle)
        return low

    def _check_budget(self, events: Sequence[Event]) -> None:
        relations = [self._events[0], *events] if self._events else list(events)
        for event in events:
            if event.relation != relations[0].relation:
                raise NotAccountable(
                    f"{event.mechanism} is private under {event.relation!r}, but the ledger contains "
                    f"{relations[0].mechanism} under {relations[0].relation!r}; one epsilon cannot cover both: keep "
                    "two ledgers"
                )
        if not events or self.budget is None or (after := self._epsilon_after(events)) <= self.budget * _ROUNDING:
            return
        first, remaining = events[0], self._remaining(events[0])
        raise BudgetExhausted(
            f"{' and '.join(e.mechanism for e in events)} for {_client_names(events)} would bring epsilon to "
            f"{after:.4g}, over the budget of {self.budget:g} (delta {self.delta:g}). {remaining} of {first.count} "
            f"releases of {first.mechanism} fit; or raise sigma, or stop here",
            remaining=remaining,
        )

    @contextmanager
    def _synced(self) -> Iterator[None]:
        """Open a `with` block in which the ledger is locked and includes the charges of other processes."""
        with self._lock, self._journal.transaction():
            lines, torn = self._journal.unread()
            self._torn += torn
            self._pending.extend(lines)
            while self._pending:  # an interrupted or refused line is read again later
                self._read_line(*self._pending[0])
                self._pending.popleft()
            yield

    def _read_line(self, number: int, line: dict[str, Any]) -> None:
        try:
            self._apply(line)
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f"line {number} of {self.path} is not a line of a ledger: {json.dumps(line)[:80]} ({error}); give the "
                "path of a ledger, or of a new file"
            ) from error

    def _apply(self, line: dict[str, Any]) -> None:
        known = {f.name for f in fields(Event)}
        if "from" in line:  # see `distillkit.privacy._child_ledger.mirror_lines`
            source, place = line["from"]
            self._mirrored[source] = max(place, self._mirrored.get(source, 0))
        if isinstance(line.get("event"), dict) and set(line["event"]) <= known:
            self._add_event(Event(**line["event"]))
        elif "void" in line:
            self._reasons.setdefault(client_id(line.get("client", ALL_CLIENTS)), line["void"])
        elif "remark" in line:
            if line["remark"] not in self._remarks:
                self._remarks.append(line["remark"])
        elif "assumed" in line:
            self._assumed[line["by"]] = tuple(line["assumed"])
        else:
            raise ValueError("unknown kind of line")


def _client_names(events: Sequence[Event]) -> str:
    names = ["everyone" if e.client == ALL_CLIENTS else f"client {e.client!r}" for e in events]
    return " and ".join(dict.fromkeys(names))


class Account:
    """Ledger combined with the client and round to charge and the source of the noise.

    Private calls accept an account as `ledger=` wherever they accept a `Ledger`. With a `Ledger` alone, all clients are
    charged, which is always safe, and noise is drawn from the operating system's entropy.

    Args:
        ledger: ledger that is charged before noise is drawn.
        client: index or name of the client whose records are released.
        round: round of the releases, for readers of the ledger only.
        secret: source of noise and Poisson draws; see `Secret`. With a seed no guarantee holds.
    """

    def __init__(
        self,
        ledger: Ledger,
        *,
        client: int | str = ALL_CLIENTS,
        round: int = 0,
        secret: Secret | int | None = None,
    ) -> None:
        if not isinstance(ledger, Ledger):
            raise TypeError(f"ledger must be a Ledger, got {type(ledger).__name__}")
        self.ledger, self.client, self.round = ledger, client_id(client), round
        self.secret = as_secret(secret)

    @classmethod
    def of(cls, ledger: Ledger | Account) -> Account:
        """Return an account unchanged; wrap a ledger in an account for all clients."""
        return ledger if isinstance(ledger, Account) else cls(ledger)

    def event(self, mechanism: str, sigma: float, *, rate: float = 1.0, count: int = 1) -> Event:
        """Return the event of `count` releases on this account.

        Args:
            mechanism, sigma, rate, count: see `Event`.
        """
        return Event(mechanism, sigma, rate, count, self.client, self.round, seeded=self.secret.seeded)

    def spend(self, mechanism: str, sigma: float, *, rate: float = 1.0, count: int = 1) -> None:
        """Charge `count` releases to the ledger, before their noise is drawn; see `Ledger.spend`.

        Args:
            mechanism, sigma, rate, count: see `Event`.
        """
        self.ledger.spend(self.event(mechanism, sigma, rate=rate, count=count))

    def guarantee(self) -> Guarantee:
        """Return the guarantee for this client's records; see `Ledger.guarantee`."""
        return self.ledger.guarantee(self.client)
