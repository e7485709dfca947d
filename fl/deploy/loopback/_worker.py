"""Worker process of the loopback backend. It serves one run after another, and receives all its data as messages."""

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

from distillkit._utils.processes import exit_with_parent
from distillkit.privacy import BudgetExhausted
from distillkit.privacy._child_ledger import ChildLedger
from distillkit.sets import LabeledImages
from fl._codec import decode, encode
from fl.deploy._wire import Job, PayloadCache, PayloadMissing, pack_result, unpack_job
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


def pack_client_data(data: ClientData) -> bytes:
    """Encode one client's `data` as bytes."""
    train, test = data.read()
    sets = {_Data.train: train} | ({} if test is None else {_Data.test: test})
    return encode(Message(sets))


@dataclass(frozen=True)
class WorkerConfig:
    """Configuration of a run in a worker process. A client's data are sent separately, before its first job.

    Attributes:
        method: method of the run.
        task: task of the run.
        device: device on which clients compute.
        memories: folder of the clients' memories; None: they are kept in RAM.
        faults: shares of results that are lost, repeated or delayed.
    """

    method: Method
    task: LabelTask
    device: str
    memories: Path | None
    faults: Faults


class _WorkerRun:
    """State of one run in this process."""

    def __init__(self, config: WorkerConfig, stop: threading.Event) -> None:
        self.client_data: dict[int, ClientData] = {}
        self.runtime = ClientRuntime(
            config.method,
            config.task,
            self.client_data,
            MemoryStore(config.memories),
            torch.device(config.device),
            stop,
        )
        self.faults, self.payloads = config.faults, PayloadCache()
        self.charged: dict[int, list[dict[str, Any]]] = {}  # charges whose results were not sent, by client
        self.late: list[bytes] = []

    def data(self, client: int, data: bytes) -> None:
        """Store a client's data."""
        message = decode(data)[0]
        self.client_data[client] = ClientData(message[_Data.train], message.get(_Data.test))

    def forget(self, client: int) -> None:
        """Delete the data of a client that is created on demand."""
        self.client_data.pop(client, None)

    def job(self, data: bytes) -> list[Frame]:
        """Run a job, and return the frames to send: the result of this job, and delayed results of earlier jobs."""
        try:
            job = unpack_job(data, self.payloads)
        except PayloadMissing as error:
            return [("lacking", error.client)]
        branch = ChildLedger(job.ledger) if job.ledger is not None else None
        frames: list[Frame] = [("answer", delayed) for delayed in self.late]
        self.late.clear()
        try:
            result = respond(replace(self.runtime, ledger=branch), job.header, job.client, lambda: job.request)
        except BudgetExhausted as error:
            self._keep_charges(job, branch)
            return [*frames, ("exhausted", job.client, str(error), error.remaining)]
        except Interrupted:
            self._keep_charges(job, branch)
            return [*frames, ("interrupted", job.client)]
        return [*frames, *self._reply_frames(job, branch, result)]

    def _keep_charges(self, job: Job, branch: ChildLedger | None) -> None:
        if branch is not None and branch.charged:
            self.charged.setdefault(job.client, []).extend(branch.charged)

    def _reply_frames(self, job: Job, branch: ChildLedger | None, result: ClientResult) -> list[Frame]:
        fate = self.faults.fate(job.header.verb, job.header.round, job.client)
        if fate in ("lost", "late"):
            self._keep_charges(job, branch)
            if fate == "late":
                self.late.append(pack_result(job.header.version, result))
            return [("lost", job.client, fate)]
        data = pack_result(job.header.version, result, branch.charged if branch is not None else ())
        return [("answer", data)] * (2 if fate == "twice" else 1)

    def commit(self, versions: Mapping[int, str]) -> None:
        """Commit these `versions` of the memories, except those whose announcement is drawn to be lost."""
        received = {
            client: version
            for client, version in versions.items()
            if self.faults.fate("settle", int(version.split("-")[0]), client) != "lost"
        }
        self.runtime.memories.commit(received)


def _serve_frames(connection: Connection, frames: queue.SimpleQueue[Frame], stop: threading.Event) -> None:
    """Handle frames in the order of their arrival."""
    torch.set_num_threads(1)
    run: Any = None
    while True:
        kind, *rest = frames.get()
        if kind == "open":
            stop.clear()
            try:
                run = _WorkerRun(pickle.loads(rest[0]), stop)
                connection.send(("opened",))
            except Exception as error:  # the method is the user's code
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
            run.runtime.memories.restore(*rest)


def serve(connection: Connection) -> None:
    """Serve runs until the other end of the `connection` is closed, or its process has ended.

    A second thread runs the jobs while this thread reads. The pipe therefore never fills up, and a request to stop is
    read during a job. Ctrl-C reaches the whole process group and is ignored here, because the server decides what
    stops.
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
        _serve_frames(connection, frames, stop)
    except BaseException:  # an error of ours, or the connection is closed
        traceback.print_exc()
        os._exit(1)
