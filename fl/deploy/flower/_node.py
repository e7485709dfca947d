"""A node, which runs one client: it replies to the server's messages, and keeps files between messages.

In a deployment of Flower, every message starts a new process on the node, so all state is in the node's folder:

    key                                        secret key for the fingerprints below; it never leaves the node
    <data>/<run>/memory/<client>/<version>     client memory (`fl.engine._client_memory`)
    <data>/<run>/payloads/<entry>              latest value of a cached entry
    <data>/<run>/committed                     marker file of a run that has completed at least one round
    ledgers/<name>.jsonl                       privacy ledger of one training set, for all runs (`_node_ledger`)

<data> is a keyed fingerprint of the client's data. <run> is the run's name, which stays the same when a run is resumed.
<name> is a keyed fingerprint of the training set.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch

import distillkit
from distillkit._utils import check
from distillkit._utils.threads import set_intra_op_threads
from distillkit.fingerprint import set_fingerprint, tensor_fingerprint
from distillkit.privacy import BudgetExhausted, PrivacyError
from distillkit.privacy._journal import LedgerWriteError
from fl._codec import Parts, from_parts, to_parts
from fl.deploy._fields import read_fields
from fl.deploy._wire import Job, PayloadFolder, PayloadMissing, read_job
from fl.deploy.flower._client_loading import to_client_data
from fl.deploy.flower._handshake import NodeInfo, identity_of, read_partition
from fl.deploy.flower._messages import MAX_MESSAGE_BYTES, from_records
from fl.deploy.flower._node_folder import node_key, remove_dead_runs
from fl.deploy.flower._node_ledger import NodeLedger
from fl.deploy.flower._policy import ANY, Policy, PolicyRefusal, app_hash, read_policy
from fl.deploy.flower._replies import WITHHELD, refusal_parts, reply_parts
from fl.engine._client_memory import MemoryStore
from fl.engine._client_runtime import ClientRuntime, respond
from fl.engine._clients import ClientRegistry
from fl.engine._contract import ChangedInput
from fl.engine._run_options import require_public, resolve_task
from fl.engine._transport import ClientResult, RequestHeader, reason_of
from fl.message import Message
from fl.method import Method, require_method
from fl.task import LabelTask

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
        """Return the reply to a message of the type "query.node": the node's description, or lines of its ledger.

        The lines are those that the server has not seen. If there is an error, the reply is a refusal.
        """
        try:
            number, count = read_partition(config)
            data = self._load(number, None)
            if "ledger" not in content.get("strings", ()):
                return self._describe(number, count, data).parts()
            _, metadata = from_parts(*from_records(content, self.max_message_bytes))
            ledger = self._ledger(number, data, self._policy())
            if ledger is None:
                raise ValueError("this node runs no private method, and keeps no ledger")
            return to_parts(Message(), ledger.report(metadata["ledger"]))
        except Exception as error:  # load_client is the user's code, and the content is untrusted
            return self._error_parts(error)

    def handle_job(self, content: Any, config: dict[str, Any], created: float) -> Parts:
        """Decode a job (request), check it against the node owner's policy, run the client, and return the reply.

        A failure does not raise an error, but becomes a reply with the reason.
        """
        try:
            message, metadata = from_parts(*from_records(content, self.max_message_bytes))
            context = read_fields("context", metadata.get("context", ""))
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
            folder, policy = self.folder / data.fingerprint / context["run"], self._policy()
            ledger = self._ledger(number, data, policy)

            def accept(header: RequestHeader, client: int) -> None:
                if client != number:
                    raise ValueError(f"this node is partition {number}, and received a request for {client}")
                if policy is not None:
                    policy.require_request(self.method, header.verb, self.app)

            job = read_job(message, metadata, PayloadFolder(folder / "payloads"), accept)
            remove_dead_runs(folder, job.request.memory, job.header.round)
            if ledger is not None and job.ledger is None:
                raise ValueError("the method is private, and the server's request has no ledger")
            runtime = ClientRuntime(
                self.method, resolve_task(self.task, data.clients.first), {number: data.clients[0]},
                MemoryStore(folder / "memory"), self.device,
                ledger=None if ledger is None or job.ledger is None else ledger.branch(job.ledger),
            )  # fmt: skip
            seconds -= time.monotonic() - began
        except PayloadMissing as error:
            return to_parts(Message(), {"missing": str(error)})
        except (PolicyRefusal, _Late) as error:
            return refusal_parts(str(error))
        except Exception as error:  # the content is untrusted
            return self._error_parts(error)
        return reply_parts(job, _run_with_timeout(seconds, runtime, job), ledger, policy, context["ledger"])

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

    def _describe(self, number: int, count: int, data: _LoadedData) -> NodeInfo:
        """Return the description of this node, which is sent to the server before round 1."""
        require_public(self.method, data.clients.first, self.task)
        return NodeInfo(
            number, count, identity_of(self.method), identity_of(self.task), data.fingerprint,
            data.ledger if self.method.private else "", json.dumps(data.class_names) if data.class_names else "",
            distillkit.__version__, time.time(), data.clients.first,
        )  # fmt: skip

    def _policy(self) -> Policy | None:
        return None if self.policy is None else read_policy(self.policy)

    def _ledger(self, number: int, data: _LoadedData, policy: Policy | None) -> NodeLedger | None:
        """Return the privacy ledger of the node's training set; None if the method is not private."""
        private = self.method.private
        return NodeLedger(self.folder / "ledgers", number, data.ledger, policy) if private else None

    def _error_parts(self, error: Exception) -> Parts:
        """Refuse a request because of an error. If there is a policy, only the error's type is sent."""
        if self.policy is None or isinstance(error, PrivacyError):
            return refusal_parts(reason_of(error))
        logging.getLogger(__name__).warning("%s", reason_of(error))
        return refusal_parts(f"raised {type(error).__name__} ({WITHHELD})")


@dataclass(frozen=True)
class _LoadedData:
    """Data of the node's single client, with keyed fingerprints of all its images and of its training images."""

    clients: ClientRegistry
    fingerprint: str
    ledger: str
    class_names: tuple[str, ...]


T = TypeVar("T")


class _Late(TimeoutError):
    """Error: a request cannot be answered in time. The message does not depend on the node's data."""


def _in_thread(work: Callable[[], T]) -> Future[T]:
    found: Future[T] = Future()

    def run() -> None:
        try:
            found.set_result(work())
        except BaseException as error:  # it is raised in the caller's thread
            found.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return found


def _load_with_timeout(seconds: float, work: Callable[[], T]) -> T:
    found = _in_thread(work)
    if not wait([found], seconds).done:
        raise _Late(f"did not load its data within {seconds:.3g} seconds")
    return found.result()


def _run_with_timeout(seconds: float, runtime: ClientRuntime, job: Job) -> ClientResult | BudgetExhausted:
    """Run a client for one request (`job`) in another thread, and return its result, or the error `BudgetExhausted`.

    A client that is not finished after `seconds` is asked to stop, and its result is an error.
    """
    late = ClientResult(job.client, error="did not answer before its deadline, and was stopped")
    if seconds <= 0:
        return late

    def work() -> ClientResult:
        set_intra_op_threads(1)
        return respond(runtime, job.header, job.client, lambda: job.request)

    torch.set_num_threads(torch.get_num_threads())  # see `distillkit._utils.threads`
    found = _in_thread(work)
    if not wait([found], seconds).done:
        runtime.stop.set()
        wait([found], _STOP_GRACE)
        return late
    try:
        return found.result()
    except BudgetExhausted as error:  # the run's budget
        return error
    except ChangedInput as error:
        return ClientResult(job.client, error=str(error))
    except LedgerWriteError:
        reason = "could not write its ledger"
    except BaseException:  # a defect of this library, or of code that raises exceptions such as SystemExit
        reason = "ended with an internal error"
    logging.getLogger(__name__).exception("client %d %s", job.client, reason)
    return ClientResult(job.client, error=f"{reason}; see the node's log")
