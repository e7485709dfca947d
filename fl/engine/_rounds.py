"""Execution of one round after another: draw clients, collect their replies, aggregate, evaluate, and save."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
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
from fl.engine._dispatch import Dispatcher
from fl.engine._replies import ReplyCollector, RoundStats
from fl.engine.store import Store
from fl.message import Entry, Message, Tensors
from fl.method import Method, NoUsableReply

__all__ = ["RoundRunner"]


class _Model:
    state = Entry[Tensors]("first")


class RoundRunner:
    """Runner of a run's rounds. It sends all requests to clients through its dispatcher.

    Args:
        dispatcher: sender of the requests. Its attributes `method` and `server` are the run's method and server.
        store: folder of the run; None if the run writes no files.
        test: the global test set; None if there is none.
        run_id: fingerprint of the run's options, which is stored in its checkpoints.
        transcript: whether to save, in the run's folder, every message that the server sends or accepts.

    Attributes:
        committed: index of the last completed round.
        collector: object that requests, validates and aggregates the clients' replies.
        on_row: function that is called with each row of the history, once the row is complete and its round committed.
    """

    def __init__(
        self,
        dispatcher: Dispatcher,
        store: Store | None,
        test: LabeledImages | StoredImages | None,
        *,
        run_id: str,
        transcript: bool = False,
    ) -> None:
        self.dispatcher, self.method, self.server = dispatcher, dispatcher.method, dispatcher.server
        for verb, schema in (("answer", "expect_answer"), ("evaluate", "expect_evaluation")):
            kind = type(self.method.inner)
            if getattr(kind, verb) is not getattr(Method, verb) and getattr(kind, schema) is getattr(Method, schema):
                raise ValueError(
                    f"{kind.__name__}.{verb} returns a reply, but the schema of this reply is missing: write {schema}"
                )
        require_exchanges(self.method)
        self.store, self.run_id, self.committed = store, run_id, 0
        self.collector = ReplyCollector(dispatcher, store if transcript else None)
        self.on_row: Callable[[dict[str, Any]], object] = lambda row: None
        self.test = placed(test, self.server.device)

    def start(self) -> None:
        """Let the method prepare the server's state before the first round (`Method.start`)."""
        self._update_state(lambda: self.method.start(self.server))

    def run_setup(self, clients: Sequence[int], min_replies: int) -> None:
        """Send the method's query to every client that has images, and collect the answers. Call this before round 1.

        Does nothing if the method has no query.
        """
        if not self.method.has_query:
            return
        stats, charged = RoundStats(), self._charges()
        reducer = self.collector.collect("answer", clients, stats)
        self._require_charges(reducer.clients, charged)
        self._require_enough(reducer, stats.reasons(), min_replies)
        self._update_state(lambda: self.method.receive_answers(self.server, reducer.result()))
        counted = ("bytes_up", "bytes_down", "up", "down", "failed")
        self.server.notes["setup"] = {key: value for key, value in stats.row([]).items() if key in counted}

    def run_round(self, number: int, participation: int, min_replies: int, evaluate: Any) -> None:
        """Run one round, commit it, and pass its row of the history to the function `on_row`.

        A failed round does not change the server's state.
        """
        started, server, self.committed = time.perf_counter(), self.server, number - 1
        server.round, server.notes = number, server.notes if number == 1 else {}
        server.secret, self.dispatcher.resent = self.dispatcher.secret(), 0
        before, charged = server.state.copy(), self._charges()
        try:
            hidden = self.method.draws_clients
            server.drawn = (
                self.dispatcher.thread.run(lambda: checked_draw(self.method, server))
                if hidden
                else self._draw(participation)
            )
            replies, stats = self._run_exchanges(0 if hidden else min_replies)
            row = stats.row(server.drawn)
            row["server_seconds"] += self._update_state(partial(self.method.receive, server, replies))
            self._require_charges(replies.clients, charged)
            del replies
            row |= self._check_state(before)
            row |= _evaluation.evaluate_global(self.dispatcher, self.test)
            row |= _evaluation.evaluate_clients(self.dispatcher, evaluate) | self._privacy_columns()
            row |= {"bytes_resent": self.dispatcher.resent} if self.dispatcher.resent else {}
            row = history.masked(row) if hidden else row
        except BaseException as error:
            server.state, server.round = before, self.committed
            self.dispatcher.rollback()
            if isinstance(error, BudgetExhausted):
                kept = f"round {number} was not finished; the state after round {self.committed} is kept"
                raise BudgetExhausted(f"{error}; {kept}", remaining=error.remaining) from error
            raise
        row |= {f"note_{k}" if k in row else k: v for k, v in server.notes.items()}
        row["seconds"] = time.perf_counter() - started
        row = history.with_tests({"round": number, **row}, {})
        self._commit(number, row)
        self.on_row(row)

    def _draw(self, wanted: int) -> list[int]:
        count = self.server.clients
        if wanted == count:
            return list(range(count))
        generator = derive(self.server.seed, self.server.round, "draw")
        chosen: set[int] = set()  # Floyd's algorithm: its cost depends on the number of drawn clients only
        for last in range(count - wanted, count):
            one = int(torch.randint(last + 1, (), generator=generator))
            chosen.add(last if one in chosen else one)
        return sorted(chosen)

    def _run_exchanges(self, min_replies: int) -> tuple[AggregatedReplies, RoundStats]:
        """Run all exchanges of the round (requests and replies) with the drawn clients."""
        method, server, stats = self.method, self.server, RoundStats()
        server.present, replies = list(server.drawn), None
        for verb in method.exchanges:
            after_local = replies is not None
            reducer = self.collector.collect(verb, list(server.present), stats, after_local=after_local)
            server.present, reduced = list(reducer.clients), reducer.result()
            if verb == "local":
                self._require_enough(reducer, stats.reasons(), min_replies)
                replies = reduced
            if len(method.exchanges) > 1:
                self._receive_in(verb, reduced, stats, after_local=replies is not None)
        assert replies is not None
        return replies, stats

    def _check_state(self, before: Message) -> dict[str, Any]:
        """Keep the state `before` the round if the new one is unusable; return the reason as the column `discarded`."""
        number, server = self.server.round, self.server
        why = self.dispatcher.thread.run(lambda: check_state(self.method, server))
        if why is None:
            return {}
        server.state = before
        self.dispatcher.rollback()
        warn(f"round {number}: {why}; the state after round {self.committed} is kept, and the run goes on")
        return {"discarded": why}

    def _receive_in(self, verb: str, reduced: AggregatedReplies, stats: RoundStats, *, after_local: bool) -> None:
        """Pass the aggregated replies of one exchange to the method (`Method.receive_exchange`).

        Clients that the method rejects are counted as failed, and get no more requests in this round.
        """
        rejected: dict[int, str] = {}
        try:
            work = partial(self.method.receive_exchange, self.server, verb, reduced)
            stats.server_seconds += self._update_state(
                lambda: rejected.update(checked_rejections(self.method, work(), self.server.drawn))
            )
        except NoUsableReply as error:
            reasons = f" ({stats.reasons()})" if stats.reasons() else ""
            raise NoUsableReply(
                f"round {self.server.round}: {error}{reasons}; the state after round {self.committed} is kept"
            ) from error
        for client, reason in rejected.items():
            stats.fail(verb, client, reason, after_local=after_local)
        self.server.present = [client for client in self.server.present if client not in rejected]

    def _require_enough(self, reducer: Aggregator, reasons: str, min_replies: int) -> None:
        if len(reducer.clients) >= min_replies:
            return
        raise NoUsableReply(
            f"round {self.server.round}: {len(reducer.clients)} usable replies, {min_replies} are needed "
            f"({reasons or 'no client had images'}); the state after round {self.committed} is kept"
        )

    def _update_state(self, work: Callable[[], None]) -> float:
        """Call `work` on the server's thread, and then move the server's state to the server's device."""

        def update() -> float:
            began = time.thread_time()
            work()
            self.server.state = placed(self.server.state, self.server.device)
            return time.thread_time() - began

        return self.dispatcher.thread.run(update)

    def _charges(self) -> int:
        return len(self.server.ledger.events) if self.server.ledger is not None else 0

    def _require_charges(self, clients: Sequence[int], before: int) -> None:
        """Record that no guarantee holds for clients whose replies a private method used without any charge."""
        ledger = self.server.ledger
        if not self.method.private or ledger is None:
            return
        charged = {event.client for event in ledger.events[before:]}
        for client in clients if ALL_CLIENTS not in charged else ():
            if str(client) not in charged:
                name, number = type(self.method.inner).__name__, self.server.round
                ledger.void(f"the reply of round {number} was not charged ({name} is private)", client=client)

    def _privacy_columns(self) -> dict[str, Any]:
        """Return the privacy guarantee so far, as columns of the round's row of the history.

        `epsilon` is the epsilon that the ledger states, or None in a run without a ledger. `privacy` describes the
        guarantee: epsilon, delta, and the conditions under which the guarantee holds.
        """
        if self.server.ledger is None:
            return {"epsilon": None}
        guarantee = self.server.ledger.guarantee()
        return {"epsilon": guarantee.epsilon, "privacy": guarantee.info()}

    def _commit(self, number: int, row: dict[str, Any]) -> None:
        """Complete a round: write its checkpoint and its row of the history, and commit what clients stored.

        Clients store memories and cached values. They become valid with the commit.
        """
        if self.store is not None:
            models = self.global_models()
            self.store.append(row)
            metadata, changes = self.dispatcher.transport.metadata(), self.dispatcher.cache_index.changes()
            if self.server.ledger is not None:
                metadata = {**metadata, "ledger": json.dumps(self.server.ledger.head)}
            self.store.commit(number, self.run_id, self.server.state, models, metadata, changes)
        self.dispatcher.commit()
        self.committed = number

    def global_models(self) -> dict[str, Message]:
        """Return the state dict of each global model as a message, by the model's name, to be written to files."""
        models = self.dispatcher.thread.run(lambda: self.method.predictors(self.server))
        return {n: Message({_Model.state: dict(p.network.state_dict())}) for n, p in models.items()}
