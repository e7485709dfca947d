"""What passes between the server and its clients: letters out, answers in, what each weighs, what a client then has."""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from distillkit.privacy import BudgetExhausted, Secret
from fl._codec import digest
from fl.engine._client_cache_index import Known
from fl.engine._failures import Unsent
from fl.engine._server_thread import ServerThread
from fl.engine._transport import Answer, Cohort, Head, Letter, Riding, Tell, noise_of
from fl.engine.store import Restored
from fl.message import sizes
from fl.method import Method
from fl.participants import Interrupted, Server

__all__ = ["Post"]

_DIGEST_BYTES = 16


class Post:
    """The server's half of every exchange: writes letters, has them delivered, and hands on the answers.

    One for a run. A round may have several exchanges, one after the other: training, then a test, say.

    Args:
        method: says what every client is told (`send`).
        server: its side of the run.
        cohort: where clients run.
        thread: where the server's side of the method runs.
        secret: the run's seed for private noise; None: the operating system's noise.

    Attributes:
        method, server, cohort, thread: as given.
        entries: what the method declares, by key.
        known: what each client has.
        resent: bytes of kept entries that travelled once more, in this round.
    """

    def __init__(
        self, method: Method, server: Server, cohort: Cohort, thread: ServerThread, secret: int | None = None
    ) -> None:
        self.method, self.server, self.cohort, self.thread, self.known = method, server, cohort, thread, Known()
        self.entries = {e.key: e for e in method.entries()}
        self._secret, self.resent = secret, 0
        self._session, self._asked = secrets.token_hex(4), itertools.count()
        self._digests: dict[str, tuple[Any, str]] = {}

    def secret(self) -> Secret:
        """Where the private noise of the server comes from in this round."""
        return noise_of(self._secret, self.server.round, "server")

    def exchange(
        self, verb: str, numbers: Sequence[int], *, keeps: bool, riding: Riding | None = None
    ) -> Iterator[tuple[Answer, Letter | None, str]]:
        """Ask clients, and yield their answers in order.

        Args:
            verb: what is called there, by name: "answer", "local", "evaluate", or a further exchange of the method's.
            numbers: which clients.
            keeps: whether what they write into their memories is kept.
            riding: an exchange that rides with it.

        Yields:
            The answer, the letter that it answers, if one was written, and the version of a memory that it left, or "".

        Raises:
            BudgetExhausted, Interrupted: see `Cohort.ask`.
        """
        head, tell, sent = self._asking(self.server, verb, keeps)
        for answer in self.cohort.ask(head, numbers, tell, riding):
            self.resent += answer.resent
            yield answer, sent.pop(answer.client, None), head.version if answer.remembers else ""

    def riding(self, server: Server, numbers: Sequence[int], take: Callable[[Answer, Letter | None], None]) -> Riding:
        """An exchange of tests that rides with another, or goes ahead alone.

        Args:
            server: as it was after the round that is tested.
            numbers: which clients.
            take: gets every answer, and the letter that it answers, if one was written.
        """
        head, tell, sent = self._asking(server, "evaluate", False)
        return Riding(head, numbers, tell, lambda answer: take(answer, sent.pop(answer.client, None)))

    def _asking(self, server: Server, verb: str, keeps: bool) -> tuple[Head, Tell, dict[int, Letter]]:
        """What all are told in an exchange of the server's round, who tells each one more, and what each was told."""
        head = Head(verb, server.round, f"{self._session}-{next(self._asked)}", server.seed, self._secret, keeps)
        sent: dict[int, Letter] = {}

        def tell(number: int) -> Letter:
            try:
                sent[number] = letter = self.thread.run(lambda: self._letter(server, verb, number))
            except (Interrupted, BudgetExhausted):
                raise
            except Exception as error:  # it may concern this client alone, as an architecture that it has not got
                raise Unsent from error
            return letter

        return head, tell, sent

    def weight(self, letter: Letter | None, client: int) -> dict[str, int]:
        """Bytes of a `letter` on its way to a client, by entry's key: of a kept entry that it has, only the digest."""
        if letter is None:
            return {}
        cost, held = sizes(letter.message), self.known.of(client).bodies
        for key, found in letter.digests.items():
            if held.get(key) == found:
                cost = {k: n for k, n in cost.items() if k.split(":")[0] != key}
            cost[f"{key}:digest"] = _DIGEST_BYTES
        return cost

    def settle(self) -> None:
        """The round is committed: what clients were told and remember counts from now on."""
        self.cohort.settle(self.known.settle())

    def drop(self) -> None:
        """The round has failed: what clients were told and remember in it never counts."""
        self.known.drop()
        self.cohort.drop()

    def restore(self, found: Restored | None) -> None:
        """A run goes on: the records of clients are what the checkpoint says, and no other memory counts.

        Args:
            found: the checkpoint; None if no round was ever completed, so that the run begins anew.
        """
        for changes in found.changes if found is not None else ():
            self.known.restore(changes)
        self.cohort.restore(found.facts if found is not None else {}, self.known.versions())

    def _letter(self, server: Server, verb: str, client: int) -> Letter:
        further = verb in self.method.exchanges and verb != "local"
        message = self.method.send_in(server, verb, client) if further else self.method.send(server, client)
        unknown = [key for key, _ in message.items() if key not in self.entries]
        if unknown:
            raise ValueError(
                f"{type(self.method).__name__} sends {unknown[0]}, which it does not declare: make it an Entry of the "
                "class"
            )
        digests = {key: self._digest(key, value) for key, value in message.items() if self.entries[key].kept}
        record = self.known.of(client)
        held = frozenset(key for key, found in digests.items() if record.bodies.get(key) == found)
        return Letter(message, record.memory, digests, held)

    def _digest(self, key: str, value: Any) -> str:
        known = self._digests.get(key)
        if known is None or known[0] is not value:
            known = self._digests[key] = (value, digest(key, value))
        return known[1]
