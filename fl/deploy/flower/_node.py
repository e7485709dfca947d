"""A node, which runs one client: it replies to the server's messages, and keeps files between messages.

In a deployment of Flower, every message starts a new process on the node, so all state is in the node's folder:

    key                                        secret key for the fingerprints below; it never leaves the node
    <data>/<run>/memory/<client>/<version>     values that the client keeps between rounds (`fl.engine._client_memory`)
    <data>/<run>/bodies/<client>/<entry>       latest value of a cached message entry
    <data>/<run>/committed                     marker file of a run that has completed at least one round
    ledgers/<name>.jsonl                       privacy ledger of one training set, for all runs (`_node_ledger`)

<data> is a keyed fingerprint of the client's data. <run> is the run's name, which stays the same when a run is resumed.
<version> is the name of one stored version of the values. <name> is a keyed fingerprint of the training set.
"""

from __future__ import annotations

import contextlib
import json
import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch

from distillkit._utils import check
from distillkit.fingerprint import set_fingerprint, tensor_fingerprint
from distillkit.privacy import BudgetExhausted, PrivacyError
from distillkit.privacy._journal import LedgerWriteError
from fl._codec import Parts, from_parts, to_parts
from fl.deploy._fields import read_fields
from fl.deploy._wire import Job, PayloadMissing, read_job
from fl.deploy.flower._client_loading import to_client_data
from fl.deploy.flower._handshake import describe_node, read_partition
from fl.deploy.flower._messages import MAX_MESSAGE_BYTES, from_records
from fl.deploy.flower._node_folder import PayloadFolder, node_key, remove_dead_runs
from fl.deploy.flower._node_ledger import NodeLedger
from fl.deploy.flower._policy import ANY, PolicyRefusal, app_hash, read_policy
from fl.deploy.flower._release_guard import WITHHELD, ReleaseGuard, refusal_parts
from fl.engine._client_memory import MemoryStore
from fl.engine._client_runtime import ClientRuntime, respond
from fl.engine._clients import ClientRegistry
from fl.engine._contract import ChangedInput
from fl.engine._run_options import resolve_task
from fl.engine._transport import ClientResult, RequestHeader, reason_of
from fl.message import Message
from fl.method import Method, require_method
from fl.participants import Interrupted
from fl.task import LabelTask

__all__ = ["LoadClient", "Node"]

LoadClient = Callable[[int], Any]
"""Function that returns the data of a partition, given its index; `to_client_data` lists the forms of the data."""

_STOP_GRACE = 2.0
"""Seconds that a client has to stop after its deadline before its thread is abandoned."""


class Node:
    """Handler of the server's messages on a node.

    Args:
        method: the method to run.
        load_client: function that takes the partition index and returns the client's data.
        folder, task, device, policy, code, max_message_bytes: options of `client_app`.

    Raises:
        TypeError, ValueError: an argument is not valid, or the file `policy` cannot be used.
    """

    def __init__(
        self, method: Method, load_client: LoadClient, *, folder: str | Path, task: LabelTask | None = None,
        device: str = "cpu", policy: str | Path | None = None, code: str | Path | None = None,
        max_message_bytes: int = MAX_MESSAGE_BYTES,
    ) -> None:  # fmt: skip
        check.callable_with(load_client, "load_client", ["partition"], "a function of the partition's number")
        self.method, self.load_client, self.task = require_method(method), load_client, task
        self.folder, self.device = Path(folder), check.device(device)
        self.max_message_bytes = check.positive_int(max_message_bytes, "max_message_bytes")
        self.policy, self.app = policy, None if code is None else app_hash(code)
        if self.policy is not None and read_policy(self.policy).app != ANY and self.app is None:
            raise ValueError(f"the policy {self.policy} pins the app's code: pass code=Path(__file__).parent")

    def handle_query(self, content: Any, config: dict[str, Any]) -> Parts:
        """Return the reply to a message of the type "query.hello": the node's description, or lines of its ledger.

        The lines are those of the node's privacy ledger that the server has not seen.
        """
        return self.ledger(content, config) if "ledger" in content.get("strings", ()) else self.handshake(config)

    def handshake(self, config: dict[str, Any]) -> Parts:
        """Return the message parts of the node's description (`NodeInfo`), or of a refusal if there is an error."""
        try:
            number, count = read_partition(config)
            data = self._load(number, None)
            details = (data.clients, data.fingerprint, data.ledger, data.class_names)
            return describe_node(number, count, self.method, self.task, *details).parts()
        except Exception as error:  # load_client is the user's code
            return self._error_parts(error)

    def ledger(self, content: Any, config: dict[str, Any]) -> Parts:
        """Return the message parts of a reply with the privacy ledger's lines that the server has not seen.

        If there is an error, the reply is a refusal.
        """
        try:
            _, metadata = from_parts(*from_records(content, self.max_message_bytes))
            number, _ = read_partition(config)
            guard = self._guard(number, self._load(number, None))
            return to_parts(Message(), guard.ledger_report(json.loads(metadata["ledger"])))
        except Exception as error:  # the content is untrusted
            return self._error_parts(error)

    def handle_job(self, content: Any, config: dict[str, Any], created: float) -> Parts:
        """Decode a job (request), check it against the node owner's policy, run the client, and return the reply.

        A failure does not raise an error, but becomes a reply with the reason.
        """
        try:
            message, metadata = from_parts(*from_records(content, self.max_message_bytes))
            context = read_fields("place", metadata.get("place", ""))
            number, _ = read_partition(config)
            waited = time.time() - created
            seconds = context["deadline"] - max(0.0, waited)
            if seconds <= 0:
                raise _Late(
                    f"got a request that is {waited:.0f} seconds old by its clock, but the time limit is "
                    f"{context['deadline']:g} seconds: the message came late, or its clock is ahead of the server's "
                    "(set both by NTP)"
                )
            began = time.monotonic()
            data = _load_with_timeout(seconds, lambda: self._load(number, context["classes"]))
            folder, guard = self.folder / data.fingerprint / context["run"], self._guard(number, data)

            def accept(header: RequestHeader, client: int) -> None:
                if client != number:
                    raise ValueError(f"this node is partition {number}, and received a request for {client}")
                guard.require_request(header.verb, self.app)

            job = read_job(message, metadata, PayloadFolder(folder), accept)
            remove_dead_runs(folder, job.request.memory, job.header.round)
            runtime = ClientRuntime(
                self.method, resolve_task(self.task, data.clients.first), {number: data.clients[0]},
                MemoryStore(folder / "memory"), self.device, ledger=guard.branch(job),
            )  # fmt: skip
            seconds, position = seconds - (time.monotonic() - began), context["ledger"]
        except PayloadMissing:
            return to_parts(Message(), {"lacking": "a body"})
        except (PolicyRefusal, _Late) as error:
            return refusal_parts(str(error))
        except Exception as error:  # the content is untrusted
            return self._error_parts(error)
        return guard.reply_parts(job, _run_with_timeout(seconds, runtime, job), position)

    def _load(self, number: int, classes: int | None) -> _LoadedData:
        """Load the client's data, and compute their fingerprints."""
        given, names = to_client_data(self.load_client(number), number)
        clients, key = ClientRegistry([given], None, False), node_key(self.folder)
        data = clients[0]
        train, test = ("" if d is None else set_fingerprint(d, key=key) for d in (data.train, data.test))
        return _LoadedData(
            clients if classes is None else ClientRegistry([data], classes, False),
            tensor_fingerprint([str(number), train, test], key=key),
            tensor_fingerprint(["ledger", train], key=key),
            names,
        )

    def _guard(self, number: int, data: _LoadedData) -> ReleaseGuard:
        """Return an object that checks one request and its reply against the current policy of the node's owner.

        For a private method, the object also checks and charges the privacy ledger of the node's training set.
        """
        policy = None if self.policy is None else read_policy(self.policy)
        private = self.method.private
        ledger = NodeLedger(self.folder / "ledgers", number, data.ledger, policy) if private else None
        return ReleaseGuard(self.method, policy, ledger)

    def _error_parts(self, error: Exception) -> Parts:
        """Return the parts of a reply that refuses a request because of an error.

        If the node's owner has set a policy (`_policy`), the reply contains only the type of the error, because the
        error's message may reveal data.
        """
        if self.policy is None or isinstance(error, PrivacyError):
            return refusal_parts(reason_of(error))
        logging.getLogger(__name__).warning("%s", reason_of(error))
        return refusal_parts(f"raised {type(error).__name__} ({WITHHELD})")


@dataclass(frozen=True)
class _LoadedData:
    """Data of a node, which has a single client: the client's images, keyed fingerprints, and the class names.

    Attributes:
        clients: `ClientRegistry`, a sequence whose only item is the client's data.
        fingerprint: fingerprint of the training and test images.
        ledger: fingerprint of the training images, which is the name of their privacy ledger.
        class_names: class names; empty if unknown.
    """

    clients: ClientRegistry
    fingerprint: str
    ledger: str
    class_names: tuple[str, ...]


T = TypeVar("T")


class _Late(TimeoutError):
    """Error: a request cannot be answered in time.

    The error's message does not depend on the node's data, so it may be sent to the server.
    """


def _load_with_timeout(seconds: float, work: Callable[[], T]) -> T:
    """Run `work` in another thread, and return its result."""
    found: Future[T] = Future()

    def run() -> None:
        try:
            found.set_result(work())
        except BaseException as error:  # it is raised in the caller's thread
            found.set_exception(error)

    threading.Thread(target=run, name="load", daemon=True).start()
    try:
        return found.result(timeout=seconds)
    except FutureTimeout as error:
        if found.done():
            raise
        raise _Late(f"did not load its data within {seconds:.3g} seconds") from error


def _run_with_timeout(seconds: float, runtime: ClientRuntime, job: Job) -> ClientResult | BudgetExhausted:
    """Run a client for one request (`job`) in another thread, and return its result.

    If the client is not finished after `seconds`, it is asked to stop, and a result with an error is returned.
    `BudgetExhausted` is returned, not raised.
    """
    late = ClientResult(job.client, error="did not answer before its deadline, and was stopped")
    found: list[ClientResult | BudgetExhausted] = []

    def work() -> None:
        torch.set_num_threads(1)
        with contextlib.suppress(Interrupted):
            try:
                found.append(respond(runtime, job.header, job.client, lambda: job.request))
            except BudgetExhausted as error:  # the run's budget
                found.append(error)
            except ChangedInput as error:
                found.append(ClientResult(job.client, error=str(error)))
            except LedgerWriteError:
                found.append(ClientResult(job.client, error="could not write its ledger; see the node's log"))
                logging.getLogger(__name__).exception("the ledger could not be written")

    if seconds <= 0:
        return late
    torch.set_num_threads(torch.get_num_threads())  # see `distillkit._utils.threads`
    thread = threading.Thread(target=work, name="client", daemon=True)
    thread.start()
    thread.join(seconds)
    if thread.is_alive():
        runtime.stop.set()
        thread.join(_STOP_GRACE)
        return late
    return found[0] if found else ClientResult(job.client, error="ended with an internal error; see the node's log")
