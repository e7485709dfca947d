"""Transport to clients in other processes of this machine. The clients and the server exchange only bytes.

A message between two processes is called a frame: a tuple of its kind, such as "job", and its contents.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import wait
from typing import Any, Self

from distillkit.privacy import BudgetExhausted, Ledger
from distillkit.privacy._child_ledger import child_state, merge_child
from fl.deploy._wire import Job, pack_job, unpack_result
from fl.deploy.loopback._processes import STOP_TIMEOUT, Process, ProcessEnded, acquire, pickle_config, release
from fl.deploy.loopback._worker import WorkerConfig, pack_client_data
from fl.engine._clients import ClientRegistry
from fl.engine._transport import ClientResult, Exchange, reason_of
from fl.message import payload_bytes
from fl.participants import Interrupted

__all__ = ["ProcessTransport"]

Frame = tuple[Any, ...]


@dataclass
class WorkerSlot:
    """A worker process of a run, and the data that it already has.

    Attributes:
        process: the process.
        sent: indices of the clients whose data were sent to the process.
    """

    process: Process
    sent: set[int]


class ProcessTransport:
    """Transport to clients in worker processes. A client always runs in the same process.

    If a process dies, all clients that are queued or running in it fail. A new process then replaces it. Values
    that clients keep between rounds (their memories) are lost if the old process had them in RAM.

    Args:
        config: configuration of the processes.
        clients: data of the clients; a client's data are sent to its process before the client's first request.
        workers: number of processes.
        ledger: the run's privacy ledger, to which a client's charges are added before its result is yielded; None if
            the method is not private.
    """

    def __init__(
        self, config: WorkerConfig, clients: ClientRegistry, workers: int, ledger: Ledger | None = None
    ) -> None:
        self._config, self._clients, self._ledger = pickle_config(config), clients, ledger
        self._slots: dict[int, WorkerSlot] = {}
        self._workers, self._version = workers, ""
        self._asked: dict[int, Job] = {}
        self._done: dict[int, ClientResult] = {}
        self._resent: dict[int, int] = {}
        try:
            for client in range(min(workers, len(clients))):
                self._slot(client)
        except BaseException:
            self._release_all()
            raise

    def _slot(self, client: int) -> WorkerSlot:
        index = client % self._workers
        if index in self._slots and not self._slots[index].process.alive:
            self._drop_process(index, self._slots[index].process.end())
        if index not in self._slots:
            self._slots[index] = WorkerSlot(acquire(self._config), set())
        return self._slots[index]

    # Requests to the processes.

    def exchange(self, exchange: Exchange, bundled: Exchange | None = None) -> Iterator[ClientResult]:
        """Run the clients of `exchange`, and yield their results in the order of `exchange.clients`.

        If a second exchange `bundled` is given, its clients run first, and `bundled.on_result` gets their results.
        At most two clients per process are queued or running at a time.
        """
        if bundled is not None:
            bundled.run_alone(self)
        self._version = exchange.header.version
        waiting: deque[int] = deque()
        rest = iter(exchange.clients)
        while True:
            while len(waiting) < 2 * self._workers and (number := next(rest, None)) is not None:
                waiting.append(number)
                self._send_request(exchange, number)
            if not waiting:
                break
            while waiting[0] not in self._done:
                self._read_frames()
            yield self._done.pop(waiting.popleft())
        self._collect_charges()

    def _send_request(self, exchange: Exchange, client: int) -> None:
        slot = self._slot(client)
        try:
            known = child_state(self._ledger, client) if self._ledger is not None else None
            job = Job(exchange.header, client, exchange.build_request(client), known)
            frames = self._frames(slot, job)
        except (Interrupted, BudgetExhausted):
            raise
        except Exception as error:  # if a request cannot be built, its client fails, as with threads
            self._done[client] = ClientResult(client, error=reason_of(error))
            return
        self._asked[client] = job
        self._send(client % self._workers, *frames)

    def _frames(self, slot: WorkerSlot, job: Job, include_cached: bool = False) -> list[Frame]:
        """Return the frames (messages) with which a request (job) is sent to a worker process.

        The client's data come first if they were not sent to the process before.

        Args:
            slot: the process and the data that it already has.
            job: the request.
            include_cached: whether to send the values of all message entries, including those that the client has in
                its cache.
        """
        frames: list[Frame] = []
        if job.client not in slot.sent:
            data = self._clients[job.client]
            frames.append(("data", job.client, pack_client_data(data)))
            keeps = self._clients.all_loaded and not data.stored
        else:
            keeps = True
        frames.append(("job", pack_job(job, include_cached=include_cached)))
        if keeps:
            slot.sent.add(job.client)
        else:  # created or read on demand, and perhaps one of very many
            frames.append(("forget", job.client))
        return frames

    def _send(self, index: int, *frames: Frame) -> None:
        if index in self._slots:
            try:
                for frame in frames:
                    self._slots[index].process.send(*frame)
            except ProcessEnded as error:
                self._drop_process(index, str(error))

    def _drop_process(self, index: int, why: str) -> None:
        """Remove a dead process, and record all clients that are queued or running in it as failed.

        Args:
            index: index of the process.
            why: text that says how the process ended.
        """
        del self._slots[index]
        for client in [c for c in self._asked if c % self._workers == index]:
            del self._asked[client]
            self._done[client] = ClientResult(client, error=f"lost: {why}")

    # Frames from the processes.

    def _read_frames(self, timeout: float | None = None) -> None:
        """Wait until busy processes send frames (messages), and read one frame from each process that sent some.

        Args:
            timeout: time in seconds after which all busy processes are killed if none has sent a frame; None to wait
                without limit.
        """
        busy = {self._slots[c % self._workers].process.connection: c % self._workers for c in self._asked}
        ready = wait(list(busy), timeout)
        for connection, index in busy.items():
            if not ready:
                self._drop_process(index, self._slots[index].process.end())
            elif connection in ready:
                self._read_frame(index)

    def _read_frame(self, index: int) -> str:
        """Read and process one frame from the process with the index `index`, and return the frame's kind.

        The result is "ended" if the process has ended.

        Raises:
            BudgetExhausted: a client's release would exceed the privacy ledger's budget.
            Interrupted: the run is being stopped.
        """
        try:
            kind, *rest = self._slots[index].process.receive()
        except ProcessEnded as error:
            self._drop_process(index, str(error))
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
            self._send(index, *self._frames(self._slots[index], job, include_cached=True))
        else:
            del self._asked[rest[0]]
            if kind == "exhausted":
                raise BudgetExhausted(rest[1], remaining=rest[2])
            raise Interrupted
        return kind

    def _receive(self, data: bytes) -> None:
        version, result, charged = unpack_result(data)
        if version != self._version or result.client not in self._asked:
            return
        self._merge_child(charged)
        del self._asked[result.client]
        self._done[result.client] = replace(result, resent=self._resent.pop(result.client, 0))

    def _merge_child(self, lines: Sequence[dict[str, Any]]) -> None:
        if self._ledger is not None and lines:
            merge_child(self._ledger, lines)

    def _collect_charges(self) -> None:
        """Ask all processes for the privacy charges of results that never arrived, and add them to the ledger."""
        for index in list(self._slots) if self._ledger is not None else ():
            self._send(index, ("owed",))
            while index in self._slots and self._read_frame(index) not in ("owes", "ended"):
                pass

    # Between rounds, and at the end of the run.

    def commit(self, versions: Mapping[int, str]) -> None:
        """Send to each process the names of the committed versions of its clients' memories.

        A client's memory holds the values that it keeps between rounds.

        Args:
            versions: name of the new version of each changed memory, by client index.
        """
        for index in list(self._slots):
            self._send(index, ("settle", {c: v for c, v in versions.items() if c % self._workers == index}))

    def rollback(self) -> None:
        """Stop the clients that are running, and discard the memories that clients stored in the failed round.

        A client's memory holds the values that it keeps between rounds.

        The clients' charges to the privacy ledger still count.
        """
        self._stop_all()
        for index in list(self._slots):
            self._send(index, ("drop",), ("go",))

    def metadata(self) -> dict[str, str]:
        """Return an empty mapping; a checkpoint needs no values from this transport."""
        return {}

    def restore(self, metadata: Mapping[str, str], versions: Mapping[int, str]) -> None:
        """Delete all stored versions of client memories (values kept between rounds) that are not in `versions`.

        The processes have a common folder of memories, so only one process deletes files.

        Args:
            metadata: not used.
            versions: by client index, the name of the version of the client's memory after the last completed round.
        """
        self._send(0, ("restore", dict(versions)))

    def _stop_all(self) -> None:
        """Stop all running clients, and wait for them. A process that does not stop is killed."""
        for index in list(self._slots) if self._asked else ():
            self._send(index, ("stop",))
        while self._asked:
            with contextlib.suppress(BudgetExhausted, Interrupted):
                self._read_frames(STOP_TIMEOUT)
        self._done.clear()
        self._resent.clear()
        self._collect_charges()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: Any) -> None:
        """Stop the clients that are still running, and return the processes to the pool for the next run."""
        self._release_all()

    def _release_all(self) -> None:
        try:
            self._stop_all()
            while self._slots:
                release(self._slots.popitem()[1].process)
        finally:  # processes are left only if the user interrupts a second time
            for slot in self._slots.values():
                slot.process.end()
