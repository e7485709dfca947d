"""Transport that sends requests to clients on Flower's nodes, and receives their results, over Flower's grid."""

from __future__ import annotations

import contextlib
import json
import secrets
import time
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from distillkit._utils.options import CheckedOptions, Positive, PositiveInt
from distillkit._utils.user_warnings import warn
from distillkit.privacy import BudgetExhausted, Ledger
from distillkit.privacy._child_ledger import child_state
from distillkit.sets import LabeledImages
from fl._codec import Parts, from_parts, to_parts
from fl.deploy._fields import read_fields
from fl.deploy._wire import Job, job_parts, read_result
from fl.deploy.flower._messages import MAX_MESSAGE_BYTES, GridConnection, app_failed, loss_reason
from fl.deploy.flower._node_ledger import ledger_position, mirror_report
from fl.deploy.flower._node_registry import NodeRegistry
from fl.engine._contract import ChangedInput
from fl.engine._transport import ClientResult, RequestBuilder, RequestHeader, reason_of
from fl.engine.store import write_atomically
from fl.message import Message, payload_bytes
from fl.method import NoUsableReply
from fl.participants import Interrupted, Scratch, Server

_DELIVERY_GRACE = 30.0
"""Seconds that a reply may take to arrive after the client's deadline."""

_LEDGER_TIMEOUT = 60.0
"""Seconds to wait for ledger reports after an exchange; missing reports come with the nodes' next replies."""

_DISCOVERY_INTERVAL = 5.0
"""Seconds between two looks for restarted nodes while replies are pending."""


@dataclass(frozen=True, kw_only=True)
class ConnectionOptions(CheckedOptions):
    """Timeouts and limits of the connection to the nodes.

    Args:
        connect_timeout: time in seconds within which all nodes must connect. If the method is private, the nodes
            must then report earlier privacy charges within another `connect_timeout` seconds.
        reply_timeout: time in seconds from the creation of a message to its reply, including the time in the node's
            queue. A client that needs longer is stopped, and counts as failed. The clocks of server and node must
            agree.
        max_concurrent: maximum number of clients that have a message without a reply at the same time.
        poll_interval: time in seconds between two polls for replies.
        max_message_bytes: size limit of a reply in bytes; a client with a larger reply fails. The limit does not
            protect Flower itself, which has already received the reply when it is checked.

    Raises:
        TypeError, ValueError: a time or limit is not positive.
    """

    connect_timeout: Positive = 300.0
    reply_timeout: Positive = 3600.0
    max_concurrent: PositiveInt = 64
    poll_interval: Positive = 0.2
    max_message_bytes: PositiveInt = MAX_MESSAGE_BYTES


@dataclass(frozen=True)
class PendingRequest:
    """Request to a client whose reply has not arrived yet.

    Attributes:
        job: content of the request.
        node: Flower's id of the node to which it was sent.
        resent: for a request that was sent again with all payloads, number of bytes of those that the first request
            omitted; None for a first request.
        repeated: whether it was sent again because the node was restarted.
    """

    job: Job
    node: int = 0
    resent: int | None = None
    repeated: bool = False

    def retry(self) -> PendingRequest:
        """Return a copy of this request, to send it again with all payloads."""
        request = self.job.request
        missing = [size for key, size in payload_bytes(request.message).items() if key.split(":")[0] in request.cached]
        return replace(self, resent=sum(missing))


class GridTransport:
    """Transport to clients on Flower's nodes; see `fl.engine._transport.Transport` for the interface.

    Before each exchange, and while it waits for replies, the server looks for new nodes. A node that was restarted is
    recognized by the `partition-id` in its configuration. If it has not replied to its last request, the request is
    sent once more. Requests of a private method are not repeated, because each attempt uses privacy budget. The nodes
    are not told whether a round succeeded, so every request states which version of the client's memory is valid.

    Args:
        connection: connection to the nodes.
        registry: registry of the nodes by client.
        options: timeouts and limits of the connection.
        space: set without images, with the image shape, dtype, classes and normalization of the clients' sets.
    """

    def __init__(
        self,
        connection: GridConnection,
        registry: NodeRegistry,
        options: ConnectionOptions,
        space: LabeledImages,
    ) -> None:
        self.space, self.clients = space, len(registry.nodes)
        self._connection, self._registry, self._options = connection, registry, options
        self._ledger: Ledger | None = None
        self._run = ""
        self._unreported: set[int] = set()
        self._pending: dict[int, PendingRequest] = {}
        self._results: dict[int, ClientResult | BudgetExhausted] = {}
        self._next_look = 0.0

    def fingerprint(self, key: bytes) -> str:
        """Return a fingerprint of the clients' images, from the nodes' descriptions."""
        return self._registry.fingerprint(key)

    def open(self, server: Server, memories: Path | None, scratch: Scratch | None) -> None:
        """Read or draw the run's name and, if the method is private, read the nodes' privacy ledgers.

        Earlier charges to the nodes' data count towards the run's epsilon. The name is stored in the folder `memories`.
        """
        self._ledger, self._run = server.ledger, _run_name(memories)
        self._unreported = set(self._registry.nodes)
        self._read_ledgers(self._unreported, self._options.connect_timeout)
        if self._ledger is not None and self._unreported:
            raise NoUsableReply(
                f"the nodes of partitions {sorted(self._unreported)[:10]} did not report earlier charges to their "
                "data: see their logs"
            )

    def close(self) -> None:
        """Stop waiting for replies."""
        self.rollback()

    def exchange(
        self, header: RequestHeader, clients: Sequence[int], build_request: RequestBuilder
    ) -> Iterator[ClientResult]:
        """Send the requests, and yield the results in the order of the clients. See `Transport.exchange`."""
        self._discover()
        waiting: deque[int] = deque()
        rest = iter(clients)
        while True:
            while len(waiting) < self._options.max_concurrent and (number := next(rest, None)) is not None:
                waiting.append(number)
                self._start(header, number, build_request)
            if not waiting:
                break
            while waiting[0] in self._pending:
                self._receive()
            result = self._results.pop(waiting.popleft())
            if isinstance(result, BudgetExhausted):
                raise result
            yield result
        self._read_ledgers(self._unreported, _LEDGER_TIMEOUT)
        self._unreported.clear()  # a node that is still missing reports with its next reply

    def _discover(self) -> None:
        """Register new nodes, and warn about nodes that are not compatible with the server or with the other nodes.

        The nodes' descriptions are received over a separate connection, so that pending replies are not affected.
        """
        began = time.monotonic()
        separate = GridConnection(self._connection.grid, self._options.poll_interval, self._options.max_message_bytes)
        for error in self._registry.discover(separate, min(self._options.reply_timeout, _DELIVERY_GRACE)):
            warn(f"{error}; the run goes on without it")
        self._next_look = (now := time.monotonic()) + _DISCOVERY_INTERVAL + 9 * (now - began)  # a tenth of the time

    def _repeat_after_restart(self) -> None:
        """Look for restarted nodes, and send each of them its pending requests again, at most once per exchange."""
        self._discover()
        for client, pending in list(self._pending.items()):
            if self._registry.nodes[client].node != pending.node and not pending.repeated:
                self._connection.forget(client)
                self._send(replace(pending.retry(), repeated=True), include_cached=True)

    # One request: build, send, receive, read.

    def _start(self, header: RequestHeader, client: int, build_request: RequestBuilder) -> None:
        try:
            known = None if self._ledger is None else child_state(self._ledger, client)
            job = Job(header, client, build_request(client), known)
        except (Interrupted, BudgetExhausted, ChangedInput):
            raise
        except Exception as error:  # if a request cannot be built, its client fails, as with threads
            self._results[client] = ClientResult(client, error=reason_of(error))
            return
        self._send(PendingRequest(job))

    def _send(self, pending: PendingRequest, *, include_cached: bool = False) -> None:
        client = pending.job.client
        options, info = self._options, self._registry.nodes[client]
        context = {
            "run": self._run, "classes": self.space.num_classes, "deadline": options.reply_timeout,
            "ledger": ledger_position(self._ledger, info),
        }  # fmt: skip
        self._unreported.add(client)
        self._pending[client] = replace(pending, node=info.node)
        parts = job_parts(pending.job, {"context": json.dumps(context)}, include_cached=include_cached)
        header = pending.job.header
        kind = "train.job" if header.keeps else "query.job"
        if self._connection.send(kind, {client: (info.node, parts)}, str(header.round), self._timeout):
            self._fail(client, f"was not reached: Flower did not accept the message to node {info.node}")

    @property
    def _timeout(self) -> float:
        return self._options.reply_timeout + _DELIVERY_GRACE

    def _receive(self) -> None:
        repeats = self._ledger is None
        if repeats and time.monotonic() > self._next_look:
            self._repeat_after_restart()
        for client, message in self._connection.collect():
            pending = self._pending.get(client)
            if pending is None or self._connection.is_waiting_for(client):
                continue  # a reply to the first of two attempts
            if message is None or message.has_error():
                if repeats and not app_failed(message):
                    self._repeat_after_restart()
                    if client not in self._pending or self._connection.is_waiting_for(client):
                        continue
                self._fail(client, loss_reason(message, self._timeout))
                continue
            try:
                parts = self._connection.read(message)
            except ValueError as error:
                self._fail(client, f"sent an unreadable reply: {error}")
                continue
            del self._pending[client]
            result = self._read(pending, parts)
            if result is None:
                self._send(pending.retry(), include_cached=True)
            elif isinstance(result, ClientResult):
                self._results[client] = replace(result, resent=pending.resent or 0)
            else:
                self._results[client] = result

    def _read(self, pending: PendingRequest, parts: Parts) -> ClientResult | BudgetExhausted | None:
        """Decode an untrusted reply.

        If the reply has new lines of the node's ledger, they are first copied to the run's ledger.
        """
        client = pending.job.client
        try:
            reply, metadata = from_parts(*parts)
            if self._ledger is not None and "ledger" in metadata:
                mirror_report(self._ledger, self._registry.nodes[client], metadata)
                self._unreported.discard(client)
            if "refused" in metadata:
                return ClientResult(client, error=f"refused: {metadata['refused']}"[:500])
            if "exhausted" in metadata and self._ledger is not None and self._ledger.budget is not None:
                exhausted = read_fields("exhausted", metadata["exhausted"])
                return BudgetExhausted(exhausted["reason"], remaining=exhausted["remaining"])
            if "missing" in metadata:
                if pending.resent is not None:
                    raise ValueError("it lacks a payload that was sent")
                return None
            if self._ledger is not None and "ledger" not in metadata:
                raise ValueError("it has no ledger report")
            return read_result(client, reply, metadata)
        except ValueError as error:
            return ClientResult(client, error=f"sent an unreadable reply: {error}"[:500])

    def _fail(self, client: int, why: str) -> None:
        del self._pending[client]
        self._results[client] = ClientResult(client, error=why[:500])

    def _read_ledgers(self, clients: Collection[int], seconds: float) -> None:
        """Ask nodes for privacy charges that no reply has reported yet.

        These are charges from before the run, and charges of lost replies.
        """
        if self._ledger is None or not clients:
            return
        nodes = {client: self._registry.nodes[client] for client in sorted(clients)}
        positions = {client: json.dumps(ledger_position(self._ledger, info)) for client, info in nodes.items()}
        messages = {k: (info.node, to_parts(Message(), {"ledger": positions[k]})) for k, info in nodes.items()}
        waiting = set(messages) - set(self._connection.send("query.node", messages, "ledger", seconds))
        while waiting:
            for client, message in self._connection.collect():
                waiting.discard(client)
                if message is not None and not message.has_error():
                    with contextlib.suppress(ValueError):  # the node stays unreported
                        _, metadata = from_parts(*self._connection.read(message))
                        mirror_report(self._ledger, nodes[client], metadata)
                        self._unreported.discard(client)

    # Between rounds, and at the start and end of the run.

    def commit(self, versions: Mapping[int, str]) -> None:
        """Do nothing: the nodes need no message at the end of a round."""

    def rollback(self) -> None:
        """Stop waiting for replies of the failed round.

        Memories that clients stored in the failed round need not be deleted, because no
        later request uses them.
        """
        self._connection.clear()
        self._pending.clear()
        self._results.clear()

    def metadata(self) -> dict[str, str]:
        """Return {"run": name} for the checkpoint. Nodes keep this run's files under this name.

        Flower's own run id cannot be used as this name, because it changes when the run is resumed.
        """
        return {"run": self._run}

    def require_memories(self, versions: Mapping[int, str]) -> None:
        """Do nothing: the memories are on the nodes, which name a lost one themselves."""

    def restore(self, metadata: Mapping[str, str], versions: Mapping[int, str]) -> None:
        """Read the run's name from the checkpoint. The nodes keep the files of the run under this name."""
        self._run = metadata.get("run", self._run)


def _run_name(out: Path | None) -> str:
    """Return the name under which nodes keep a run's files: the name stored in `out`, if there is one.

    Otherwise, draw a random name, and store it in the folder `out`, so that the run can be resumed. If `out` is None,
    the name is not stored.
    """
    drawn = secrets.token_hex(8)
    if out is None:
        return drawn
    path = out / "flower.run"
    if not path.exists():
        write_atomically(path, drawn.encode())
    return path.read_text(encoding="utf-8")
