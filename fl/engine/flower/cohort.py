"""Clients on Flower's nodes, as the rounds see them: the seam's third implementation."""

from __future__ import annotations

import json
import secrets
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

from distillkit.plausible import warn
from distillkit.privacy import BudgetExhausted
from fl.codec import from_parts
from fl.engine.blame import reason_of
from fl.engine.flower.arrivals import Met, call_roll
from fl.engine.flower.hello import Roll
from fl.engine.flower.mail import Mail, unanswered
from fl.engine.flower.records import from_records
from fl.engine.seam import Answer, Head, Tell
from fl.engine.wire import Job, job_parts, read_answer
from fl.message import Message, sizes
from fl.sides import Interrupted

__all__ = ["GridCohort", "Terms"]

_GRACE = 30.0
"""Seconds that an answer may take on its way after its client's deadline."""


@dataclass(frozen=True)
class Terms:
    """How clients are asked.

    Attributes:
        classes: how many classes there are.
        deadline: seconds that a client has for an answer, from the making of its message on.
        at_once: how many clients have a message at a time.
    """

    classes: int
    deadline: float
    at_once: int


class GridCohort:
    """A cohort of Flower's nodes. See `Cohort` for what the rounds see of it.

    A node that was restarted is found again before the next exchange, by the partition that it says it is. Nothing is
    told to nodes between the rounds: every letter names the version of the memory that counts.

    Args:
        mail: to the nodes.
        roll: the nodes by client.
        met: the nodes that have said who they are.
        terms: how clients are asked.
    """

    def __init__(self, mail: Mail, roll: Roll, met: Met, terms: Terms) -> None:
        self._mail, self._roll, self._met, self._terms = mail, roll, met, terms
        self._run = secrets.token_hex(8)
        self._asked: dict[int, Job] = {}
        self._done: dict[int, Answer] = {}
        self._resent: dict[int, int] = {}

    def ask(self, head: Head, numbers: Sequence[int], tell: Tell) -> Iterator[Answer]:
        """Ask the clients `numbers`, each told `head` and what `tell` writes; see `Cohort.ask`."""
        for misfit in call_roll(self._mail, self._roll, self._met, min(self._terms.deadline, _GRACE)):
            warn(f"{misfit}; the run goes on without it")
        waiting: deque[int] = deque()
        rest = iter(numbers)
        while True:
            while len(waiting) < self._terms.at_once and (number := next(rest, None)) is not None:
                waiting.append(number)
                self._begin(head, number, tell)
            if not waiting:
                return
            while waiting[0] not in self._done:
                self._listen()
            yield self._done.pop(waiting.popleft())

    def _begin(self, head: Head, client: int, tell: Tell) -> None:
        try:
            job = Job(head, client, tell(client))
        except (Interrupted, BudgetExhausted):
            raise
        except Exception as error:  # as where clients are threads: what fails for a client is its failure
            self._done[client] = Answer(client, error=reason_of(error))
            return
        self._asked[client] = job
        self._send(job)

    def _send(self, job: Job, whole: bool = False) -> None:
        terms, hello = self._terms, self._roll.guests[job.client]
        place = {"run": self._run, "classes": terms.classes, "deadline": terms.deadline}
        parts = job_parts(job, {"place": json.dumps(place)}, whole=whole)
        kind = "train.job" if job.head.keeps else "query.job"
        if self._mail.send(kind, {job.client: (hello.node, parts)}, str(job.head.round), terms.deadline + _GRACE):
            self._end(job.client, f"could not be told anything: Flower did not take the message to node {hello.node}")

    def _end(self, client: int, why: str) -> None:
        del self._asked[client]
        self._done[client] = Answer(client, error=why[:500])

    def _listen(self) -> None:
        for client, message in self._mail.collect():
            job = self._asked[client]
            if message is None or message.has_error():
                self._end(client, unanswered(message, self._terms.deadline + _GRACE))
            else:
                try:
                    self._hear(job, *from_parts(*from_records(message.content)))
                except ValueError as error:
                    self._end(client, f"sent what cannot be read: {error}")

    def _hear(self, job: Job, reply: Message, facts: Mapping[str, str]) -> None:
        if "refused" in facts:
            return self._end(job.client, f"refused: {facts['refused']}")
        if "lacking" in facts:
            if job.client in self._resent:
                raise ValueError("it lacks a body that was sent whole")
            costs = sizes(job.letter.message).items()
            self._resent[job.client] = sum(n for key, n in costs if key.split(":")[0] in job.letter.held)
            return self._send(job, whole=True)
        version, answer, _ = read_answer(reply, facts)
        if (version, answer.client) != (job.head.version, job.client):
            raise ValueError(f"it answers {version} of client {answer.client}, and was asked {job.head.version}")
        del self._asked[job.client]
        self._done[job.client] = replace(answer, resent=self._resent.pop(job.client, 0))
        return None

    # Between the rounds, and the end.

    def settle(self, versions: Mapping[int, str]) -> None:
        """Nothing: the next letter names the `versions`. See `Cohort.settle`."""

    def drop(self) -> None:
        """Wait for nothing of the failed round; what it left on nodes is never named. See `Cohort.drop`."""
        self._mail.forget()
        for found in (self._asked, self._done, self._resent):
            found.clear()

    def facts(self) -> dict[str, str]:
        """The name under which nodes keep what belongs to this run; Flower's own number changes when it goes on."""
        return {"run": self._run}

    def restore(self, facts: Mapping[str, str], versions: Mapping[int, str]) -> None:
        """Go on under the name in `facts`; the `versions` stand in the next letters. See `Cohort.restore`."""
        self._run = facts.get("run", self._run)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: Any) -> None:
        """Wait for nothing any more."""
        self.drop()
