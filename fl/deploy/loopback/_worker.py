"""Worker process of the loopback backend. It runs clients. When a run ends, the process is used for the next run.

The server sends frames to the process. A frame is a tuple whose first item is the kind of the frame, such as "job"; the
other items are the contents. The process receives all its data in frames.
"""

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
from fl.engine._client_memory import MemoryStore
from fl.engine._client_runtime import ClientRuntime, respond
from fl.engine._clients import ClientData
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
    """Encode the training and test images of one client as bytes."""
    train, test = data.read()
    sets = {_Data.train: train} | ({} if test is None else {_Data.test: test})
    return encode(Message(sets))


@dataclass(frozen=True)
class WorkerConfig:
    """Configuration of a run in a worker process. A client's data are sent separately, before its first request.

    Attributes:
        method: method of the run.
        task: label task of the run.
        device: device on which clients compute.
        memories: folder for the values that clients keep between rounds; None keeps them in RAM.
    """

    method: Method
    task: LabelTask
    device: str
    memories: Path | None


class _WorkerRun:
    """State of one run in this worker process: the method, and the data and stored values of its clients.

    The stored values are the clients' memories (values that they keep between rounds) and the cached values of message
    entries. A frame is a tuple that the server sends. Its first element is the frame's kind. The methods `data`,
    `forget` and `job` handle frames of the kinds "data", "forget" and "job", and `commit` handles frames of the kind
    "settle".
    """

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
        self.payloads = PayloadCache()
        self.charged: dict[int, list[dict[str, Any]]] = {}  # charges whose results were not sent, by client

    def data(self, client: int, data: bytes) -> None:
        """Store the data of the client with index `client`, as encoded by `pack_client_data`."""
        message = decode(data)[0]
        self.client_data[client] = ClientData(message[_Data.train], message.get(_Data.test))

    def forget(self, client: int) -> None:
        """Delete the data of a client, which the server will send again when the client is drawn next."""
        self.client_data.pop(client, None)

    def job(self, data: bytes) -> list[Frame]:
        """Run a client, and return the frames to send to the server.

        Args:
            data: the request, as encoded by `pack_job`.
        """
        try:
            job = unpack_job(data, self.payloads)
        except PayloadMissing as error:
            return [("lacking", error.client)]
        branch = ChildLedger(job.ledger) if job.ledger is not None else None
        try:
            result = respond(replace(self.runtime, ledger=branch), job.header, job.client, lambda: job.request)
        except BudgetExhausted as error:
            self._keep_charges(job, branch)
            return [("exhausted", job.client, str(error), error.remaining)]
        except Interrupted:
            self._keep_charges(job, branch)
            return [("interrupted", job.client)]
        return [("answer", pack_result(job.header.version, result, branch.charged if branch is not None else ()))]

    def _keep_charges(self, job: Job, branch: ChildLedger | None) -> None:
        if branch is not None and branch.charged:
            self.charged.setdefault(job.client, []).extend(branch.charged)

    def commit(self, versions: Mapping[int, str]) -> None:
        """Commit the clients' memories (values kept between rounds) after a round.

        Args:
            versions: name of the new version of each changed memory, by client index.
        """
        self.runtime.memories.commit(dict(versions))


def _serve_frames(connection: Connection, frames: queue.SimpleQueue[Frame], stop: threading.Event) -> None:
    """Handle frames from the server in the order of their arrival, until the process ends.

    A frame is a tuple that starts with a kind, such as "job".

    Args:
        connection: pipe to the server, to which the replies to frames are sent.
        frames: queue of the received frames.
        stop: event that is set when the run is being stopped, so that the client that is running stops.
    """
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
    """Run the main loop of a worker process, until the server closes the connection or ends.

    A second thread runs the clients while this thread reads. The pipe therefore never fills up, and a message that
    stops the run is read while a client runs. Ctrl-C is ignored here, because it reaches all processes, and the server
    decides which of them stop.

    Args:
        connection: pipe to the server.
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
