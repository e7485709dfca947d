"""Rounds: messages out, replies checked, reduced and counted, tests, commit."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from distillkit import check
from distillkit.privacy import BudgetExhausted
from distillkit.rng import derive
from distillkit.sets import LabeledImages, StoredImages
from fl.engine import evaluation, history
from fl.engine.delivery import Post, weight
from fl.engine.placement import placed
from fl.engine.seam import Answer
from fl.engine.store import Store
from fl.message import Entry, Message, Tensors, sizes
from fl.method import Method, NoUsableReply
from fl.reduce import BadReply, Like, Reduced, Reducer, Schema, check_reply
from fl.sides import Interrupted

__all__ = ["Engine"]


class _Model:
    state = Entry[Tensors]("first")


class Engine:
    """Plays rounds between one server and its clients, of whom it sees letters and answers.

    Args:
        post: delivers the letters, and knows the method and the server.
        store: the run's folder, if it has one.
        test: the global test set, if there is one.
        run_id: the run's fingerprint, for its checkpoints.
        transcript: whether every message that the server sees is kept in the folder.

    Attributes:
        committed: the last completed round.
        say: is told in words how far a round is; a draw that is secret is not told.
    """

    def __init__(
        self,
        post: Post,
        store: Store | None,
        test: LabeledImages | StoredImages | None,
        *,
        run_id: str,
        transcript: bool = False,
    ) -> None:
        self.post, self.method, self.server, self.thread = post, post.method, post.server, post.thread
        for verb, schema in (("answer", "expect_answer"), ("evaluate", "expect_evaluation")):
            kind = type(self.method.inner)
            if getattr(kind, verb) is not getattr(Method, verb) and getattr(kind, schema) is getattr(Method, schema):
                raise ValueError(
                    f"{kind.__name__}.{verb} answers, but nothing says what the answer looks like: write {schema}"
                )
        self.store, self.run_id, self.committed = store, run_id, 0
        self.transcript = store if transcript else None
        self.say: Callable[[str], object] = lambda words: None
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
        if not self.method.asks:
            return
        reducer = Reducer(self.post.entries)
        bytes_up: dict[str, int] = {}
        failed: dict[str, str] = {}
        for answer, _, _ in self.post.exchange("answer", numbers, keeps=False):
            if answer.absent:
                continue
            reason = answer.error or self._fold(reducer, answer, setup=True)
            if reason is not None:
                failed[str(answer.client)] = reason
            elif answer.reply is not None:
                bytes_up.update({key: bytes_up.get(key, 0) + n for key, n in sizes(answer.reply).items()})
        self._enough(reducer, failed, min_replies)
        self._act(lambda: self.method.answered(self.server, reducer.result()))
        self.server.notes["setup"] = {"bytes_up": sum(bytes_up.values()), "up": bytes_up, "failed": failed}

    def _fold(self, reducer: Reducer, answer: Answer, setup: bool = False) -> str | None:
        """Check and fold one reply; return why it cannot be used, if so. Nothing of such a reply counts."""

        def work() -> str | None:
            method, server, number = self.method, self.server, answer.client
            schema = method.expect_answer(server, number) if setup else method.expect(server, number)
            try:
                reply = self._usable(answer, schema, setup)
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

    def _usable(self, answer: Answer, schema: Schema, setup: bool) -> Message:
        """The reply, and what the server derives from it, once all of it is checked."""
        entries = self.post.entries
        wrong = [k for k, n in answer.notes.items() if not isinstance(n, int | float) or not math.isfinite(n)]
        if wrong:
            raise BadReply(f"its note {wrong[0]!r} is no finite number")
        reply = check_reply(placed(answer.reply, self.server.device), entries, schema)
        further = Message() if setup else self.method.read_reply(self.server, reply)
        if not len(further):
            return reply
        derived = {key: Like(value) for key, value in further.items()}
        reply = Message.of({**dict(reply.items()), **dict(further.items())})
        return check_reply(reply, entries, {**schema, **derived})

    def _enough(self, reducer: Reducer, failed: Mapping[str, str], min_replies: int) -> None:
        if len(reducer.clients) >= min_replies:
            return
        why = "; ".join(f"client {k} {reason}" for k, reason in list(failed.items())[:5]) or "no client had images"
        raise NoUsableReply(
            f"round {self.server.round}: {len(reducer.clients)} usable replies, {min_replies} are needed ({why}); "
            f"the state after round {self.committed} is kept"
        )

    def _draw(self, participation: float | int) -> list[int]:
        count = self.server.clients
        if isinstance(participation, int) and not isinstance(participation, bool):
            wanted = check.positive_int(participation, "participation")
        else:
            share = check.real_number(participation, "participation", above=0.0, most=1.0)
            wanted = max(1, round(share * count))
        if wanted > count:
            raise ValueError(f"participation asks for {wanted} clients, but there are {count}")
        if wanted == count:
            return list(range(count))
        generator = derive(self.server.seed, self.server.round, "draw")
        chosen: set[int] = set()  # Floyd's algorithm: the cost is that of the clients drawn, not of all that exist
        for last in range(count - wanted, count):
            one = int(torch.randint(last + 1, (), generator=generator))
            chosen.add(last if one in chosen else one)
        return sorted(chosen)

    def round(self, number: int, participation: float | int, min_replies: int, evaluate: Any) -> dict[str, Any]:
        """Play one round, commit it, and return its row of the history. If it fails, the state is that of before.

        Args:
            number: the round, from 1.
            participation: how many clients are drawn: a number, or a share of them.
            min_replies: fewer usable replies than this end the run.
            evaluate: whose own test images are used: "drawn", "all", "none", or clients' numbers.

        Raises:
            NoUsableReply: a round left too little.
            BudgetExhausted: the round's releases would exceed the ledger's budget.
        """
        started, server, self.committed = time.perf_counter(), self.server, number - 1
        server.round, server.notes = number, server.notes if number == 1 else {}
        server.secret, self.post.resent = self.post.secret(), 0
        before = server.state.copy()
        try:
            hidden = self.method.draws_clients
            server.drawn = self.thread.run(lambda: self.method.draw(server)) if hidden else self._draw(participation)
            replies, row = self._exchange(0 if hidden else min_replies)
            row["server_seconds"] = self._act(partial(self.method.receive, server, replies))
            del replies
            row |= evaluation.on_server(self.post, self.test)
            row |= evaluation.on_clients(self.post, evaluate) | self._spent()
            row |= {"bytes_resent": self.post.resent} if self.post.resent else {}
            row = history.masked(row) if hidden else row
        except BaseException as error:
            server.state, server.round = before, self.committed
            self.post.drop()
            if isinstance(error, BudgetExhausted):
                kept = f"round {number} was not finished; the state after round {self.committed} is kept"
                raise BudgetExhausted(f"{error}; {kept}", fits=error.fits) from error
            raise
        if row["accuracy"] is None:
            own = row.get("accuracy_personal") or row.get("accuracy_clients")
            row["accuracy"] = own["mean"] if own else None
        row |= {f"note_{k}" if k in row else k: v for k, v in server.notes.items()}
        row["seconds"] = time.perf_counter() - started
        row = {"round": number, **row}
        self._commit(number, row)
        return row

    def _act(self, work: Callable[[], None]) -> float:
        """Let the method change the server's state, and put it on the server's device; returns CPU seconds."""

        def act() -> float:
            began = time.thread_time()
            work()
            self.server.state = placed(self.server.state, self.server.device)
            return time.thread_time() - began

        return self.thread.run(act)

    def _commit(self, number: int, row: dict[str, Any]) -> None:
        if self.store is not None:
            models = self.thread.run(lambda: self.method.predictors(self.server))
            states = {n: Message({_Model.state: dict(p.network.state_dict())}) for n, p in models.items()}
            self.store.append(row)
            facts, changes = self.post.cohort.facts(), self.post.known.changes()
            self.store.commit(number, self.run_id, self.server.state, states, facts, changes)
        self.post.settle()
        self.committed = number

    def _exchange(self, min_replies: int) -> tuple[Reduced, dict[str, Any]]:
        """Ask the drawn clients, check and fold their replies in order: the reduced replies, and the round's row."""
        server, post = self.server, self.post
        up: dict[str, int] = {}
        down: dict[str, int] = {}
        by_client: dict[str, list[int]] = {}
        failed: dict[str, str] = {}
        noted: dict[str, float] = {}
        empty: list[int] = []
        reducer, seconds = Reducer(post.entries), 0.0
        for i, (answer, letter, memory) in enumerate(post.exchange("local", server.drawn, keeps=True), start=1):
            number = answer.client
            if not self.method.draws_clients:
                self.say(f"client {i} of {len(server.drawn)}")
            if answer.absent:
                empty.append(number)
                continue
            seconds += answer.seconds
            if self.transcript is not None and letter is not None:
                self.transcript.record(server.round, number, "down", letter.message)
            reason, cost = answer.error or self._fold(reducer, answer), weight(letter)
            sent = sizes(answer.reply) if reason is None and answer.reply is not None else {}
            for total, part in ((down, cost), (up, sent)):
                for key, count in part.items():
                    total[key] = total.get(key, 0) + count
            by_client[str(number)] = [sum(sent.values()), sum(cost.values())]
            if reason is not None:
                failed[str(number)] = reason
                continue
            for key, count in answer.notes.items():
                noted[key] = noted.get(key, 0) + count
            if self.transcript is not None and answer.reply is not None:
                self.transcript.record(server.round, number, "up", answer.reply)
            post.known.told(number, letter, memory)
        self._enough(reducer, failed, min_replies)
        row = {
            "bytes_up": sum(up.values()),
            "bytes_down": sum(down.values()),
            "up": up,
            "down": down,
            "bytes_by_client": by_client,
            "drawn": server.drawn,
            "failed": failed,
            "empty": empty,
            **({"noted": noted} if noted else {}),
            "client_seconds": seconds,
            "server_seconds": 0.0,
        }
        return reducer.result(), row

    def _spent(self) -> dict[str, Any]:
        """What the ledger guarantees so far: epsilon for whoever paid most, and all that belongs to it."""
        if self.server.ledger is None:
            return {"epsilon": None}
        guarantee = self.server.ledger.guarantee()
        return {"epsilon": guarantee.epsilon, "privacy": guarantee.info()}
