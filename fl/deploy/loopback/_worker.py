"""The far side of the loopback: a process that serves one run after the other and has only what it was sent."""

from __future__ import annotations

import os
import pickle
import queue
import signal
import threading
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from distillkit.locking import exit_with_parent
from distillkit.privacy import BudgetExhausted
from distillkit.privacy._child_ledger import ChildLedger
from distillkit.sets import LabeledImages
from fl._codec import decode, encode
from fl.deploy._wire import Job, PayloadCache, PayloadMissing, pack_answer, unpack_job
from fl.deploy.loopback._faults import Faults
from fl.engine._client_memory import MemoryStore
from fl.engine._client_runtime import ClientRuntime, respond
from fl.engine._clients import ClientData
from fl.engine._transport import ClientResult
from fl.message import Entry, Message
from fl.method import Method
from fl.participants import Interrupted
from fl.task import LabelTask

__all__ = ["WorkerConfig", "pack_client_data", "serve"]

Frame = tuple[Any, ...]


class _Data:
    train = Entry[LabeledImages]("first")
    test = Entry[LabeledImages]("first")


def pack_client_data(held: ClientData) -> bytes:
    """What one client holds, `held`, as bytes; the far side reads them back."""
    train, test = held.read()
    sets = {_Data.train: train} | ({} if test is None else {_Data.test: test})
    return encode(Message(sets))


@dataclass(frozen=True)
class WorkerConfig:
    """What a run is begun with; the data follow, a client's before its first job.

    Attributes:
        method, task: built anew there.
        device: where clients compute.
        memories: the folder of what clients remember; None keeps it in RAM.
        faults: which results go astray.
    """

    method: Method
    task: LabelTask
    device: str
    memories: Path | None
    faults: Faults


class _Run:
    """One run, as far as it lies here."""

    def __init__(self, opening: WorkerConfig, stop: threading.Event) -> None:
        self.client_data: dict[int, ClientData] = {}
        self.runtime = ClientRuntime(
            opening.method,
            opening.task,
            self.client_data,
            MemoryStore(opening.memories),
            torch.device(opening.device),
            stop,
        )
        self.faults, self.payloads = opening.faults, PayloadCache()
        self.charged: dict[int, list[dict[str, Any]]] = {}  # for which no answer has gone out
        self.late: list[bytes] = []

    def data(self, client: int, data: bytes) -> None:
        """A client's data have come."""
        message = decode(data)[0]
        self.client_data[client] = ClientData(message[_Data.train], message.get(_Data.test))

    def forget(self, client: int) -> None:
        """A client that is made on demand will be made again."""
        self.client_data.pop(client, None)

    def job(self, data: bytes) -> list[Frame]:
        """Do a job; what is sent back for it, and what was held back from earlier ones."""
        try:
            job = unpack_job(data, self.payloads)
        except PayloadMissing as error:
            return [("lacking", error.client)]
        branch = ChildLedger(job.ledger) if job.ledger is not None else None
        frames: list[Frame] = [("answer", held) for held in self.late]
        self.late.clear()
        try:
            answer = respond(replace(self.runtime, ledger=branch), job.header, job.client, lambda: job.request)
        except BudgetExhausted as error:
            self._owe(job, branch)
            return [*frames, ("exhausted", job.client, str(error), error.remaining)]
        except Interrupted:
            self._owe(job, branch)
            return [*frames, ("interrupted", job.client)]
        return [*frames, *self._sent(job, branch, answer)]

    def _owe(self, job: Job, branch: ChildLedger | None) -> None:
        if branch is not None and branch.charged:
            self.charged.setdefault(job.client, []).extend(branch.charged)

    def _sent(self, job: Job, branch: ChildLedger | None, answer: ClientResult) -> list[Frame]:
        fate = self.faults.fate(job.header.verb, job.header.round, job.client)
        if fate in ("lost", "late"):
            self._owe(job, branch)
            if fate == "late":
                self.late.append(pack_answer(job.header.version, answer))
            return [("lost", job.client, fate)]
        data = pack_answer(job.header.version, answer, branch.charged if branch is not None else ())
        return [("answer", data)] * (2 if fate == "twice" else 1)

    def commit(self, versions: Mapping[int, str]) -> None:
        """These memories count; unless the word of it is lost, too."""
        heard = {
            client: version
            for client, version in versions.items()
            if self.faults.fate("settle", int(version.split("-")[0]), client) != "lost"
        }
        self.runtime.memories.commit(heard)


def _work(connection: Connection, frames: queue.SimpleQueue[Frame], stop: threading.Event) -> None:
    """Do what came, one thing after the other."""
    torch.set_num_threads(1)
    run: Any = None
    while True:
        kind, *rest = frames.get()
        if kind == "open":
            stop.clear()
            try:
                run = _Run(pickle.loads(rest[0]), stop)
                connection.send(("opened",))
            except Exception as error:  # the method's code is anybody's
                run = None
                connection.send(("refused", f"{type(error).__name__}: {error}"))
        elif kind == "close":
            run = None
            connection.send(("closed",))
        elif kind == "job":
            for frame in run.job(*rest):
                connection.send(frame)
        elif kind == "owed":
            connection.send(("owes", run.charged))
            run.charged = {}
        elif kind == "data":
            run.data(*rest)
        elif kind == "forget":
            run.forget(*rest)
        elif kind == "settle":
            run.commit(*rest)
        elif kind == "drop":
            run.runtime.memories.rollback()
        elif kind == "restore":
            run.runtime.memories.cut(*rest)


def serve(connection: Connection) -> None:
    """Serve runs until the other end of the `connection` is closed, or the process that holds it has ended.

    A second thread works, so that this one always reads: nobody waits for ever with a full pipe, and a word to stop is
    heard in the middle of a job. Ctrl-C reaches the whole group of processes; what it means here, the other side says.
    """
    exit_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    frames, stop = queue.SimpleQueue[Frame](), threading.Event()
    threading.Thread(target=_guarded, args=(connection, frames, stop), name="client", daemon=True).start()
    while True:
        try:
            frame = connection.recv()
        except (EOFError, OSError):
            return
        if frame[0] in ("stop", "go"):
            (stop.set if frame[0] == "stop" else stop.clear)()
        else:
            frames.put(frame)


def _guarded(connection: Connection, frames: queue.SimpleQueue[Frame], stop: threading.Event) -> None:
    try:
        _work(connection, frames, stop)
    except BaseException:  # an error of ours, or nobody listens any more
        traceback.print_exc()
        os._exit(1)
