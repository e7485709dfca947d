"""Rounds: messages out, replies checked, reduced and counted, tests, commit."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from distillkit.privacy import BudgetExhausted
from distillkit.rng import derive
from distillkit.sets import LabeledImages, StoredImages
from fl.aggregation import AggregatedReplies, Aggregator, BadReply, EntrySpec, Schema, check_reply
from fl.engine import _evaluation, history
from fl.engine._devices import placed
from fl.engine._dispatch import Dispatcher
from fl.engine._evaluation import Tests
from fl.engine._round_stats import RoundStats
from fl.engine._transport import ClientRequest, ClientResult
from fl.engine.store import Store
from fl.message import Entry, Message, Tensors, payload_bytes
from fl.method import Method, NoUsableReply
from fl.participants import Interrupted

__all__ = ["RoundRunner"]


class _Model:
    state = Entry[Tensors]("first")


class RoundRunner:
    """Plays rounds between one server and its clients, of whom it sees requests and answers.

    Args:
        dispatcher: delivers the requests, and knows the method and the server.
        store: the run's folder, if it has one.
        test: the global test set, if there is one.
        run_id: the run's fingerprint, for its checkpoints.
        transcript: whether every message that the server sees is kept in the folder.

    Attributes:
        committed: the last completed round.
        say: is told in words how far a round is; a draw that is secret is not told.
        told: gets every round's row of the history, once it is whole and the round committed.
        open: the last completed round's row, while its clients' tests are still to come.
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
        self.dispatcher, self.method, self.server, self.thread = (
            dispatcher,
            dispatcher.method,
            dispatcher.server,
            dispatcher.thread,
        )
        for verb, schema in (("answer", "expect_answer"), ("evaluate", "expect_evaluation")):
            kind = type(self.method.inner)
            if getattr(kind, verb) is not getattr(Method, verb) and getattr(kind, schema) is getattr(Method, schema):
                raise ValueError(
                    f"{kind.__name__}.{verb} answers, but nothing says what the answer looks like: write {schema}"
                )
        self.store, self.run_id, self.committed = store, run_id, 0
        self.transcript = store if transcript else None
        self.say: Callable[[str], object] = lambda words: None
        self.told: Callable[[dict[str, Any]], object] = lambda row: None
        self.open: dict[str, Any] | None = None
        self.test = placed(test, self.server.device)

    def start(self) -> None:
        """Prepare the server's state before the first round."""
        self._act(lambda: self.method.start(self.server))

    # The setup round, and a round.

    def ask_setup(self, numbers: Sequence[int], min_replies: int) -> None:
        """Ask every client that has images once before round 1, if the method has a question.

        Args:
            numbers: all clients.
            min_replies: fewer usable answers than this end the run.

        Raises:
            NoUsableReply: there are fewer.
        """
        if not self.method.has_query:
            return
        reducer, stats = Aggregator(self.dispatcher.entries), RoundStats()
        for answer, request, _ in self.dispatcher.exchange("answer", numbers, keeps=False):
            if answer.absent:
                continue
            reason = self._take(reducer, stats, answer, request, "answer")
            if reason is not None:
                stats.failed[str(answer.client)] = reason
        self._enough(reducer, stats.reasons(), min_replies)
        self._act(lambda: self.method.receive_answers(self.server, reducer.result()))
        counted = ("bytes_up", "bytes_down", "up", "down", "failed")
        self.server.notes["setup"] = {key: value for key, value in stats.row([]).items() if key in counted}

    def _take(
        self, reducer: Aggregator, stats: RoundStats, answer: ClientResult, request: ClientRequest | None, verb: str
    ) -> str | None:
        """Check and fold one reply, count it and its request, and keep both in a transcript; why not, if unusable."""
        number = answer.client
        if self.transcript is not None and request is not None:
            self.transcript.record(self.server.round, number, "down", request.message, verb)
        reason = answer.error or self._fold(reducer, answer, verb)
        sent = payload_bytes(answer.reply) if reason is None and answer.reply is not None else {}
        stats.count(number, sent, self.dispatcher.weight(request, number))
        if self.transcript is not None and reason is None and answer.reply is not None:
            self.transcript.record(self.server.round, number, "up", answer.reply, verb)
        return reason

    def _fold(self, reducer: Aggregator, answer: ClientResult, verb: str) -> str | None:
        """Check and fold one reply; return why it cannot be used, if so. Nothing of such a reply counts."""

        def work() -> str | None:
            method, server, number = self.method, self.server, answer.client
            if verb == "answer":
                schema = method.expect_answer(server, number)
            else:
                local = verb == "local"
                schema = method.expect(server, number) if local else method.expect_exchange(server, verb, number)
            try:
                reply = self._usable(answer, schema, verb)
                reducer.require(reply)
            except BadReply as error:
                return str(error)[:300]
            except (Interrupted, BudgetExhausted):
                raise
            except Exception as error:  # what came is anything: however it fails, it is this reply that failed
                return f"cannot be used: {type(error).__name__}: {error}"[:300]
            reducer.fold(number, reply)
            return None

        return self.thread.run(work)

    def _usable(self, answer: ClientResult, schema: Schema, verb: str) -> Message:
        """The reply, and what the server derives from it, once all of it is checked."""
        entries = self.dispatcher.entries
        wrong = [k for k, n in answer.notes.items() if not isinstance(n, int | float) or not math.isfinite(n)]
        if wrong:
            raise BadReply(f"its note {wrong[0]!r} is no finite number")
        reply = check_reply(placed(answer.reply, self.server.device), entries, schema)
        further = self.method.read_reply(self.server, reply) if verb == "local" else Message()
        if not len(further):
            return reply
        derived = {key: EntrySpec(value) for key, value in further.items()}
        reply = Message.unchecked({**dict(reply.items()), **dict(further.items())})
        return check_reply(reply, entries, {**schema, **derived})

    def _enough(self, reducer: Aggregator, why: str, min_replies: int) -> None:
        if len(reducer.clients) >= min_replies:
            return
        raise NoUsableReply(
            f"round {self.server.round}: {len(reducer.clients)} usable replies, {min_replies} are needed "
            f"({why or 'no client had images'}); the state after round {self.committed} is kept"
        )

    def _draw(self, wanted: int) -> list[int]:
        count = self.server.clients
        if wanted == count:
            return list(range(count))
        generator = derive(self.server.seed, self.server.round, "draw")
        chosen: set[int] = set()  # Floyd's algorithm: the cost is that of the clients drawn, not of all that exist
        for last in range(count - wanted, count):
            one = int(torch.randint(last + 1, (), generator=generator))
            chosen.add(last if one in chosen else one)
        return sorted(chosen)

    def round(self, number: int, participation: int, min_replies: int, evaluate: Any, *, defer: bool = False) -> None:
        """Play one round, commit it, and tell its row of the history. If it fails, the state is that of before.

        If the row of the round before is open, its clients' tests travel with this round's first messages.

        Args:
            number: the round, from 1.
            participation: how many clients are drawn, as `door.drawn_count` gives it.
            min_replies: fewer usable replies than this end the run.
            evaluate: whose own test images are used: "drawn", "all", "none", or clients' numbers.
            defer: leave the row open, for clients to be tested with the next round's messages.

        Raises:
            NoUsableReply: a round left too little.
            BudgetExhausted: the round's releases would exceed the ledger's budget.
        """
        started, server, self.committed = time.perf_counter(), self.server, number - 1
        server.round, server.notes = number, server.notes if number == 1 else {}
        server.secret, self.dispatcher.resent = self.dispatcher.secret(), 0
        before = server.state.copy()
        tests = Tests.after(self.dispatcher, self.open, evaluate) if self.open is not None else None
        try:
            hidden = self.method.draws_clients
            server.drawn = self.thread.run(lambda: self.method.draw(server)) if hidden else self._draw(participation)
            replies, row = self._exchanges(0 if hidden else min_replies, tests)
            row["server_seconds"] += self._act(partial(self.method.receive, server, replies))
            del replies
            row |= _evaluation.on_server(self.dispatcher, self.test)
            mine = Tests(self.dispatcher, server, "none" if defer else evaluate)
            mine.exchange()
            row |= mine.found() | self._spent()
            resent = self.dispatcher.resent + mine.resent
            row |= {"bytes_resent": resent} if resent else {}
            row = history.masked(row) if hidden else row
        except BaseException as error:
            server.state, server.round = before, self.committed
            self.dispatcher.rollback()
            if tests is not None and tests.over and isinstance(error, Exception):
                self._close(tests.completed())
            if isinstance(error, BudgetExhausted):
                kept = f"round {number} was not finished; the state after round {self.committed} is kept"
                raise BudgetExhausted(f"{error}; {kept}", remaining=error.remaining) from error
            raise
        row |= {f"note_{k}" if k in row else k: v for k, v in server.notes.items()}
        row["seconds"] = time.perf_counter() - started
        row = {"round": number, **row}
        whole = [tests.completed()] if tests is not None else []
        whole += [] if defer else [history.with_tests(row, {})]
        self._commit(number, whole, row if defer else None)
        for one in whole:
            self.told(one)

    def close(self, evaluate: Any) -> None:
        """Have clients tested (`evaluate`, as in `round`) whose tests were to come with a round that is not played."""
        if self.open is not None:
            tests = Tests.after(self.dispatcher, self.open, evaluate)
            tests.exchange()
            self._close(tests.completed())

    def _close(self, row: dict[str, Any]) -> None:
        self.open = None
        if self.store is not None:
            self.store.close(row)
        self.told(row)

    def _act(self, work: Callable[[], None]) -> float:
        """Let the method change the server's state, and put it on the server's device; returns CPU seconds."""

        def act() -> float:
            began = time.thread_time()
            work()
            self.server.state = placed(self.server.state, self.server.device)
            return time.thread_time() - began

        return self.thread.run(act)

    def _commit(self, number: int, rows: list[dict[str, Any]], open_row: dict[str, Any] | None) -> None:
        if self.store is not None:
            models = self.thread.run(lambda: self.method.predictors(self.server))
            states = {n: Message({_Model.state: dict(p.network.state_dict())}) for n, p in models.items()}
            for row in rows:
                self.store.append(row)
            facts, changes = self.dispatcher.transport.metadata(), self.dispatcher.known.changes()
            self.store.commit(number, self.run_id, self.server.state, states, facts, changes, open_row)
        self.dispatcher.commit()
        self.committed, self.open = number, open_row

    def _exchanges(self, min_replies: int, tests: Tests | None) -> tuple[AggregatedReplies, dict[str, Any]]:
        """Play the round's exchanges with the drawn clients: the reduced replies of `local`, and the round's row."""
        method, server, stats = self.method, self.server, RoundStats()
        server.present, replies = list(server.drawn), None
        for verb in method.exchanges:
            reducer = self._ask(verb, stats, tests, folded=replies is not None)
            if tests is not None:
                tests.over, tests = True, None
            server.present, found = list(reducer.clients), reducer.result()
            if verb == "local":
                self._enough(reducer, stats.reasons(), min_replies)
                replies = found
            if len(method.exchanges) > 1:
                self._receive_in(verb, found, stats, folded=replies is not None)
        if replies is None:
            raise ValueError(f"{type(method).__name__}.exchanges must hold 'local', got {method.exchanges}")
        return replies, stats.row(server.drawn)

    def _receive_in(self, verb: str, found: AggregatedReplies, stats: RoundStats, *, folded: bool) -> None:
        """Let the method take the answers of one exchange; whom it rejects is asked nothing more."""
        rejected: dict[int, str] = {}
        try:
            work = partial(self.method.receive_exchange, self.server, verb, found)
            stats.server_seconds += self._act(lambda: rejected.update(work()))
        except NoUsableReply as error:
            why = f" ({stats.reasons()})" if stats.reasons() else ""
            raise NoUsableReply(
                f"round {self.server.round}: {error}{why}; the state after round {self.committed} is kept"
            ) from error
        for client, reason in rejected.items():
            stats.fail(verb, client, reason, folded=folded)
        self.server.present = [client for client in self.server.present if client not in rejected]

    def _ask(self, verb: str, stats: RoundStats, tests: Tests | None, *, folded: bool) -> Aggregator:
        """Ask the clients that are present, check and fold their replies in order, and count what it cost."""
        server, dispatcher, reducer = self.server, self.dispatcher, Aggregator(self.dispatcher.entries)
        asked = list(server.present)
        exchange = dispatcher.exchange(verb, asked, keeps=verb == "local", bundled=tests.bundled() if tests else None)
        for i, (answer, request, memory) in enumerate(exchange, start=1):
            number = answer.client
            if not self.method.draws_clients:
                self.say(f"client {i} of {len(asked)}" + ("" if verb == "local" else f", {verb}"))
            if answer.absent:
                stats.empty.append(number)
                continue
            stats.seconds += answer.seconds
            reason = self._take(reducer, stats, answer, request, verb)
            if reason is not None:
                stats.fail(verb, number, reason, folded=folded)
                continue
            stats.note(answer.notes)
            dispatcher.known.update(number, request, memory)
        return reducer

    def _spent(self) -> dict[str, Any]:
        """What the ledger guarantees so far: epsilon for whoever paid most, and all that belongs to it."""
        if self.server.ledger is None:
            return {"epsilon": None}
        guarantee = self.server.ledger.guarantee()
        return {"epsilon": guarantee.epsilon, "privacy": guarantee.info()}
