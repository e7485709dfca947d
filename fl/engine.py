"""Rounds: messages out, replies checked, reduced and counted, tests, commit."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from distillkit import check
from distillkit.privacy import BudgetExhausted, Secret
from distillkit.rng import derive
from distillkit.sets import LabeledImages
from fl import history
from fl.cohort import Outcome, Pool
from fl.message import Entry, Message, Tensors, digest, sizes
from fl.method import Client, Method, NoUsableReply, Server
from fl.reduce import BadReply, Reducer, check_reply
from fl.store import Memories, Store

__all__ = ["Engine", "Holding", "holding"]

_DIGEST_BYTES = 16


@dataclass(frozen=True)
class Holding:
    """What one client holds: training images, and (optionally) its own test images."""

    train: LabeledImages
    test: LabeledImages | None = None


def holding(client: LabeledImages | Holding) -> Holding:
    """A client as a `Holding`; a bare set is training images without test images."""
    if isinstance(client, LabeledImages):
        return Holding(client)
    if not isinstance(client, Holding):
        raise TypeError(f"clients must hold LabeledImages or Holding objects, got {type(client).__name__}")
    return client


class _Kept:
    """The client's memory of which bodies of kept entries it holds: JSON, key -> digest."""

    digests = Entry[str]("first")


class _Model:
    state = Entry[Tensors]("first")


class Engine:
    """Moves messages between one server and its clients."""

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
        self.method, self.clients, self.server, self.pool, self.store = method, clients, server, pool, store
        self.run_id, self.transcript, self.secret = run_id, transcript, secret
        self.test = test.to(server.device) if test is not None else None
        self.memories = store.memories if store is not None else Memories(None)
        self.entries = {e.key: e for e in method.entries()}
        self._digests: dict[str, tuple[Any, str]] = {}
        self._committed = 0

    # One client.

    def _secret(self, owner: int | str) -> Secret:
        """Where the noise of a client, or of the server, comes from in this round."""
        if self.secret is None:
            return Secret()
        return Secret(int(torch.randint(2**62, (), generator=derive(self.secret, self.server.round, owner, "secret"))))

    def _client(self, number: int) -> Client:
        server, held = self.server, holding(self.clients[number])
        memory = self.memories.load(number, self._committed)
        return Client(
            number, held.train, held.test, server.task, server.round, server.seed,
            memory=memory, stop=self.pool.stop, device=server.device, ledger=server.ledger, secret=self._secret(number),
        )  # fmt: skip

    def _absent(self, client: Client) -> bool:
        """A client without images is not asked, unless that it has none is private."""
        return not self.method.private and not len(client.data)

    def _digest(self, key: str, value: Any) -> str:
        known = self._digests.get(key)
        if known is None or known[0] is not value:
            known = self._digests[key] = (value, digest(key, value))
        return known[1]

    def _message(self, number: int) -> Message:
        message = self.method.send(self.server, number)
        unknown = [key for key, _ in message.items() if key not in self.entries]
        if unknown:
            raise ValueError(f"{type(self.method).__name__} sends {unknown[0]}, which it does not declare")
        for key, value in message.items():
            if self.entries[key].kept:
                self._digest(key, value)
        return message

    def _down(self, message: Message, client: Client) -> dict[str, int]:
        """Bytes of the message to a client: of a kept entry that it holds, only the digest travels."""
        cost = sizes(message)
        held = json.loads(client.memory[_Kept.digests]) if _Kept.digests in client.memory else {}
        known = dict(held)
        for key, value in message.items():
            if not self.entries[key].kept:
                continue
            current = self._digest(key, value)
            if known.get(key) == current:
                cost = {k: n for k, n in cost.items() if k.split(":")[0] != key}
            cost[f"{key}:digest"] = _DIGEST_BYTES
            held[key] = current
        if held != known:
            client.memory[_Kept.digests] = json.dumps(held, sort_keys=True)
        return cost

    # The setup round, and a round.

    def ask_setup(self, numbers: Sequence[int], min_replies: int) -> None:
        """Ask every client that has images once before round 1, if the method has a question."""
        if not self.method.asks:
            return

        def work(number: int) -> tuple[Client, Message | None]:
            client = self._client(number)
            if self._absent(client):
                return client, None
            return client, self.method.setup(client, self.pool.on_server(lambda: self._message(number)))

        reducer = Reducer(self.entries)
        bytes_up: dict[str, int] = {}
        failed: dict[str, str] = {}
        for number, outcome in zip(numbers, self.pool.run(numbers, work)):
            if outcome.error is None and self._absent(outcome.client):
                continue
            reason = outcome.error or self._fold(reducer, number, outcome, expected=False)
            if reason is not None:
                failed[str(number)] = reason
            elif outcome.reply is not None:
                bytes_up.update({key: bytes_up.get(key, 0) + n for key, n in sizes(outcome.reply).items()})
        self._enough(reducer, failed, min_replies)
        self.pool.on_server(lambda: self.method.begin(self.server, reducer.result()))
        self.server.notes["setup"] = {"bytes_up": sum(bytes_up.values()), "up": bytes_up, "failed": failed}

    def _fold(self, reducer: Reducer, number: int, outcome: Outcome, expected: bool = True) -> str | None:
        """Check and fold one reply; return why it cannot be used, if so."""

        def work() -> str | None:
            schema = self.method.expect(self.server, number) if expected else {}
            try:
                reply = check_reply(outcome.reply, self.entries, schema)
                further = self.method.digest(self.server, reply)
                if len(further):
                    check_reply(further, self.entries, {})
                    reply = Message.of({**dict(reply.items()), **dict(further.items())})
            except BadReply as error:
                return str(error)
            reducer.fold(number, reply)
            return None

        return self.pool.on_server(work)

    def _enough(self, reducer: Reducer, failed: Mapping[str, str], min_replies: int) -> None:
        if len(reducer.clients) >= min_replies:
            return
        why = "; ".join(f"client {k} {reason}" for k, reason in list(failed.items())[:5]) or "no client had images"
        raise NoUsableReply(
            f"round {self.server.round}: {len(reducer.clients)} usable replies, {min_replies} are needed ({why}); "
            f"the state after round {self._committed} is kept"
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
        self._committed = number - 1
        server.round, server.notes = number, server.notes if number == 1 else {}
        server.secret = self._secret("server")
        before = server.state.copy()
        try:
            drawn = self.pool.on_server(lambda: self.method.draw(server))
            server.drawn = self._draw(participation) if drawn is None else drawn
            row = self._exchange(min_replies if drawn is None else 0)
            if drawn is not None:
                row |= {"drawn": None, "bytes_by_client": None}
            cpu = time.thread_time
            spent = self.pool.on_server(lambda: (cpu(), self.method.receive(server, row.pop("replies")), cpu()))
            row["server_seconds"] += spent[2] - spent[0]
            row |= self._test() | self._test_clients(evaluate) | self._spent()
        except BaseException as error:
            server.state, server.round = before, self._committed
            self.memories.drop()
            if isinstance(error, BudgetExhausted):
                kept = f"round {number} was not finished; the state after round {self._committed} is kept"
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
        self._committed = number

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
            client = self._client(number)
            if self._absent(client):
                return client, None
            message = self.pool.on_server(lambda: self._message(number))
            costs[number] = self._down(message, client)
            if self.store is not None and self.transcript:
                self.store.record(server.round, number, "down", message)
            return client, method.local(client, message)

        reducer, seconds = Reducer(self.entries), 0.0
        for number, outcome in zip(server.drawn, self.pool.run(server.drawn, work)):
            if outcome.error is None and self._absent(outcome.client):
                empty.append(number)
                continue
            seconds += outcome.seconds
            cost = costs.pop(number, {})
            sent = sizes(outcome.reply) if outcome.reply is not None else {}
            for total, part in ((down, cost), (up, sent)):
                for key, count in part.items():
                    total[key] = total.get(key, 0) + count
            by_client[str(number)] = [sum(sent.values()), sum(cost.values())]
            reason = outcome.error
            if reason is None:
                reason = self._fold(reducer, number, outcome)
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

    # Testing.

    def _test(self) -> dict[str, Any]:
        def work() -> dict[str, Tensor]:
            if self.test is None:
                return {}
            return {n: p.sums(self.test, self.server.task) for n, p in self.method.predictors(self.server).items()}

        return {"accuracy": None, "loss": None, **history.global_metrics(self.pool.on_server(work), self.server.task)}

    def _test_clients(self, evaluate: Any) -> dict[str, Any]:
        if evaluate == "none":
            return {}
        panel = {"drawn": self.server.drawn, "all": range(self.server.clients)}
        numbers = panel[evaluate] if isinstance(evaluate, str) else evaluate
        found: dict[str, list[float]] = {}
        tested = bytes_down = bytes_up = 0
        failed: dict[str, str] = {}

        def work(number: int) -> tuple[Client, Message | None]:
            client = self._client(number)
            if client.test is None:
                return client, None
            message = self.pool.on_server(lambda: self._message(number))
            known = client.memory.get(_Kept.digests)
            client.notes["bytes"] = sum(self._down(message, client).values())
            client.notes["new"] = client.memory.get(_Kept.digests) != known
            return client, self.method.evaluate(client, message)

        for number, outcome in zip(numbers, self.pool.run(numbers, work)):
            if outcome.error is not None:
                failed[str(number)] = outcome.error
                continue
            if outcome.client.test is None:
                continue
            tested += 1
            bytes_down += outcome.client.notes["bytes"]
            if outcome.client.notes["new"]:
                self.memories.stage(number, outcome.client.memory, self.server.round)
            bytes_up += sum(sizes(outcome.reply or Message()).values())
            for _, group in (outcome.reply or Message()).items():
                assert isinstance(group, dict)
                for name, sums in group.items():
                    found.setdefault(name, []).append(self.server.task.metrics(sums)["accuracy"])
        row: dict[str, Any] = {}
        for name, accuracies in found.items():
            row["accuracy_clients" if name == "global" else f"accuracy_{name}"] = history.clients_accuracy(accuracies)
        if tested:
            row |= {"bytes_down_evaluation": bytes_down, "bytes_up_evaluation": bytes_up}
        if failed:
            row["failed_evaluation"] = failed
        return row
