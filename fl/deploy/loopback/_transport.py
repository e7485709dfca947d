"""Clients in other processes, reached by bytes alone: a transport that shares nothing with the server."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import wait
from typing import Any, Self

from distillkit.privacy import BudgetExhausted, Ledger
from distillkit.privacy._child_ledger import child_state, merge_child
from fl.deploy._wire import Job, pack_job, unpack_answer
from fl.deploy.loopback._processes import PATIENCE, Ended, Process, give_back, pickled, take
from fl.deploy.loopback._worker import WorkerConfig, pack_client_data
from fl.engine._clients import ClientRegistry
from fl.engine._transport import BundledExchange, ClientResult, RequestBuilder, RequestHeader, reason_of
from fl.message import payload_bytes
from fl.participants import Interrupted

__all__ = ["ProcessTransport"]

Frame = tuple[Any, ...]


@dataclass
class WorkerSlot:
    """A process of this run, and which clients' data it has."""

    process: Process
    sent: set[int]


class ProcessTransport:
    """A transport of processes; a client always runs in the same one. See `Loopback` for what may go wrong.

    A process that dies is an error of the clients that were asked there; the next ones get a new process, in which what
    was remembered in RAM is lost.

    Args:
        opening: what the processes are begun with.
        clients: whose data go to the process of each when it is first asked.
        workers: how many processes.
        ledger: of a private run; what clients charge is carried back to it before their answers count.

    Attributes:
        dropped: how many answers came twice or too late.
    """

    def __init__(
        self, opening: WorkerConfig, clients: ClientRegistry, workers: int, ledger: Ledger | None = None
    ) -> None:
        self._opening, self._clients, self._ledger = pickled(opening), clients, ledger
        self._slots: dict[int, WorkerSlot] = {}
        self._workers, self._version = workers, ""
        self._asked: dict[int, Job] = {}
        self._done: dict[int, ClientResult] = {}
        self._resent: dict[int, int] = {}
        self.dropped = 0
        try:
            for client in range(min(workers, len(clients))):
                self._slot(client)
        except BaseException:
            self._leave()
            raise

    def _slot(self, client: int) -> WorkerSlot:
        index = client % self._workers
        if index in self._slots and not self._slots[index].process.alive:
            self._lose(index, self._slots[index].process.end())
        if index not in self._slots:
            self._slots[index] = WorkerSlot(take(self._opening), set())
        return self._slots[index]

    # Asking.

    def exchange(
        self,
        header: RequestHeader,
        clients: Sequence[int],
        build_request: RequestBuilder,
        bundled: BundledExchange | None = None,
    ) -> Iterator[ClientResult]:
        """Ask the `clients`, each told `header` and what `build_request` writes; see `Transport.exchange`.

        At most two for each process are under way. What is `bundled` goes ahead.
        """
        if bundled is not None:
            bundled.run_first(self)
        self._version = header.version
        waiting: deque[int] = deque()
        rest = iter(clients)
        while True:
            while len(waiting) < 2 * self._workers and (number := next(rest, None)) is not None:
                waiting.append(number)
                self._begin(header, number, build_request)
            if not waiting:
                break
            while waiting[0] not in self._done:
                self._listen()
            yield self._done.pop(waiting.popleft())
        self._collect()

    def _begin(self, header: RequestHeader, client: int, build_request: RequestBuilder) -> None:
        slot = self._slot(client)
        try:
            known = child_state(self._ledger, client) if self._ledger is not None else None
            job = Job(header, client, build_request(client), known)
            frames = self._frames(slot, job)
        except (Interrupted, BudgetExhausted):
            raise
        except Exception as error:  # as where clients are threads: what fails for a client is its failure
            self._done[client] = ClientResult(client, error=reason_of(error))
            return
        self._asked[client] = job
        self._send(client % self._workers, *frames)

    def _frames(self, slot: WorkerSlot, job: Job, whole: bool = False) -> list[Frame]:
        """What is sent for a job: the client's data if they are not there, and the job."""
        frames: list[Frame] = []
        if job.client not in slot.sent:
            held = self._clients[job.client]
            frames.append(("data", job.client, pack_client_data(held)))
            keeps = self._clients.whole and not held.stored
        else:
            keeps = True
        frames.append(("job", pack_job(job, whole=whole)))
        if keeps:
            slot.sent.add(job.client)
        else:  # it is made or read on demand, and may be one of very many
            frames.append(("forget", job.client))
        return frames

    def _send(self, index: int, *frames: Frame) -> None:
        if index in self._slots:
            try:
                for frame in frames:
                    self._slots[index].process.send(*frame)
            except Ended as error:
                self._lose(index, str(error))

    def _lose(self, index: int, why: str) -> None:
        """A process has died, and with it what its clients were asked."""
        del self._slots[index]
        for client in [c for c in self._asked if c % self._workers == index]:
            del self._asked[client]
            self._done[client] = ClientResult(client, error=f"lost: {why}")

    # Listening.

    def _listen(self, patience: float | None = None) -> None:
        """Take in what has come from the processes that were asked; if nothing comes in time, they are ended."""
        busy = {self._slots[c % self._workers].process.connection: c % self._workers for c in self._asked}
        ready = wait(list(busy), patience)
        for connection, index in busy.items():
            if not ready:
                self._lose(index, self._slots[index].process.end())
            elif connection in ready:
                self._hear(index)

    def _hear(self, index: int) -> str:
        """Take in one frame; its kind."""
        try:
            kind, *rest = self._slots[index].process.receive()
        except Ended as error:
            self._lose(index, str(error))
            return "ended"
        if kind == "answer":
            self._receive(rest[0])
        elif kind == "owes":
            for client in sorted(rest[0]):
                self._merge_child(rest[0][client])
        elif kind == "lacking":
            job = self._asked[rest[0]]
            costs = payload_bytes(job.request.message).items()
            self._resent[job.client] = sum(n for key, n in costs if key.split(":")[0] in job.request.cached)
            self._send(index, *self._frames(self._slots[index], job, whole=True))
        else:
            del self._asked[rest[0]]
            if kind == "exhausted":
                raise BudgetExhausted(rest[1], remaining=rest[2])
            if kind == "interrupted":
                raise Interrupted
            self._done[rest[0]] = ClientResult(rest[0], error="lost" if rest[1] == "lost" else "came too late")
        return kind

    def _receive(self, data: bytes) -> None:
        version, answer, charged = unpack_answer(data)
        if version != self._version or answer.client not in self._asked:
            self.dropped += 1
            return
        self._merge_child(charged)
        del self._asked[answer.client]
        self._done[answer.client] = replace(answer, resent=self._resent.pop(answer.client, 0))

    def _merge_child(self, lines: Sequence[dict[str, Any]]) -> None:
        if self._ledger is not None and lines:
            merge_child(self._ledger, lines)

    def _collect(self) -> None:
        """Fetch what was charged for answers that never came."""
        for index in list(self._slots) if self._ledger is not None else ():
            self._send(index, ("owed",))
            while index in self._slots and self._hear(index) not in ("owes", "ended"):
                pass

    # Between the rounds, and the end.

    def commit(self, versions: Mapping[int, str]) -> None:
        """Tell each process which `versions` of its clients' memories count; see `Transport.commit`."""
        for index in list(self._slots):
            self._send(index, ("settle", {c: v for c, v in versions.items() if c % self._workers == index}))

    def rollback(self) -> None:
        """Stop what is under way, and forget what it wrote; what it has charged counts. See `Transport.rollback`."""
        self._rest()
        for index in list(self._slots):
            self._send(index, ("drop",), ("go",))

    def metadata(self) -> dict[str, str]:
        """Nothing: the memories' files lie in the run's folder."""
        return {}

    def restore(self, facts: Mapping[str, str], versions: Mapping[int, str]) -> None:
        """Delete all memories but these `versions`; there are no `facts`. See `Transport.restore`.

        The folder is one for all, so one process looks through it.
        """
        self._send(0, ("restore", dict(versions)))

    def _rest(self) -> None:
        """Stop what is under way, and wait for it; a process that does not stop is ended."""
        for index in list(self._slots) if self._asked else ():
            self._send(index, ("stop",))
        while self._asked:
            with contextlib.suppress(BudgetExhausted, Interrupted):
                self._listen(PATIENCE)
        self._done.clear()
        self._resent.clear()
        self._collect()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: Any) -> None:
        """Give the processes back, to serve the next run."""
        self._leave()

    def _leave(self) -> None:
        try:
            self._rest()
            while self._slots:
                give_back(self._slots.popitem()[1].process)
        finally:  # interrupted a second time
            for slot in self._slots.values():
                slot.process.end()
