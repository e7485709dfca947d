"""Clients on Flower's nodes, as the rounds see them: the seam's third implementation."""

from __future__ import annotations

import contextlib
import json
import secrets
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

from distillkit._sanity_checks import warn
from distillkit.privacy import BudgetExhausted, Ledger
from distillkit.privacy._child_ledger import child_state
from fl._codec import Parts, from_parts, to_parts
from fl.deploy._wire import Job, read_answer
from fl.deploy.flower._handshake import Roll
from fl.deploy.flower._ledger_mirror import asked_of, enter, exhausted
from fl.deploy.flower._messages_in_flight import Mail, unanswered
from fl.deploy.flower._node_discovery import Met, call_roll
from fl.deploy.flower._requests import Question, Take, pack, unpack
from fl.engine._failures import reason_of
from fl.engine._transport import BundledExchange, ClientResult, RequestBuilder, RequestHeader
from fl.engine.store import write_atomically
from fl.message import Message
from fl.method import NoUsableReply
from fl.participants import Interrupted

__all__ = ["GridTransport", "Terms"]

_GRACE = 30.0
"""Seconds that an answer may take on its way after its client's deadline."""

_READING = 60.0
"""Seconds in which a node says what its ledger holds, after an exchange; who does not will with the next answer."""


@dataclass(frozen=True)
class Terms:
    """How clients are asked.

    Attributes:
        classes: how many classes there are.
        deadline: seconds that a client has for an answer, from the making of its message on.
        at_once: how many clients have a message at a time.
        wait: seconds in which all have said what was charged to their data before the run.
    """

    classes: int
    deadline: float
    at_once: int
    wait: float


class GridTransport:
    """A cohort of Flower's nodes. See `Transport` for what the rounds see of it.

    A node that was restarted is found again before the next exchange, by the partition that it says it is. Nothing is
    told to nodes between the rounds: every letter names the version of the memory that counts.

    Args:
        mail: to the nodes.
        roll: the nodes by client.
        met: the nodes that have said who they are.
        terms: how clients are asked.
        ledger: of a private run, which mirrors those of the nodes.
        out: a folder that the run keeps, for its name; None for a run that cannot go on.
    """

    def __init__(
        self,
        mail: Mail,
        roll: Roll,
        met: Met,
        terms: Terms,
        ledger: Ledger | None = None,
        out: Path | None = None,
    ) -> None:
        self._mail, self._roll, self._met, self._terms, self._ledger = mail, roll, met, terms, ledger
        self._unsaid: set[int] = set()
        self._run = _name(out)
        self._asked: dict[int, list[Question]] = {}
        self._done: dict[int, ClientResult | BudgetExhausted] = {}

    def exchange(
        self,
        head: RequestHeader,
        clients: Sequence[int],
        build_request: RequestBuilder,
        bundled: BundledExchange | None = None,
    ) -> Iterator[ClientResult]:
        """Ask the `clients`, each told `head` and what `build_request` writes; see `Transport.exchange`.

        A client that is in the `bundled` exchange too gets both requests in one message; a client that is only in the
        bundled exchange gets a message of its own.
        """
        for misfit in call_roll(self._mail, self._roll, self._met, min(self._terms.deadline, _GRACE)):
            warn(f"{misfit}; the run goes on without it")
        here, there = set(clients), set(bundled.clients) if bundled is not None else set[int]()
        waiting: deque[int] = deque()
        rest = iter(sorted(here | there) if there else clients)
        while True:
            while len(waiting) < self._terms.at_once and (number := next(rest, None)) is not None:
                waiting.append(number)
                rides = (
                    [(bundled.header, bundled.build_request, bundled.on_result)]
                    if bundled is not None and number in there
                    else []
                )
                self._begin(number, [*rides, *([(head, build_request, None)] if number in here else [])])
            if not waiting:
                break
            while waiting[0] in self._asked:
                self._listen()
            number = waiting.popleft()
            if number in here:
                found = self._done.pop(number)
                if isinstance(found, BudgetExhausted):
                    raise found
                yield found
        self._read_ledgers(self._unsaid, _READING)
        self._unsaid.clear()  # who still does not say will with the next answer

    def _begin(self, client: int, questions: Sequence[tuple[RequestHeader, RequestBuilder, Take | None]]) -> None:
        asked = []
        for head, build_request, take in questions:
            try:
                known = None if self._ledger is None else child_state(self._ledger, client)
                asked.append(Question(Job(head, client, build_request(client), known), take))
            except (Interrupted, BudgetExhausted):
                raise
            except Exception as error:  # as where clients are threads: what fails for a client is its failure
                self._give(take, client, ClientResult(client, error=reason_of(error)))
        if asked:
            self._send(client, asked)

    def _send(self, client: int, asked: list[Question], whole: bool = False) -> None:
        terms, hello = self._terms, self._roll.guests[client]
        place = {
            "run": self._run, "classes": terms.classes, "deadline": terms.deadline,
            "ledger": asked_of(self._ledger, hello),
        }  # fmt: skip
        self._unsaid.add(client)
        self._asked[client], parts = pack(asked, {"place": json.dumps(place)}, whole=whole)
        job = asked[-1].job
        kind = "train.job" if job.header.keeps else "query.job"
        if self._mail.send(kind, {client: (hello.node, parts)}, str(job.header.round), self._patience(asked)):
            self._end(client, f"could not be told anything: Flower did not take the message to node {hello.node}")

    def _patience(self, asked: Sequence[Question]) -> float:
        return len(asked) * self._terms.deadline + _GRACE

    def _give(self, take: Take | None, client: int, found: ClientResult | BudgetExhausted) -> None:
        if take is None:
            self._done[client] = found
        elif isinstance(found, BudgetExhausted):
            raise found
        else:
            take(found)

    def _end(self, client: int, why: str) -> None:
        for one in self._asked.pop(client):
            self._give(one.take, client, ClientResult(client, error=why[:500]))

    def _listen(self) -> None:
        for client, message in self._mail.collect():
            asked = self._asked[client]
            if message is None or message.has_error():
                self._end(client, unanswered(message, self._patience(asked)))
                continue
            try:
                found = unpack(asked, self._mail.read(message))
            except ValueError as error:
                self._end(client, f"sent what cannot be read: {error}")
                continue
            del self._asked[client]
            self._hear(client, asked, [self._read(one, parts) for one, parts in zip(asked, found, strict=True)])

    def _hear(
        self, client: int, asked: Sequence[Question], found: Sequence[ClientResult | BudgetExhausted | None]
    ) -> None:
        """Hand on what was answered; whoever lacks a body is sent it, with what it was asked."""
        last = found[-1]
        both = len(found) > 1 and not (isinstance(last, ClientResult) and last.absent)
        for one, answer in zip(asked, found, strict=True):
            if isinstance(answer, ClientResult):
                answer = replace(answer, resent=one.resent or 0, spared=one.common if both else 0)
            if answer is not None:
                self._give(one.take, client, answer)
        lacking = [one for one, answer in zip(asked, found, strict=True) if answer is None]
        if lacking:
            self._send(client, [one.again() for one in lacking], whole=True)

    def _read(self, asked: Question, parts: Parts) -> ClientResult | BudgetExhausted | None:
        """What the client answered; None if it lacks a body."""
        job = asked.job
        try:
            reply, facts = from_parts(*parts)
            if self._ledger is not None and "account" in facts:
                enter(self._ledger, self._roll.guests[job.client], facts)
                self._unsaid.discard(job.client)
            if "refused" in facts:
                return ClientResult(job.client, error=f"refused: {facts['refused']}"[:500])
            if "exhausted" in facts and self._ledger is not None and self._ledger.budget is not None:
                return exhausted(facts)
            if "lacking" in facts:
                if asked.resent is not None:
                    raise ValueError("it lacks a body that was sent whole")
                return None
            if self._ledger is not None and "account" not in facts:
                raise ValueError("it does not say what it charged")
            version, answer, _ = read_answer(reply, facts)
            if (version, answer.client) != (job.header.version, job.client):
                raise ValueError(f"it answers {version} of client {answer.client}, and was asked {job.header.version}")
        except ValueError as error:
            return ClientResult(job.client, error=f"sent what cannot be read: {error}"[:500])
        return answer

    def _read_ledgers(self, clients: Collection[int], seconds: float) -> None:
        """Take over what nodes have charged and not said: before this run, or for answers that were lost."""
        if self._ledger is None or not clients:
            return
        letters = {}
        for client in sorted(clients):
            hello = self._roll.guests[client]
            asked = {"ledger": json.dumps(asked_of(self._ledger, hello))}
            letters[client] = (hello.node, to_parts(Message(), asked))
        left = set(letters) - set(self._mail.send("query.hello", letters, "ledger", seconds))
        while left:
            for client, message in self._mail.collect():
                left.discard(client)
                if message is not None and not message.has_error():
                    with contextlib.suppress(ValueError):  # it is still unsaid
                        _, facts = from_parts(*self._mail.read(message))
                        enter(self._ledger, self._roll.guests[client], facts)
                        self._unsaid.discard(client)

    # Between the rounds, and the end.

    def commit(self, versions: Mapping[int, str]) -> None:
        """Nothing: the next letter names the `versions`. See `Transport.commit`."""

    def rollback(self) -> None:
        """Wait for nothing of the failed round; what it left on nodes is never named. See `Transport.rollback`."""
        self._mail.forget()
        self._asked.clear()
        self._done.clear()

    def metadata(self) -> dict[str, str]:
        """The name under which nodes keep what belongs to this run; Flower's own number changes when it goes on."""
        return {"run": self._run}

    def restore(self, facts: Mapping[str, str], versions: Mapping[int, str]) -> None:
        """Go on under the name in `facts`; the `versions` stand in the next letters. See `Transport.restore`."""
        self._run = facts.get("run", self._run)

    def __enter__(self) -> Self:
        """Read the nodes' ledgers in a private run: what they paid before belongs to its epsilon.

        Raises:
            NoUsableReply: a node does not say.
        """
        self._unsaid = set(self._roll.guests)
        self._read_ledgers(self._unsaid, self._terms.wait)
        if self._ledger is not None and self._unsaid:
            raise NoUsableReply(
                f"the nodes of partitions {sorted(self._unsaid)[:10]} do not say what was charged to their data "
                "before: look into their logs"
            )
        return self

    def __exit__(self, *_: Any) -> None:
        """Wait for nothing any more."""
        self.rollback()


def _name(out: Path | None) -> str:
    """A new name for a run, or that of the run in a folder that died before its first commit: it takes its place."""
    drawn = secrets.token_hex(8)
    if out is None:
        return drawn
    path = out / "flower.run"
    if not path.exists():
        write_atomically(path, drawn.encode())
    return path.read_text()
