"""Privacy ledger: an append-only hash chain of charges, written before each release and never rolled back.

An `Account` combines a ledger with the client and round to charge, and with the source of the noise.
"""

from __future__ import annotations

import json
import os
import threading
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

from distillkit._utils import check
from distillkit._utils.shares import require_unsplit
from distillkit.privacy._journal import Journal
from distillkit.privacy._sealed import Sealed
from distillkit.privacy.accounting._ranges import check_delta
from distillkit.privacy.accounting.composition import Spend, compose, largest
from distillkit.privacy.assumptions import ASSUMPTIONS, RECORDS
from distillkit.privacy.errors import BudgetExhausted, NotAccountable, PrivacyError
from distillkit.privacy.events import ALL_CLIENTS, Event, Guarantee, check_relation, client_id
from distillkit.privacy.secret import Secret, as_secret

_FORMAT = "distillkit.ledger/2"
_NEW: dict[str, Any] = {
    "delta": 1e-5, "budget": None, "disjoint": True, "renyi_order": None, "relation": None, "data": None
}  # fmt: skip
_ROUNDING = 1 + 1e-9
_RDP_REMARK = "by RDP: an upper bound, 5 to 26 % above the truth in the settings compared"

_OPACUS_REMARK = (
    "charged from an Opacus accountant, after the releases: epsilon assumes that the loop drew records by "
    "Poisson sampling (poisson_sampling=True), that no layer mixes or reorders records, that all its steps are in the "
    "history, and that nobody predicts PyTorch's generator (secure_mode=True); float32 rounding of sums and noise is "
    "not covered"
)


@dataclass
class _Charges:
    """Charges to one client, merged by kind (all but round and count), and the reason why no guarantee holds, or ""."""

    kinds: dict[tuple[Any, ...], tuple[Event, int]] = field(default_factory=dict)
    reason: str = ""

    def add(self, event: Event) -> None:
        """Add an event."""
        kind = event.mechanism, event.sigma, event.rate, event.sampling, event.relation, event.seeded
        self.kinds[kind] = event, self.kinds.get(kind, (event, 0))[1] + event.count
        if event.sigma == 0:
            self.reason = self.reason or f"{event.mechanism} was released without noise"
        elif event.seeded:
            self.reason = self.reason or f"the noise of {event.mechanism} was seeded, so it is known"


class Ledger(Sealed):
    """Privacy ledger: a record of the privacy budget spent on every client's data.

    Every noised release is charged to a ledger, and `guarantee` returns the guarantee for all releases together. Pass
    the same ledger to all calls on the same records.

    `spend` writes an event and syncs it to disk *before* it returns. Call `spend` before the noise is drawn, so that
    the event counts even if the run fails afterwards. A repeated round is charged again.

    Epsilon composes over the events of a client and is the *maximum* over clients. The clients' records are assumed to
    be disjoint, so a record is affected only by the events of one client and by the events that are charged to every
    client (`client=ALL_CLIENTS`). Epsilon covers the charges to *this* ledger; releases of the same records that were
    charged elsewhere, or nowhere, increase the true epsilon.

    **File**: the first line contains the options, which cannot change. Every line contains the hash of all lines before
    it. The file `<path>.head`, which is written before every charge, has the number of lines, their hash and the lines
    to come. After a crash between the two, the charge is completed when the ledger is opened. A ledger file that was
    cut, edited, reordered or deleted, or whose head is missing, is refused. The folder of a federated run has another
    copy of the head; see `require_head`. A consistent change to all of these files is not detected.

    **Budget**: a charge that would bring a client's epsilon above the budget is refused, so the budget holds for any
    stopping rule. If you look at releases or at epsilon to decide when to stop, report the *budget*. The epsilon of
    `guarantee` holds only if the number of releases was fixed in advance.

    The cost of a release depends on its noise multiplier sigma and its sample rate. If all releases have rate 1 (no
    subsampling), the sigma of a release may depend on earlier releases: the budget then limits the sum of 1/sigma^2
    over all releases, and such a limit is a privacy filter for the Gaussian mechanism (Smith and Thakurta, "Fully
    adaptive composition for Gaussian differential privacy", 2022). At lower rates, sigma and rate must follow a plan
    that was fixed in advance. You may stop before the end of the plan at no cost. With `renyi_order=`, no plan is
    needed: the budget is then a Renyi filter of the given order (Feldman and Zrnic, "Individual privacy accounting via
    a Renyi filter", NeurIPS 2021), which allows fewer releases.

    Args:
        path: path of a file of JSON lines; an existing file is continued. None keeps the ledger in memory, for
            experiments.
        delta: delta of the guarantee, in (0, 1), well below 1 / n for the largest client's number of records n.
            Default: the delta in the file; 1e-5 for a new ledger.
        budget: epsilon that no client may exceed. Default: the budget in the file; no limit for a new ledger. The
            budget is compared with the epsilon that follows from the noise scale, even if the noise is drawn from a
            known seed. A seeded test run therefore stops at the same point as the real run.
        disjoint: whether no two clients hold the same record, which the ledger cannot check. If False, the events of
            all clients compose. Default: the value in the file; True for a new ledger.
        renyi_order: order of the Renyi filter, above 1. Set it if some rates are below 1 and the sigma or rate
            of a release may depend on earlier releases; `filter_order` computes an order. Default: the order in the
            file; none for a new ledger.
        relation: neighboring relation of all events. Default: the relation in the file; for a new ledger, the relation
            of the first event.
        data: fingerprint of the records, for instance `distillkit.fingerprint.set_fingerprint(data, key=...)`. If you
            pass a fingerprint when you reopen the file, it must be the same. Default: the fingerprint in the file. With
            a key, the fingerprint does not reveal the data.

    Threads and processes may share a ledger file. A charge reads the lines of other processes and appends its own lines
    in one atomic step. During a run (`run_lock`), other processes may read the ledger, but their charges are refused.

    Raises:
        NotAccountable: delta is out of range.
        PrivacyError: the file was created with a different option; the message names the option.
        ValueError: the file is damaged, was changed, or is not a ledger.
    """

    __slots__ = (
        "__weakref__", "_assumed", "_charges", "_empty", "_events", "_given", "_journal", "_lock", "_mirrored",
        "_options", "_pending", "_register_count", "_registered", "_remarks",
        "budget", "data", "delta", "disjoint", "path", "relation", "renyi_order",
    )  # fmt: skip

    delta: float
    budget: float | None
    disjoint: bool
    renyi_order: float | None
    relation: str | None
    data: str | None

    def __init__(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        delta: float | None = None,
        budget: float | None = None,
        disjoint: bool | None = None,
        renyi_order: float | None = None,
        relation: str | None = None,
        data: str | None = None,
    ) -> None:
        self._given = {
            "delta": None if delta is None else check_delta(delta),
            "budget": None if budget is None else check.real_number(budget, "budget", above=0.0),
            "disjoint": None if disjoint is None else check.boolean(disjoint, "disjoint"),
            "renyi_order": None if renyi_order is None else check.real_number(renyi_order, "renyi_order", above=1.0),
            "relation": None if relation is None else check_relation(relation),
            "data": None if data is None else check.instance(data, str, "data", "a fingerprint"),
        }
        self._pin(_NEW | {name: value for name, value in self._given.items() if value is not None})
        self.path = None if path is None else check.path(path, "path")
        if self.path is not None and self.path.is_dir():
            raise IsADirectoryError(f"path must be a file, but {self.path} is a folder; give the path of a file in it")
        self._journal = Journal(self.path)
        self._lock = threading.Lock()
        self._events: list[Event] = []
        self._charges: dict[str, _Charges] = {}
        self._remarks: dict[str, None] = {}
        self._assumed: dict[str, tuple[str, ...]] = {}
        self._mirrored: dict[str, int] = {}
        self._registered: set[str] = set()
        self._register_count = 0
        self._pending: deque[tuple[int, dict[str, Any]]] = deque()
        self._empty = True
        with self._synced():
            pass

    def __reduce__(self) -> tuple[Any, ...]:
        """Refuse copies, also in another process: each would count only its own releases."""
        raise TypeError("a Ledger cannot be copied or pickled: pass it on, or open its file again by Ledger(path)")

    def __repr__(self) -> str:
        """Describe the ledger as last read, without reading the file again or computing epsilon."""
        where = "in memory" if self.path is None else repr(str(self.path))
        limit = "" if self.budget is None else f", budget={self.budget:g}"
        shared = "" if self.disjoint else ", disjoint=False"
        clients = len({e.client for e in self._events})
        known = f"{len(self._events)} events of {clients} clients" if self._events else "nothing spent"
        order = "" if self.renyi_order is None else f", renyi_order={self.renyi_order:g}"
        return f"Ledger({where}, delta={self.delta:g}{limit}{shared}{order}: {known})"

    @property
    def head(self) -> dict[str, Any]:
        """Number of lines of the file and their hash, to pass to `require_head` later."""
        with self._synced():
            return self._journal.head

    def require_head(self, head: Mapping[str, Any]) -> None:
        """Check that the file still begins with the lines that it had when the property `head` was read.

        Args:
            head: earlier value of the property (number of lines and their hash), kept elsewhere.

        Raises:
            ValueError: lines were changed or removed, or the file belongs to another ledger.
        """
        with self._synced():
            if not self._journal.continues(head):
                raise ValueError(
                    f"the ledger {self.path} is not the one that had {head.get('lines')} lines with the hash "
                    f"{str(head.get('hash'))[:8]}...: it was cut, edited or replaced. Restore the file"
                )

    @property
    def events(self) -> tuple[Event, ...]:
        """All events so far, in order, including those that other processes charged."""
        with self._synced():
            return tuple(self._events)

    def check(self, *events: Event) -> None:
        """Check, before a run begins, that the budget allows it. Nothing is charged.

        Args:
            events: all events that the run will charge.

        Raises:
            BudgetExhausted, NotAccountable: `spend` would refuse the events.
        """
        with self._synced():
            self._check_budget(events)

    def spend(self, *events: Event) -> None:
        """Charge all `events`, or none of them if one is refused. Call this method before the noise is drawn.

        Args:
            events: events of the planned releases. They are on disk when the method returns.

        Raises:
            BudgetExhausted: the budget does not allow the charge, and nothing was written. The error's attribute
                `remaining` is the number of releases of the first event that the budget still allows.
            NotAccountable: the events and the earlier events do not all have the same neighboring relation.
            distillkit.locking.InUse: another process is in a `run_lock` block for this ledger.
        """
        require_unsplit("every private release would be made and charged several times; call the private function once")
        with self._synced():
            self._check_budget(events)
            self._charge(events)

    def charge_history(self, accountant: Any, *, client: int | str = ALL_CLIENTS) -> None:
        """Charge all releases that an Opacus accountant recorded, after a training loop of your own with Opacus.

        Call the method once, after the last step: a second call charges the same releases again. Epsilon is computed by
        this package, for both adding and removing a record. Because the releases have already happened, they are
        charged even if they exceed the budget. `Guarantee.remarks` states what the loop must have done.

        Args:
            accountant: `PrivacyEngine.accountant`, or another Opacus accountant. Its attribute `history` lists
                (noise multiplier, sample rate, number of steps) tuples.
            client: id of the client whose records the loop trained on; the default is every client.

        Raises:
            TypeError: `accountant` has no such history.
            NotAccountable, ValueError: a sample rate or noise multiplier in the history is out of range.
            distillkit.locking.InUse: another process is in a `run_lock` block for this ledger.
        """
        history = getattr(accountant, "history", None)
        if not isinstance(history, list) or any(not isinstance(s, tuple | list) or len(s) != 3 for s in history):
            raise TypeError(
                "accountant must be an Opacus accountant, whose history lists (noise multiplier, sample rate, steps), "
                f"got {type(accountant).__name__}; pass privacy_engine.accountant"
            )
        events = [Event("opacus", sigma, rate, count, client) for sigma, rate, count in history]
        self.assume("charge_history", ASSUMPTIONS["train_private"])
        self.add_remark(_OPACUS_REMARK)
        with self._synced():
            self._charge(events)

    def register(self, clients: int | Iterable[int | str]) -> None:
        """Record the ids of clients in advance. The epsilon of a client without charges is then 0 instead of an error.

        Args:
            clients: ids of clients; or a number n, which stands for the clients 0 to n - 1.

        Raises:
            TypeError, ValueError: `clients` is a string or a negative number, or an id has the wrong type.
        """
        if isinstance(clients, str):
            raise TypeError(f"clients must be a number or a list of ids, got a string; pass [{clients!r}]")
        named: int | list[str]
        if isinstance(clients, Iterable):
            named = [client_id(client) for client in clients]
        else:
            named = check.positive_int(clients, "clients", least=0)
        with self._synced():
            if isinstance(named, int):
                new: Any = named if named > self._register_count else None
            else:
                new = [name for name in named if not self._is_named(name)]
            if new:
                self._record({"clients": new})

    def remaining(self, event: Event) -> int:
        """Return how many of the event's `count` releases the budget still allows. Nothing is charged.

        Args:
            event: event of the planned releases. If the ledger has no budget, all releases are allowed.
        """
        with self._synced():
            return self._remaining(event)

    def run_lock(self) -> AbstractContextManager[None]:
        """Open a `with` block for a run, in which only the threads of this process may charge the ledger.

        Raises:
            distillkit.locking.InUse: another process is in such a block; the message contains the process id.
        """
        return self._journal.run_lock()

    def void(self, reason: str, *, client: int | str = ALL_CLIENTS) -> None:
        """Record that no guarantee holds any more for a client, for instance because the client's raw images were sent.

        Args:
            reason: reason that completes the sentence "no guarantee: ...", which is printed for the client. Only the
                first reason for a client is recorded.
            client: id of the client; the default, `ALL_CLIENTS`, means every client.

        Raises:
            distillkit.locking.InUse: another process is in a `run_lock` block for this ledger.
        """
        check.instance(reason, str, "reason", "a string")
        with self._synced():
            charges = self._charges.get(client_id(client))
            if charges is None or not charges.reason:
                self._record({"void": reason, "client": client_id(client)})

    def add_remark(self, text: str) -> None:
        """Record a limitation of the guarantee, such as options that were tuned on the private data.

        A remark that is already recorded is not added again.

        Args:
            text: sentence that appears in every later guarantee (`Guarantee.remarks`).
        """
        check.instance(text, str, "text", "a string")
        with self._synced():
            if text not in self._remarks:
                self._record({"remark": text})

    def assume(self, entry: str, facts: Sequence[str] | None = None) -> None:
        """Record the inputs that a function assumes to be public; see `Guarantee.assumptions`.

        Assumptions that are already recorded are not added again.

        Args:
            entry: name of the function that charges the ledger, such as "condense_private".
            facts: names of the inputs, which are keys of `PUBLIC_INPUTS`; default: `ASSUMPTIONS[entry]`.
        """
        check.instance(entry, str, "entry", "a string")
        found = check.sequence(ASSUMPTIONS[entry] if facts is None else facts, "facts", "names of inputs")
        for fact in found:
            check.instance(fact, str, "facts", "a list of names of inputs")
        with self._synced():
            if self._assumed.get(entry) != found:
                self._record({"assumed": list(found), "by": entry})

    def spends(self, client: int | str | None = None) -> list[Spend]:
        """List all releases charged to a client's records, as (sigma, rate, count) tuples for `compose`.

        Args:
            client: id of the client. Releases that are charged to every client (`ALL_CLIENTS`) are included. None: the
                releases of all clients.
        """
        with self._synced():
            return self._spends(None if client is None else client_id(client))

    def guarantee(self, client: int | str | None = None, *, delta: float | None = None) -> Guarantee:
        """Return the guarantee for a client's records after all charges so far, or the reason why none holds.

        Epsilon holds if the number of releases was fixed in advance. If you look at epsilon or at releases to decide
        when to stop, report the ledger's budget instead, which holds for any stopping rule.

        Args:
            client: id of the client; None or `ALL_CLIENTS` for the client with the largest epsilon.
            delta: delta of the guarantee, in (0, 1); default: the ledger's delta.

        Raises:
            NotAccountable: delta is outside (0, 1).
            PrivacyError: the client was never charged or registered.
        """
        client = None if client in (None, ALL_CLIENTS) else client_id(client)
        with self._synced():
            delta = self.delta if delta is None else delta
            clients = self._clients() if client is None else [client]
            if client is not None and not self._is_known(client):
                count = f" and 0 to {self._register_count - 1}" if self._register_count else ""
                raise PrivacyError(
                    f"client {client!r} was neither charged nor registered, so its epsilon is unknown; the known "
                    f"clients are {self._client_ids()[:10]}{count}. Check the name, or call register([{client!r}]) if "
                    "it spent nothing"
                )
            spends = [self._spends(c) for c in clients]
            worst = largest(spends, delta)
            owners = [o for c in clients for o in self._touching(c)]
            reason = self._reason(owners)
            return Guarantee(
                epsilon=None if reason else worst.epsilon,
                delta=delta,
                relation=self.relation or (self._events[0].relation if self._events else ""),
                nominal=worst.epsilon,
                accountant=worst.accountant,
                reason=reason,
                remarks=(*self._remarks, *([_RDP_REMARK] if worst.accountant == "rdp" and not reason else [])),
                assumptions=self._assumptions(),
                budget=self._budget_if_kept(spends, delta),
            )

    def extract(self, client: int | str) -> list[dict[str, Any]]:
        """Return lines that state what concerns a client's records, for a `ChildLedger` on the client's machine.

        Charges that differ only in round and count are merged into one.
        """
        owner = client_id(client)
        with self._synced():
            lines: list[dict[str, Any]] = [
                {"void": charges.reason, "client": name} for name, charges in self._charges.items() if charges.reason
            ]
            lines += [{"remark": remark} for remark in self._remarks]
            lines += [{"assumed": list(facts), "by": entry} for entry, facts in self._assumed.items()]
            lines += [{"clients": [owner]}]
            kinds = [kind for name in self._touching(owner) for kind in self._charges[name].kinds.values()]
            return lines + [{"event": asdict(replace(event, count=count, round=0))} for event, count in kinds]

    def mirrored(self, source: str) -> int:
        """Return the number of lines that `mirror` has copied from the ledger named `source`."""
        with self._synced():
            return self._mirrored.get(source, 0)

    def mirror(self, source: str, lines: Iterable[tuple[int, dict[str, Any]]]) -> None:
        """Copy numbered lines of the ledger named `source`, except those that were copied before.

        The budget does not matter, because the privacy is spent. The lines are on disk when the method returns.

        Raises:
            ValueError: a line is not one of a ledger. No line is copied.
        """
        with self._synced():
            seen, trial = self._mirrored.get(source, 0), Ledger()
            new = [{**line, "from": [source, number]} for number, line in lines if number > seen]
            for line in new:  # a line that cannot be read would make the file useless
                try:
                    trial._apply(line)
                except (KeyError, TypeError, ValueError) as error:
                    raise ValueError(f"not a line of a ledger: {str(line)[:80]} ({error})") from error
            self._record(*new)

    def epsilon(self, client: int | str | None = None, *, delta: float | None = None) -> float | None:
        """Return `guarantee(client, delta=delta).epsilon`, which is None if no guarantee holds.

        Args:
            client, delta: arguments of `guarantee`.
        """
        return self.guarantee(client, delta=delta).epsilon

    def _charge(self, events: Sequence[Event]) -> None:
        self._write(*({"event": asdict(event)} for event in events))
        for event in events:
            self._add_event(event)

    def _add_event(self, event: Event, mirrored: bool = False) -> None:
        self._events.append(event)
        if not mirrored:
            self.relation = self.relation or event.relation
        self._charges.setdefault(client_id(event.client), _Charges()).add(event)

    def _reason(self, owners: Sequence[str]) -> str:
        """Return the reason why no guarantee holds for events charged to the clients `owners`, or "" if one holds."""
        if given := next((self._charges[owner].reason for owner in owners if self._charges[owner].reason), ""):
            return given
        for owner in owners:
            own = {event.relation for event, _ in self._charges[owner].kinds.values()}
            relations = {self.relation or self._events[0].relation, *own}
            if len(relations) > 1:
                names = " and under ".join(sorted(relations))
                return f"releases are charged under {names} (client {owner}), which one epsilon cannot cover"
        return ""

    def _client_ids(self) -> list[str]:
        """Return the ids of the clients that were charged, passed to `void`, or registered by id.

        `ALL_CLIENTS` is left out. The clients 0 to n - 1 that a call `register(n)` registers are left out, too, unless
        they were charged or passed to `void`.
        """
        return [name for name in dict.fromkeys([*self._charges, *sorted(self._registered)]) if name != ALL_CLIENTS]

    def _is_named(self, client: str) -> bool:
        return self._is_numbered(client) or client in self._registered or client in self._charges

    def _is_numbered(self, client: str) -> bool:
        return client.isdecimal() and str(int(client)) == client and int(client) < self._register_count

    def _is_known(self, client: str) -> bool:
        """Return whether a client was charged or registered.

        If all charges were made to every client (`ALL_CLIENTS`) and no client was registered, the result is True for
        every id.
        """
        anyone = ALL_CLIENTS in self._charges and not self._register_count and not self._client_ids()
        return anyone or self._is_named(client)

    def _add_clients(self, clients: Any) -> None:
        if isinstance(clients, int):
            self._register_count = check.positive_int(clients, "clients")
        else:
            self._registered.update(map(client_id, clients))

    def _assumptions(self) -> dict[str, tuple[str, ...]]:
        """Return the names of the inputs that are assumed to be public (keys of `PUBLIC_INPUTS`), by source.

        A source is the name of a function that charges the ledger (see `assume`), or "Ledger" for assumptions of the
        ledger itself.
        """
        found = {by: tuple(f for f in facts if f != "disjoint" or self.disjoint) for by, facts in self._assumed.items()}
        others = sum(not self._is_numbered(client) for client in self._client_ids())
        own = ["disjoint"] if self.disjoint and self._register_count + others > 1 else []
        kinds = {(sigma, rate) for sigma, rate, _ in self._spends(None)}
        if self.renyi_order is None and len(kinds) > 1 and any(rate < 1 for _, rate in kinds):
            own.append("schedule")
        own += RECORDS if self._events and not found else ()  # events of the caller's own mechanism
        return found | ({"Ledger": tuple(own)} if own else {})

    def _clients(self) -> list[str]:
        return [client for client in self._charges if client != ALL_CLIENTS] or [ALL_CLIENTS]

    def _touching(self, client: str | None) -> list[str]:
        """Return the ids of the clients whose charges may concern records of `client` (None: records of any client).

        If no record belongs to two clients (`disjoint`), only charges to `client` and charges to every client
        (`ALL_CLIENTS`) concern the records of `client`. Otherwise all charges may concern them, because another client
        may have the same record.
        """
        if self.disjoint and client is not None:
            return [owner for owner in dict.fromkeys((client, ALL_CLIENTS)) if owner in self._charges]
        return list(self._charges)

    def _spends(self, client: str | None) -> list[Spend]:
        totals = Counter[tuple[float, float]]()
        for owner in self._touching(client):
            for event, count in self._charges[owner].kinds.values():
                totals[event.sigma, event.rate] += count
        return [(sigma, rate, count) for (sigma, rate), count in totals.items()]

    def _epsilon_after(self, events: Sequence[Event]) -> float:
        """Return the largest epsilon that any client charged by `events` would have after these charges.

        Epsilon is computed from the noise scale, even if the noise is drawn from a known seed.
        """
        owners = [client_id(e.client) for e in events]
        clients = self._clients() + [c for c in owners if c != ALL_CLIENTS] if ALL_CLIENTS in owners else owners

        def all_of(client: str) -> list[Spend]:
            own = [e for e in events if not self.disjoint or e.client in (client, ALL_CLIENTS)]
            return [*self._spends(client), *((e.sigma, e.rate, e.count) for e in own)]

        return max(self._budget_epsilon(all_of(client)) for client in dict.fromkeys(clients))

    def _budget_epsilon(self, spends: list[Spend]) -> float:
        """Return the epsilon of the releases `spends`, for the comparison with the budget.

        If an upper bound that is cheaper to compute is within the budget, the result is this bound.
        """
        if self.renyi_order is not None:
            return compose(spends, self.delta, accountant="rdp", order=self.renyi_order).epsilon
        if self.budget is not None and any(rate < 1 for _, rate, _ in spends):
            bound = compose(spends, self.delta, accountant="rdp").epsilon
            if bound <= self.budget:
                return bound
        return compose(spends, self.delta).epsilon

    def _budget_if_kept(self, spends: list[list[Spend]], delta: float) -> float | None:
        """Return the ledger's budget if epsilon at `delta` is within it for every client, and None otherwise."""
        if self.budget is None or delta < self.delta:
            return None
        if self.renyi_order is None:
            reached = largest(spends, self.delta).epsilon
        else:
            reached = max(map(self._budget_epsilon, spends), default=0.0)
        return self.budget if reached <= self.budget * _ROUNDING else None

    def _remaining(self, event: Event) -> int:
        def within(count: int) -> bool:
            return self.budget is None or self._epsilon_after([replace(event, count=count)]) <= self.budget * _ROUNDING

        low, high = 0, event.count
        if within(high):
            return high
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if within(middle) else (low, middle)
        return low

    def _check_budget(self, events: Sequence[Event]) -> None:
        for event in events:
            check.instance(event, Event, "events", "Event(mechanism, sigma, ...) objects")
        for event in events:
            if event.relation != (relation := self.relation or events[0].relation):
                raise NotAccountable(
                    f"{event.mechanism} is private under {event.relation!r}, but the ledger is for {relation!r}; one "
                    "epsilon cannot cover both: keep two ledgers"
                )
        if not events or self.budget is None or (after := self._epsilon_after(events)) <= self.budget * _ROUNDING:
            return
        first, remaining = events[0], self._remaining(events[0])
        raise BudgetExhausted(
            f"{' and '.join(e.mechanism for e in events)} for {_client_names(events)} would bring epsilon to "
            f"{after:.4g}, over the budget of {self.budget:g} (delta {self.delta:g}). {remaining} of {first.count} "
            f"releases of {first.mechanism} fit; or raise sigma, or stop here",
            remaining=remaining,
            ledger=self,
        )

    @contextmanager
    def _synced(self) -> Iterator[None]:
        """Open a `with` block in which the ledger is locked and up to date with the charges of other processes."""
        with self._lock, self._journal.transaction():
            self._pending.extend(self._journal.unread())
            while self._pending:  # a line is removed only after it was read, so an interrupted reading is repeated
                self._read_line(*self._pending[0])
                self._pending.popleft()
            yield

    def _record(self, *lines: dict[str, Any]) -> None:
        """Append lines that are no charges of this process, and read them."""
        self._write(*lines)
        for line in lines:
            self._apply(line)

    def _write(self, *lines: dict[str, Any]) -> None:
        """Append lines to the ledger's file. In an empty file, a line with the ledger's options is written first."""
        if self._empty and self.path is not None and lines:
            found = next((line["event"]["relation"] for line in lines if "event" in line and "from" not in line), None)
            lines = ({"ledger": _FORMAT, **self._options, "relation": self._options["relation"] or found}, *lines)
        self._journal.append(*lines)
        self._empty = self._empty and not lines

    def _pin(self, options: Mapping[str, Any]) -> None:
        self._options = {name: options[name] for name in _NEW}
        for name, value in self._options.items():
            setattr(self, name, value)

    def _adopt(self, options: Mapping[str, Any]) -> None:
        """Give this ledger the `options`, which were read from the first line of its file."""
        for name, given in self._given.items():
            if given is not None and given != options[name] and not (name == "relation" and options[name] is None):
                raise PrivacyError(
                    f"{name} must be that of the ledger {self.path}, {options[name]!r}, got {given!r}: leave {name} "
                    "out, or give the path of a new file. The options of a ledger do not change"
                )
        self._pin({**options, "relation": options["relation"] or self._given["relation"]})

    def _read_line(self, number: int, line: dict[str, Any]) -> None:
        if self._empty and line.get("ledger") == _FORMAT and set(_NEW) <= set(line):
            self._adopt(line)
            self._empty = False
            return
        self._empty = False
        try:
            self._apply(line)
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f"line {number} of {self.path} is not a line of a ledger: {json.dumps(line)[:80]} ({error}); give the "
                "path of a ledger, or of a new file"
            ) from error

    def _apply(self, line: dict[str, Any]) -> None:
        known = {f.name for f in fields(Event)}
        if "from" in line:  # see `mirror`
            source, place = line["from"]
            self._mirrored[source] = max(place, self._mirrored.get(source, 0))
        if isinstance(line.get("event"), dict) and set(line["event"]) <= known:
            self._add_event(Event(**line["event"]), mirrored="from" in line)
        elif "void" in line:
            charges = self._charges.setdefault(client_id(line["client"]), _Charges())
            charges.reason = charges.reason or line["void"] or "no reason was given"
        elif "remark" in line:
            self._remarks[line["remark"]] = None
        elif "assumed" in line:
            self._assumed[line["by"]] = tuple(line["assumed"])
        elif "clients" in line:
            self._add_clients(line["clients"])
        else:
            raise ValueError("unknown kind of line")


def _client_names(events: Sequence[Event]) -> str:
    names = ["everyone" if e.client == ALL_CLIENTS else f"client {e.client!r}" for e in events]
    return " and ".join(dict.fromkeys(names))


class Account(Sealed):
    """Ledger combined with the client to charge, the current round, and the source of the noise.

    Functions that release noised results, such as `condense_private`, accept an account as `ledger=` wherever they
    accept a `Ledger`. If you pass only a `Ledger`, all clients are charged, which is always safe, and noise is drawn
    from the operating system's entropy.

    Args:
        ledger: ledger that is charged before noise is drawn.
        client: index or name of the client from whose records the released results are computed.
        round: round of the releases. It only informs readers of the ledger.
        secret: source of noise and Poisson draws; see `Secret`. If it has a seed, no guarantee holds.

    Ledger and secret cannot be replaced later.
    """

    __slots__ = ("_ledger", "_secret", "client", "round")

    def __init__(
        self, ledger: Ledger, *, client: int | str = ALL_CLIENTS, round: int = 0, secret: Secret | int | None = None
    ) -> None:
        if not isinstance(ledger, Ledger):
            raise TypeError(f"ledger must be a Ledger, got {type(ledger).__name__}")
        self._ledger, self.client = ledger, client_id(client)
        self.round = check.positive_int(round, "round", least=0)
        self._secret = as_secret(secret)

    @property
    def ledger(self) -> Ledger:
        """Ledger that is charged."""
        return self._ledger

    @property
    def secret(self) -> Secret:
        """Source of noise and Poisson draws."""
        return self._secret

    @classmethod
    def of(cls, ledger: Ledger | Account) -> Account:
        """Return an account unchanged, or wrap a ledger in an account that charges all clients."""
        return ledger if isinstance(ledger, Account) else cls(ledger)

    def event(self, mechanism: str, sigma: float, *, rate: float = 1.0, count: int = 1) -> Event:
        """Return an `Event` with this account's client and round. The ledger is not charged.

        Args:
            mechanism, sigma, rate, count: arguments of `Event`.
        """
        return Event(mechanism, sigma, rate, count, self.client, self.round, seeded=self.secret.seeded)

    def spend(self, mechanism: str, sigma: float, *, rate: float = 1.0, count: int = 1) -> None:
        """Charge `count` releases to the ledger. Call this method before their noise is drawn; see `Ledger.spend`.

        Args:
            mechanism, sigma, rate, count: arguments of `Event`.
        """
        self.ledger.spend(self.event(mechanism, sigma, rate=rate, count=count))

    def guarantee(self) -> Guarantee:
        """Return the guarantee for this client's records; see `Ledger.guarantee`."""
        return self.ledger.guarantee(self.client)
