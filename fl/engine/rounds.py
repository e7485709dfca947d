"""Rounds: messages out, replies checked, reduced and counted, tests, commit."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from distillkit import check
from distillkit.privacy import BudgetExhausted
from distillkit.rng import derive
from distillkit.sets import LabeledImages
from fl.engine import evaluation, history
from fl.engine.delivery import Holding, Post
from fl.engine.pool import Outcome, Pool
from fl.engine.store import Memories, Store
from fl.message import Entry, Message, Tensors, sizes
from fl.method import Client, Interrupted, Method, NoUsableReply, Server
from fl.reduce import BadReply, Like, Reducer, Schema, check_reply

__all__ = ["Engine"]


class _Model:
    state = Entry[Tensors]("first")


class Engine:
    """Moves messages between one server and its clients.

    Attributes:
        say: is told in words how far a round is; a draw that is secret is not told.
    """

    def __init__(
        self,
        method: Method,
        clients: Sequence[LabeledImages | Holding],
        server: Server,
        pool: Pool,
        store: Store | None,
        test: LabeledImages | None,
        *,
        run_id: str,
        transcript: bool = False,
        secret: int | None = None,
    ) -> None:
        for verb, schema in (("answer", "expect_answer"), ("evaluate", "expect_evaluation")):
            kind = type(method.inner)
            if getattr(kind, verb) is not getattr(Method, verb) and getattr(kind, schema) is getattr(Method, schema):
                raise ValueError(
                    f"{kind.__name__}.{verb} answers, but nothing says what the answer looks like: write {schema}"
                )
        self.method, self.server, self.pool, self.store = method, server, pool, store
        self.run_id, self.transcript = run_id, transcript
        self.say: Callable[[str], object] = lambda words: None
        self.test = test.to(server.device) if test is not None else None
        self.memories = store.memories if store is not None else Memories(None)
        self.post = Post(method, clients, server, self.memories, pool, secret)
        self.entries = self.post.entries

    # The setup round, and a round.

    def ask_setup(self, numbers: Sequence[int], min_replies: int) -> None:
        """Ask every client that has images once before round 1, if the method has a question."""
        if not self.method.asks:
            return

        def work(number: int) -> tuple[Client, Message | None]:
            client = self.post.client(number)
            if self.post.absent(client):
                return client, None
            return client, self.method.answer(client, self.post.message(number))

        reducer = Reducer(self.entries)
        bytes_up: dict[str, int] = {}
        failed: dict[str, str] = {}
        for number, outcome in zip(numbers, self.pool.run(numbers, work)):
            if outcome.error is None and self.post.absent(outcome.client):
                continue
            reason = outcome.error or self._fold(reducer, number, outcome, setup=True)
            if reason is not None:
                failed[str(number)] = reason
            elif outcome.reply is not None:
                bytes_up.update({key: bytes_up.get(key, 0) + n for key, n in sizes(outcome.reply).items()})
        self._enough(reducer, failed, min_replies)
        self.pool.on_server(lambda: self.method.answered(self.server, reducer.result()))
        self.server.notes["setup"] = {"bytes_up": sum(bytes_up.values()), "up": bytes_up, "failed": failed}

    def _fold(self, reducer: Reducer, number: int, outcome: Outcome, setup: bool = False) -> str | None:
        """Check and fold one reply; return why it cannot be used, if so. Nothing of such a reply counts."""

        def work() -> str | None:
            method, server = self.method, self.server
            schema = method.expect_answer(server, number) if setup else method.expect(server, number)
            try:
                reply = self._usable(outcome, schema, setup)
                reducer.require(reply)
            except BadReply as error:
                return str(error)[:300]
            except (Interrupted, BudgetExhausted):
                raise
            except Exception as error:  # what came is anything: however it fails, it is this reply that failed
                return f"cannot be used: {type(error).__name__}: {error}"[:300]
            reducer.fold(number, reply)
            return None

        return self.pool.on_server(work)

    def _usable(self, outcome: Outcome, schema: Schema, setup: bool) -> Message:
        """The reply, and what the server derives from it, once all of it is checked."""
        wrong = [k for k, n in outcome.client.notes.items() if not isinstance(n, int | float) or not math.isfinite(n)]
        if wrong:
            raise BadReply(f"its note {wrong[0]!r} is no finite number")
        reply = check_reply(outcome.reply, self.entries, schema)
        further = Message() if setup else self.method.read_reply(self.server, reply)
        if not len(further):
            return reply
        derived = {key: Like(value) for key, value in further.items()}
        reply = Message.of({**dict(reply.items()), **dict(further.items())})
        return check_reply(reply, self.entries, {**schema, **derived})

    def _enough(self, reducer: Reducer, failed: Mapping[str, str], min_replies: int) -> None:
        if len(reducer.clients) >= min_replies:
            return
        why = "; ".join(f"client {k} {reason}" for k, reason in list(failed.items())[:5]) or "no client had images"
        raise NoUsableReply(
            f"round {self.server.round}: {len(reducer.clients)} usable replies, {min_replies} are needed ({why}); "
            f"the state after round {self.post.committed} is kept"
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
        """Play one round, commit it, and return its row of the history."""
        started, server = time.perf_counter(), self.server
        self.post.committed = number - 1
        server.round, server.notes = number, server.notes if number == 1 else {}
        server.secret = self.post.secret_of("server")
        before = server.state.copy()
        try:
            hidden = self.method.draws_clients
            server.drawn = (
                self.pool.on_server(lambda: self.method.draw(server)) if hidden else self._draw(participation)
            )
            row = self._exchange(0 if hidden else min_replies)
            cpu = time.thread_time
            spent = self.pool.on_server(lambda: (cpu(), self.method.receive(server, row.pop("replies")), cpu()))
            row["server_seconds"] += spent[2] - spent[0]
            row |= evaluation.on_server(self.post, self.test)
            row |= evaluation.on_clients(self.post, evaluate) | self._spent()
            row = history.masked(row) if hidden else row
        except BaseException as error:
            server.state, server.round = before, self.post.committed
            self.memories.drop()
            if isinstance(error, BudgetExhausted):
                kept = f"round {number} was not finished; the state after round {self.post.committed} is kept"
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

    def _commit(self, number: int, row: dict[str, Any]) -> None:
        if self.store is not None:
            models = self.pool.on_server(lambda: self.method.predictors(self.server))
            states = {n: Message({_Model.state: dict(p.network.state_dict())}) for n, p in models.items()}
            self.store.append(row)
            self.store.commit(number, self.run_id, self.server.state, states)
        else:
            self.memories.settle(number)
        self.post.committed = number

    def _exchange(self, min_replies: int) -> dict[str, Any]:
        """Send to the drawn clients, run them, check and fold their replies in order."""
        server, method = self.server, self.method
        up: dict[str, int] = {}
        down: dict[str, int] = {}
        by_client: dict[str, list[int]] = {}
        failed: dict[str, str] = {}
        noted: dict[str, float] = {}
        empty: list[int] = []
        costs: dict[int, dict[str, int]] = {}

        def work(number: int) -> tuple[Client, Message | None]:
            client = self.post.client(number)
            if self.post.absent(client):
                return client, None
            message = self.post.message(number)
            costs[number] = self.post.down(message, client)
            if self.store is not None and self.transcript:
                self.store.record(server.round, number, "down", message)
            return client, method.local(client, message)

        reducer, seconds = Reducer(self.entries), 0.0
        for i, (number, outcome) in enumerate(zip(server.drawn, self.pool.run(server.drawn, work)), start=1):
            if not method.draws_clients:
                self.say(f"client {i} of {len(server.drawn)}")
            if outcome.error is None and self.post.absent(outcome.client):
                empty.append(number)
                continue
            seconds += outcome.seconds
            cost = costs.pop(number, {})
            reason = outcome.error or self._fold(reducer, number, outcome)
            sent = sizes(outcome.reply) if reason is None and outcome.reply is not None else {}
            for total, part in ((down, cost), (up, sent)):
                for key, count in part.items():
                    total[key] = total.get(key, 0) + count
            by_client[str(number)] = [sum(sent.values()), sum(cost.values())]
            if reason is not None:
                failed[str(number)] = reason
                continue
            for key, count in outcome.client.notes.items():
                noted[key] = noted.get(key, 0) + count
            if self.store is not None and self.transcript and outcome.reply is not None:
                self.store.record(server.round, number, "up", outcome.reply)
            if len(outcome.client.memory):
                self.memories.stage(number, outcome.client.memory, server.round)
        self._enough(reducer, failed, min_replies)
        return {
            "replies": reducer.result(),
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

    def _spent(self) -> dict[str, Any]:
        """What the ledger guarantees so far: epsilon for whoever paid most, and all that belongs to it."""
        if self.server.ledger is None:
            return {"epsilon": None}
        guarantee = self.server.ledger.guarantee()
        return {"epsilon": guarantee.epsilon, "privacy": guarantee.info()}
