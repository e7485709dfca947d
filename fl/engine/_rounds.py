"""One round after another: draw clients, exchange messages with them, receive, check, evaluate, record and commit."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from distillkit._utils.user_warnings import warn
from distillkit.privacy import ALL_CLIENTS, BudgetExhausted
from distillkit.rng import derive
from distillkit.sets import LabeledImages, StoredImages
from fl.aggregation import AggregatedReplies, Aggregator
from fl.engine import _evaluation, history
from fl.engine._commit_guard import check_state
from fl.engine._contract import checked_draw, checked_rejections, require_exchanges
from fl.engine._devices import placed
from fl.engine._exchange import Exchanger
from fl.engine._round_stats import RoundStats
from fl.engine.store import Store
from fl.message import Message, Tensors
from fl.method import NoUsableReply


def draw_clients(count: int, wanted: int, seed: int, round_number: int) -> list[int]:
    """Draw `wanted` of `count` clients without replacement, and return their indices in ascending order."""
    if wanted == count:
        return list(range(count))
    generator = derive(seed, round_number, "draw")
    chosen: set[int] = set()  # Floyd's algorithm: its cost depends on the number of drawn clients only
    for last in range(count - wanted, count):
        one = int(torch.randint(last + 1, (), generator=generator))
        chosen.add(last if one in chosen else one)
    return sorted(chosen)


class RoundRunner:
    """Runner of a run's rounds. `run_round` shows a round; `Exchanger.collect` shows an exchange with the clients.

    Args:
        exchanger: sender of the requests. Its attributes `method` and `server` are the run's method and server.
        store: folder of the run; None if the run writes no files.
        test: the global test set; None if there is none.
        run_id: fingerprint of the run's options, which is stored in its checkpoints.
        participation: number of clients that are drawn in a round, unless the method draws them.
        min_replies: number of usable replies that a round needs.
        evaluate: clients that are evaluated on their own test images after a round.

    Attributes:
        on_row: function that is called with each row of the history, once the row is complete and its round committed.
    """

    def __init__(
        self, exchanger: Exchanger, store: Store | None, test: LabeledImages | StoredImages | None, *, run_id: str,
        participation: int, min_replies: int = 1, evaluate: str | Sequence[int] = "none",
    ) -> None:  # fmt: skip
        self.exchanger, self.method, self.server = exchanger, exchanger.method, exchanger.server
        require_exchanges(self.method)
        self.store, self.run_id = store, run_id
        self._kept = 0  # index of the round whose state is kept if the present one fails
        self.on_row: Callable[[dict[str, Any]], object] = lambda row: None
        self.test = placed(test, self.server.device)
        self._participation, self._min_replies, self._evaluate = participation, min_replies, evaluate
        self._uncharged: list[set[int]] = []  # by exchange of the present round

    def start(self) -> None:
        """Let the method prepare the server's state before the first round (`Method.start`)."""
        self._timed_update(lambda: self.method.start(self.server))

    def run_setup(self) -> None:
        """If the method has a query, send it to every client before round 1, and pass the answers to the method."""
        if not self.method.has_query:
            return
        stats, charged = RoundStats(), self._charges()
        try:
            answers = self._collect("answer", range(self.server.clients), stats)
        finally:
            self._void_uncharged(charged)
        self._require_enough(answers, stats, self._min_replies)
        self._timed_update(lambda: self.method.receive_answers(self.server, answers.result()))
        counted = ("bytes_up", "bytes_down", "up", "down", "failed")
        self.server.notes["setup"] = {key: value for key, value in stats.row([]).items() if key in counted}

    def run_round(self, number: int) -> None:
        """Run one round, commit it, and pass its row of the history to the function `on_row`.

        Draw clients; in each exchange send, receive and check replies, and fold them (`Exchanger.collect`); let the
        method receive the aggregate; check the new state; evaluate; commit.

        A round that fails before its commit does not change the server's state. A killed round does not count:
        a resumed run repeats it (see `Store`).
        """
        started, server, exchanger, stats = time.perf_counter(), self.server, self.exchanger, RoundStats()
        server.round, server.notes = number, server.notes if number == 1 else {}
        server.secret = exchanger.secret()
        exchanger.resent, self._kept = 0, number - 1
        before, charged, hidden = server.state.copy(), self._charges(), self.method.draws_clients
        try:
            drawn = self._draw()
            replies = self._exchange(drawn, stats)
            stats.server_seconds += self._timed_update(partial(self.method.receive, server, replies))
            self._void_uncharged(charged)
            del replies
            _require_json(server.notes)
            row = stats.row(drawn) | self._keep_usable_state(before)
            row |= _evaluation.evaluate_global(exchanger, self.test)
            row |= _evaluation.evaluate_clients(exchanger, self._evaluate, drawn) | self._privacy_columns()
            row |= {"bytes_resent": exchanger.resent} if exchanger.resent else {}
            row = history.masked(row) if hidden else row
        except BaseException as error:
            try:
                if not hidden:  # a server that draws clients in secret charges before it releases anything
                    self._void_uncharged(charged)
            finally:
                server.state, server.round = before, self._kept
                exchanger.rollback()
            if isinstance(error, BudgetExhausted):
                kept = f"round {number} was not finished; the state after round {self._kept} is kept"
                raise BudgetExhausted(f"{error}; {kept}", remaining=error.remaining) from error
            raise
        if row["accuracy"] is None and (own := row.get("accuracy_personal") or row.get("accuracy_clients")):
            row["accuracy"] = own["mean"]
        row |= {f"note_{k}" if k in row else k: v for k, v in server.notes.items()}
        row = {"round": number, **row, "seconds": time.perf_counter() - started}
        self._commit(number, row)
        self.on_row(row)

    # The steps of a round.

    def _draw(self) -> list[int]:
        """Return the indices of the round's clients in ascending order."""
        if self.method.draws_clients:
            return self.exchanger.thread.run(lambda: checked_draw(self.method, self.server))
        return draw_clients(self.server.clients, self._participation, self.server.seed, self.server.round)

    def _show(self, drawn: Sequence[int], present: Sequence[int]) -> None:
        """Tell the method the drawn and the present clients. A secret draw is told to none of its functions."""
        if not self.method.draws_clients:
            self.server.drawn, self.server.present = list(drawn), list(present)

    def _exchange(self, drawn: Sequence[int], stats: RoundStats) -> AggregatedReplies:
        """Run all exchanges of the round with the drawn clients, and return the aggregated replies of "local"."""
        method, present, replies = self.method, drawn, None
        self._show(drawn, present)
        for verb in method.exchanges:
            aggregator = self._collect(verb, present, stats, after_local=replies is not None)
            present, aggregated = list(aggregator.clients), aggregator.result()
            self._show(drawn, present)
            if verb == "local":
                self._require_enough(aggregator, stats, 0 if method.draws_clients else self._min_replies)
                replies = aggregated
            if len(method.exchanges) > 1:
                rejected = self._receive_in(verb, aggregated, drawn, stats, after_local=replies is not None)
                present = [client for client in present if client not in rejected]
                self._show(drawn, present)
        assert replies is not None
        return replies

    def _collect(
        self, verb: str, clients: Sequence[int], stats: RoundStats, *, after_local: bool = False
    ) -> Aggregator:
        """Run one exchange, and note the clients that sent a reply, usable or not, without a charge."""
        before = self._charges()
        stats.replied.clear()
        try:
            return self.exchanger.collect(verb, clients, stats, after_local=after_local)
        finally:
            # Filters of a private method get no records in their own exchanges, such as that of keys of secure sums.
            inner = self.method.inner
            if self.server.ledger is not None and (verb in ("answer", *inner.exchanges) or not inner.private):
                charged = {event.client for event in self.server.ledger.events[before:]}
                self._uncharged.append({client for client in stats.replied if str(client) not in charged})

    def _receive_in(
        self, verb: str, replies: AggregatedReplies, drawn: Sequence[int], stats: RoundStats, *, after_local: bool
    ) -> Mapping[int, str]:
        """Pass the aggregated replies of one exchange to the method (`Method.receive_exchange`).

        Clients that the method rejects are counted as failed, and get no more requests in this round. They are
        returned, with the reasons.
        """
        rejected: dict[int, str] = {}

        def receive() -> None:
            found = self.method.receive_exchange(self.server, verb, replies)
            rejected.update(checked_rejections(self.method, found, drawn))

        try:
            stats.server_seconds += self._timed_update(receive)
        except NoUsableReply as error:
            reasons = f" ({stats.reasons()})" if stats.reasons() else ""
            raise NoUsableReply(
                f"round {self.server.round}: {error}{reasons}; the state after round {self._kept} is kept"
            ) from error
        for client, reason in rejected.items():
            stats.fail(verb, client, reason, after_local=after_local)
        return rejected

    def _require_enough(self, replies: Aggregator, stats: RoundStats, least: int) -> None:
        if len(replies.clients) >= least:
            return
        raise NoUsableReply(
            f"round {self.server.round}: {len(replies.clients)} usable replies, {least} are needed "
            f"({stats.reasons() or 'no client had images'}); the state after round {self._kept} is kept"
        )

    def _timed_update(self, work: Callable[[], None]) -> float:
        """Call `work` on the server's thread, move the server's state to its device, and return the CPU seconds."""

        def update() -> float:
            began = time.thread_time()
            work()
            self.server.state = placed(self.server.state, self.server.device)
            return time.thread_time() - began

        return self.exchanger.thread.run(update)

    def _charges(self) -> int:
        return len(self.server.ledger.events) if self.server.ledger is not None else 0

    def _void_uncharged(self, before: int) -> None:
        """Record that no guarantee holds for clients that replied without a charge since the last call.

        Instead of the clients, the server may have charged all of them, once for each exchange, since the ledger had
        `before` events.
        """
        ledger, name = self.server.ledger, type(self.method.inner).__name__
        uncharged, self._uncharged = [clients for clients in self._uncharged if clients], []
        if ledger is None or not uncharged:
            return
        if sum(event.count for event in ledger.events[before:] if event.client == ALL_CLIENTS) >= len(uncharged):
            return
        for client in sorted(set().union(*uncharged)):
            text = f"the reply of round {self.server.round} was not charged ({name} is private)"
            ledger.void(text, client=client)

    def _keep_usable_state(self, before: Message) -> dict[str, Any]:
        """Return to the state `before` the round if the new one is unusable; return why as the column `discarded`."""
        number, server = self.server.round, self.server
        why = self.exchanger.thread.run(lambda: check_state(self.method, server))
        if why is None:
            return {}
        server.state = before
        self.exchanger.rollback()
        warn(f"round {number}: {why}; the state after round {self._kept} is kept, and the run goes on")
        return {"discarded": why}

    def _privacy_columns(self) -> dict[str, Any]:
        """Return the columns `epsilon` (None without a ledger) and `privacy` (epsilon, delta and its conditions)."""
        if self.server.ledger is None:
            return {"epsilon": None}
        guarantee = self.server.ledger.guarantee()
        return {"epsilon": guarantee.epsilon, "privacy": guarantee.info()}

    def _commit(self, number: int, row: Mapping[str, Any]) -> None:
        """Append the row, write the checkpoint, which alone makes the round count, and commit what clients stored."""
        if self.store is not None:
            self.store.append(row)
            metadata, changes = self.exchanger.transport.metadata(), self.exchanger.records.changes()
            if self.server.ledger is not None:
                metadata = {**metadata, "ledger": json.dumps(self.server.ledger.head)}
            self.store.commit(number, self.run_id, self.server.state, self.global_models(), metadata, changes)
        self.exchanger.commit()

    def global_models(self) -> dict[str, Tensors]:
        """Return the state dict of each global model, by the model's name, to be written to files."""
        models = self.exchanger.thread.run(lambda: self.method.predictors(self.server))
        return {name: dict(p.network.state_dict()) for name, p in models.items()}


def _require_json(notes: Mapping[str, Any]) -> None:
    for name, value in notes.items():
        try:
            json.dumps({name: value})
        except (TypeError, ValueError) as error:
            raise TypeError(
                f"server.notes[{name!r}] must be a JSON value, got {type(value).__name__}: {error}"
            ) from None
