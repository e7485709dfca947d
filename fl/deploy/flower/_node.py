"""A node's side: what lies there between two messages, and the answer to each.

On Flower's real nodes every message is a new process, so nothing may live in memory alone. A node's folder holds

    key                                        of the fingerprint of its data; it never leaves the node
    <data>/<run>/memory/<client>/<version>     what the client remembers, see `fl.engine._client_memory`
    <data>/<run>/bodies/<client>/<entry>       the body of a kept entry that came last
    <data>/<run>/committed                     once a letter has named a version
    ledgers/<name>.jsonl                       what private runs have charged to a training set, see `account`

where <data> is that fingerprint, <run> a name that the server's run keeps across its resumptions, and <name> a
fingerprint of the training set alone.
"""

from __future__ import annotations

import contextlib
import json
import logging
import re
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from distillkit._utils import check
from distillkit.fingerprint import set_fingerprint, tensor_fingerprint
from distillkit.privacy import BudgetExhausted, PrivacyError
from fl._codec import Parts, from_parts, to_parts
from fl.deploy._wire import Job, PayloadMissing, read_job
from fl.deploy.flower._client_loading import holding_of
from fl.deploy.flower._handshake import require_partition, said_of
from fl.deploy.flower._message_pairs import join, split
from fl.deploy.flower._node_folder import PayloadCache, key_of, remove_orphans
from fl.deploy.flower._node_ledger import Account
from fl.deploy.flower._records import LARGEST, from_records
from fl.deploy.flower._release_guard import WITHHELD, Guard
from fl.deploy.flower.policy import ANY, PolicyRefusal, app_hash, read_policy
from fl.engine import _validation
from fl.engine._client_memory import MemoryStore
from fl.engine._client_runtime import ClientRuntime, respond
from fl.engine._clients import ClientRegistry
from fl.engine._failures import reason_of
from fl.engine._transport import ClientResult
from fl.message import Message
from fl.method import Method
from fl.participants import Interrupted
from fl.task import LabelTask

__all__ = ["LoadClient", "Node"]

LoadClient = Callable[[int], Any]
"""Gives what one client holds, by its partition's number, in one of the forms of `fl.deploy.flower._client_loading`."""

_GRACE = 2.0
"""Seconds that a client has to stop at its deadline before it is left behind."""


class Node:
    """What runs on every node: answers the server's messages, with what it finds in its folder.

    Args:
        method: what the node runs.
        load_client: gives the data of a partition.
        folder: of the node, for what is to outlast a message.
        task: what the labels mean, as the server has it; None: one class an image.
        device: where the client computes.
        policy: the file of what its owner allows; None: everything.
        code: the folder of the app's code.
        largest: bytes of a message beyond which nothing of it is read.

    Raises:
        TypeError, ValueError: bad arguments.
    """

    def __init__(
        self,
        method: Method,
        load_client: LoadClient,
        folder: str | Path,
        task: LabelTask | None,
        device: str,
        policy: str | Path | None = None,
        code: str | Path | None = None,
        largest: int = LARGEST,
    ) -> None:
        check.callable_with(load_client, "load_client", ["partition"], "a function of the partition's number")
        self.method, self.load_client, self.task = method, load_client, task
        self.folder, self.device = Path(folder), _validation.device_at(device)
        self.largest = check.positive_int(largest, "largest_message")
        self.policy, self.app = policy, None if code is None else app_hash(code)
        if policy is not None and read_policy(policy).app != ANY and code is None:
            raise ValueError(f"the policy {policy} pins the app's code: say code=Path(__file__).parent")

    def _held(self, number: int, classes: int | None) -> _Held:
        """The data of a client, with so many classes at least."""
        given, names = holding_of(self.load_client(number), number)
        roster, key = ClientRegistry([given], None, False), key_of(self.folder)
        held = roster[0]
        train, test = ("" if d is None else set_fingerprint(d, key=key) for d in (held.train, held.test))
        return _Held(
            roster if classes is None else ClientRegistry([held], classes, False),
            tensor_fingerprint([str(number), train, test], key=key),
            tensor_fingerprint(["ledger", train], key=key),
            names,
        )

    def _failed(self, error: Exception) -> Parts:
        """What the server is told of an error: under a policy no words that may come from the data."""
        if self.policy is None or isinstance(error, PrivacyError):
            return _refused(reason_of(error))
        logging.getLogger(__name__).warning("%s", reason_of(error))
        return _refused(f"raised {type(error).__name__} ({WITHHELD})")

    def _guard(self, number: int, held: _Held) -> Guard:
        """The policy as it is now, and the ledger of the data, if the method is private."""
        policy = None if self.policy is None else read_policy(self.policy)
        account = Account(self.folder / "ledgers", number, held.ledger, policy) if self.method.private else None
        return Guard(self.method, policy, account)

    def hello(self, config: dict[str, Any]) -> Parts:
        """What the node says of itself, see `fl.deploy.flower._handshake`; or why it cannot.

        Args:
            config: Flower's `context.node_config`.
        """
        try:
            number, count = require_partition(config)
            held = self._held(number, None)
            what = (held.roster, held.fingerprint, held.ledger, held.names)
            return said_of(number, count, self.method, self.task, *what).parts()
        except Exception as error:  # the data are read by anybody's code
            return self._failed(error)

    def query(self, content: Any, config: dict[str, Any]) -> Parts:
        """What the node says of itself, or of its ledger if that is asked.

        Args:
            content: of the Flower message.
            config: Flower's `context.node_config`.
        """
        return self.ledger(content, config) if "ledger" in content.get("strings", ()) else self.hello(config)

    def ledger(self, content: Any, config: dict[str, Any]) -> Parts:
        """What the server has not seen of the node's ledger; or why it is not told.

        Args:
            content: of the Flower message.
            config: Flower's `context.node_config`.
        """
        try:
            _, facts = from_parts(*from_records(content, self.largest))
            number, _ = require_partition(config)
            guard = self._guard(number, self._held(number, None))
            return to_parts(Message(), guard.said(json.loads(facts["ledger"])))
        except Exception as error:  # what came is anything
            return self._failed(error)

    def answer(self, content: Any, config: dict[str, Any], created: float) -> Parts:
        """The answer to a job, or to two, one after the other; whatever fails is an answer that says so.

        Args:
            content: of the Flower message.
            config: Flower's `context.node_config`.
            created: when the message was made, in seconds since 1970 by the server's clock.
        """
        try:
            first, *rest = split(from_records(content, self.largest))
        except Exception as error:  # what came is anything
            return self._failed(error)
        began = time.time()
        found = self._answer(first, config, created)
        if not rest:
            return found
        took = time.time() - began  # each has the whole of its deadline
        return join(found, self._answer(rest[0], config, created + took))[0]

    def _answer(self, parts: Parts, config: dict[str, Any], created: float) -> Parts:
        try:
            message, facts = from_parts(*parts)
            place = json.loads(facts["place"])
            number, _ = require_partition(config)
            if not re.fullmatch("[0-9a-f]{16}", place["run"]):
                raise ValueError(f"a run's name is 16 hex digits, got {place['run']!r:.40}")
            held = self._held(number, place["classes"])
            folder = self.folder / held.fingerprint / place["run"]
            job = read_job(message, facts, PayloadCache(folder))
            if job.client != number:
                raise ValueError(f"this node is partition {number}, and was asked as {job.client}")
            guard = self._guard(number, held)
            guard.require_request(job, self.app)
            remove_orphans(folder, job.request.memory, job.header.round)
            site = ClientRuntime(
                self.method, _validation.task_at(self.task, held.roster.first), {number: held.roster[0]},
                MemoryStore(folder / "memory"), self.device, ledger=guard.branch(job),
            )  # fmt: skip
            left, seen = place["deadline"] - (time.time() - created), place["ledger"]
        except PayloadMissing:
            return to_parts(Message(), {"lacking": "a body"})
        except PolicyRefusal as error:
            return _refused(str(error))
        except Exception as error:  # what came is anything
            return self._failed(error)
        return guard.parts(job, _within(left, site, job), seen)


@dataclass(frozen=True)
class _Held:
    """What a node holds, as the only client of a roster; what its key makes of it; the names of classes, if told."""

    roster: ClientRegistry
    fingerprint: str
    ledger: str
    names: tuple[str, ...]


def _refused(why: str) -> Parts:
    return to_parts(Message(), {"refused": why[:500]})


def _within(seconds: float, site: ClientRuntime, job: Job) -> ClientResult | BudgetExhausted:
    """The answer, if there is one in so many seconds; then the client is told to stop, and is not waited for."""
    late = ClientResult(job.client, error="did not answer before its deadline, and was stopped")
    found: list[ClientResult | BudgetExhausted] = []

    def work() -> None:
        torch.set_num_threads(1)
        with contextlib.suppress(Interrupted):
            try:
                found.append(respond(site, job.header, job.client, lambda: job.request))
            except BudgetExhausted as error:  # of the run
                found.append(error)

    if seconds <= 0:
        return late
    torch.set_num_threads(torch.get_num_threads())  # see `distillkit._utils.threads.create_thread_pool`
    thread = threading.Thread(target=work, name="client", daemon=True)
    thread.start()
    thread.join(seconds)
    if thread.is_alive():
        site.stop.set()
        thread.join(_GRACE)
        return late
    return (
        found[0] if found else ClientResult(job.client, error="was ended by an error of the engine; see the node's log")
    )
