"""Encoding of requests (jobs) and results as tensors and strings, for clients on other machines.

A message entry may be cached. Its value is then called a payload. If a client has already received a payload, the
server sends only the payload's digest to it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from fl._codec import Parts, to_parts
from fl.deploy._fields import read_fields
from fl.engine._transport import ClientRequest, ClientResult, RequestHeader
from fl.message import Message, Value

__all__ = [
    "Job", "PayloadMissing", "PayloadStore", "job_parts", "read_job", "read_result", "result_parts",
]  # fmt: skip

_MAX_ERROR = 500
"""Maximum number of characters of a client's error text in the history."""


class PayloadMissing(LookupError):
    """Error: a client lacks the value of a cached entry, of which only the digest was sent.

    The server must send the request again with the values of all entries.
    """

    def __init__(self, client: int) -> None:
        super().__init__(f"client {client} lacks the payload of a cached entry")
        self.client = client

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.client,), vars(self)


@dataclass(frozen=True)
class Job:
    """Complete request to one client in another process or on another machine.

    Attributes:
        header: part of the request that is the same for all clients.
        client: index of the client.
        request: part of the request that is different for each client.
        ledger: extract of the run's privacy ledger that the client needs to charge its releases; None if the method is
            not private.
    """

    header: RequestHeader
    client: int
    request: ClientRequest
    ledger: Mapping[str, Any] | None = None


class PayloadStore(Protocol):
    """Interface of the clients' store for payloads, which are values that the server sends to each client only once.

    A message of the server has entries, that is, values by key. A method can declare an entry as cached: the server
    then sends the entry's value (a payload) to a client once, and afterwards only the value's digest.
    """

    def keep(self, client: int, key: str, digest: str, value: Value) -> Value:
        """Store a payload that a client received, and return it, or an equal payload that was stored before.

        A payload is the value of a cached message entry.
        """

    def load(self, client: int, key: str, digest: str) -> Value:
        """Return the stored payload of the entry `key` that the client with index `client` received."""


def job_parts(job: Job, metadata: Mapping[str, str] | None = None, *, include_cached: bool = False) -> Parts:
    """Encode a job, the complete request to one client, as tensors and strings.

    A message entry that the client has in its cache is encoded as its digest.
    """
    request = job.request
    cached = frozenset[str]() if include_cached else request.cached
    values = dict(request.message.items())
    fields = {
        "head": asdict(job.header), "client": job.client, "ledger": job.ledger, "memory": request.memory,
        "entries": list(values), "digests": dict(request.digests), "held": sorted(cached),
    }  # fmt: skip
    message = Message.unchecked({k: v for k, v in values.items() if k not in cached})
    return to_parts(message, {**(metadata or {}), "job": json.dumps(fields)})


def read_job(
    message: Message,
    metadata: Mapping[str, str],
    payloads: PayloadStore,
    accept: Callable[[RequestHeader, int], None] | None = None,
) -> Job:
    """Decode an untrusted request to a client (job) that `job_parts` encoded.

    If the server sent only the digest of an entry's value, the value is read from `payloads`.
    """
    fields = read_fields("job", metadata.get("job", ""))
    header = RequestHeader(**read_fields("head", fields["head"]))
    client, digests, values = fields["client"], fields["digests"], dict(message.items())
    if accept is not None:
        accept(header, client)
    if unknown := sorted(values.keys() - set(fields["entries"])):
        raise ValueError(f"its job does not name the entry {unknown[0]!r:.60}")
    if missing := sorted(set(fields["entries"]) - values.keys() - digests.keys()):
        raise ValueError(f"its job lacks the entry {missing[0]!r:.60}")
    for key, digest in digests.items():
        values[key] = (
            payloads.keep(client, key, digest, values[key]) if key in values else payloads.load(client, key, digest)
        )
    request = ClientRequest(
        Message.unchecked({key: values[key] for key in fields["entries"]}), fields["memory"], digests
    )
    return Job(header, client, request, fields["ledger"])


def result_parts(
    version: str,
    result: ClientResult,
    charged: Sequence[Mapping[str, Any]] = (),
    metadata: Mapping[str, str] | None = None,
) -> Parts:
    """Encode a client's result and its charges to the privacy ledger as tensors and strings.

    If the result cannot be encoded, for example because the reply is not a `Message`, a result with the error is
    encoded instead.
    """
    fields: dict[str, Any] = {
        "version": version, "client": result.client, "error": _cut(result.error), "absent": result.absent,
        "seconds": result.seconds, "remembers": result.remembers, "charged": list(charged),
    }  # fmt: skip
    try:
        if not isinstance(result.reply, Message | None):
            raise TypeError(f"expected a Message, got {type(result.reply).__name__}")
        fields |= {"notes": dict(result.notes), "silent": result.reply is None}
        reply = Message() if result.reply is None else result.reply
        return to_parts(reply, {**(metadata or {}), "answer": json.dumps(fields)})
    except Exception as error:  # a method may return anything
        why = f"its reply cannot be sent: {type(error).__name__}: {error}"
        fields |= {"notes": {}, "silent": True, "error": _cut(why), "remembers": False}
        return to_parts(Message(), {**(metadata or {}), "answer": json.dumps(fields)})


def _cut(error: str | None) -> str | None:
    return None if error is None else error[:_MAX_ERROR]


def read_result(reply: Message, metadata: Mapping[str, str]) -> tuple[str, ClientResult, list[dict[str, Any]]]:
    """Decode an untrusted result that `result_parts` encoded."""
    try:
        fields = read_fields("answer", metadata.get("answer", ""))
    except ValueError as error:
        raise ValueError(f"not a result: {error}") from error
    result = ClientResult(
        fields["client"], None if fields["silent"] else reply, fields["error"],
        fields["absent"], fields["seconds"], fields["notes"], fields["remembers"],
    )  # fmt: skip
    return fields["version"], result, fields["charged"]
