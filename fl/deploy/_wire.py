"""Encoding of jobs and results as bytes, for clients in other processes or on other machines."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

from fl._codec import Parts, as_bytes, decode, to_parts
from fl.deploy._fields import read_fields
from fl.engine._transport import ClientRequest, ClientResult, RequestHeader
from fl.message import Message, Value

__all__ = [
    "Job", "PayloadCache", "PayloadMissing", "PayloadStore", "job_parts", "pack_job", "pack_result", "read_job",
    "read_result", "result_parts", "unpack_job", "unpack_result",
]  # fmt: skip

_MAX_ERROR = 500
"""Maximum number of characters of a client's error text in the history."""


class PayloadMissing(LookupError):
    """A payload that was sent only as its digest is missing on the client; the job must be sent again in full."""

    def __init__(self, client: int) -> None:
        super().__init__(f"client {client} lacks the payload of a cached entry")
        self.client = client

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.client,), vars(self)


@dataclass(frozen=True)
class Job:
    """One request to one client.

    Attributes:
        header: part of the request that is the same for all clients.
        client: index of the client.
        request: part of the request that concerns this client.
        ledger: state of the run's privacy ledger that the client needs (see `child_state`); None if the run is not
            private.
    """

    header: RequestHeader
    client: int
    request: ClientRequest
    ledger: Mapping[str, Any] | None = None


class PayloadStore(Protocol):
    """Store of received payloads (values of cached entries), in a process or on a machine that runs clients."""

    def keep(self, client: int, key: str, digest: str, value: Value) -> Value:
        """Store a `client`'s payload `value` of the entry `key` under its `digest`, and return an equal payload."""

    def of(self, client: int, key: str, digest: str) -> Value:
        """Return a `client`'s payload of the entry `key`, by its `digest`.

        Raises:
            PayloadMissing: the payload is not stored for this client.
        """


@dataclass
class PayloadCache:
    """In-memory store of the latest payload of each entry, for each client. Equal payloads are stored only once."""

    _held: dict[tuple[int, str], str] = field(default_factory=dict)
    _values: dict[str, Value] = field(default_factory=dict)

    def keep(self, client: int, key: str, digest: str, value: Value) -> Value:
        """Store a received payload, and return it or an equal payload that was stored before.

        Args:
            client: index of the client.
            key: key of the entry.
            digest: fingerprint of the payload.
            value: the payload.
        """
        self._held[client, key] = digest
        kept = self._values.setdefault(digest, value)
        self._values = {d: self._values[d] for d in set(self._held.values())}
        return kept

    def of(self, client: int, key: str, digest: str) -> Value:
        """Return a `client`'s payload of the entry `key`, by its `digest`.

        Raises:
            PayloadMissing: the payload is not stored for this client.
        """
        if self._held.get((client, key)) != digest:
            raise PayloadMissing(client)
        return self._values[digest]


def job_parts(job: Job, facts: Mapping[str, str] | None = None, *, whole: bool = False) -> Parts:
    """Encode a job. An entry that the client has in its cache is encoded only as its digest.

    Args:
        job: the job to encode.
        facts: strings to send with the job.
        whole: whether to encode every payload in full, including cached ones.
    """
    request = job.request
    cached = frozenset[str]() if whole else request.cached
    values = dict(request.message.items())
    fields = {
        "head": asdict(job.header), "client": job.client, "ledger": job.ledger, "memory": request.memory,
        "entries": list(values), "digests": dict(request.digests), "held": sorted(cached),
    }  # fmt: skip
    message = Message.unchecked({k: v for k, v in values.items() if k not in cached})
    return to_parts(message, {**(facts or {}), "job": json.dumps(fields)})


def read_job(
    message: Message,
    facts: Mapping[str, str],
    payloads: PayloadStore,
    accept: Callable[[RequestHeader, int], None] | None = None,
) -> Job:
    """Decode a job that `job_parts` encoded, and replace digests by the stored payloads. The input is untrusted.

    Args:
        message: message that `fl._codec.from_parts` returned.
        facts: strings that `fl._codec.from_parts` returned.
        payloads: store of this process or machine; payloads in the message are added to it.
        accept: function of the header and the client's index, which may refuse the job by an exception. It is called
            before any payload is stored.

    Raises:
        ValueError: the message is not a job.
        PayloadMissing: a payload is not stored, so the server must send the job again in full.
    """
    fields = read_fields("job", facts.get("job", ""))
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
            payloads.keep(client, key, digest, values[key]) if key in values else payloads.of(client, key, digest)
        )
    request = ClientRequest(
        Message.unchecked({key: values[key] for key in fields["entries"]}), fields["memory"], digests
    )
    return Job(header, client, request, fields["ledger"])


def pack_job(job: Job, *, whole: bool = False) -> bytes:
    """Encode a `job` as bytes; see `job_parts` for `whole`."""
    return as_bytes(job_parts(job, whole=whole))


def unpack_job(data: bytes, payloads: PayloadStore) -> Job:
    """Decode a job that `pack_job` encoded; see `read_job`.

    Args:
        data: the encoded job.
        payloads: store of this process or machine; payloads in the job are added to it.
    """
    return read_job(*decode(data), payloads)


def result_parts(
    version: str,
    result: ClientResult,
    charged: Sequence[Mapping[str, Any]] = (),
    facts: Mapping[str, str] | None = None,
) -> Parts:
    """Encode a result, together with the version in its request's header and the client's privacy charges.

    A result that cannot be encoded, for example because a number is NaN, is replaced by a result with the error.

    Args:
        version: version in the request's header (`RequestHeader.version`).
        result: the result to encode.
        charged: lines that the client added to the privacy ledger.
        facts: strings to send with the result.
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
        return to_parts(reply, {**(facts or {}), "answer": json.dumps(fields)})
    except Exception as error:  # a method may return anything
        why = f"its reply cannot be sent: {type(error).__name__}: {error}"
        fields |= {"notes": {}, "silent": True, "error": _cut(why), "remembers": False}
        return to_parts(Message(), {**(facts or {}), "answer": json.dumps(fields)})


def _cut(error: str | None) -> str | None:
    return None if error is None else error[:_MAX_ERROR]


def read_result(reply: Message, facts: Mapping[str, str]) -> tuple[str, ClientResult, list[dict[str, Any]]]:
    """Decode the version, the result and the charges that `result_parts` encoded. The input is untrusted.

    Args:
        reply: message that `fl._codec.from_parts` returned.
        facts: strings that `fl._codec.from_parts` returned.

    Raises:
        ValueError: the message is not a result.
    """
    try:
        fields = read_fields("answer", facts.get("answer", ""))
    except ValueError as error:
        raise ValueError(f"not a result: {error}") from error
    result = ClientResult(
        fields["client"], None if fields["silent"] else reply, fields["error"],
        fields["absent"], fields["seconds"], fields["notes"], fields["remembers"],
    )  # fmt: skip
    return fields["version"], result, fields["charged"]


def pack_result(version: str, result: ClientResult, charged: Sequence[Mapping[str, Any]] = ()) -> bytes:
    """Encode a `result` as bytes; see `result_parts` for `version` and `charged`."""
    return as_bytes(result_parts(version, result, charged))


def unpack_result(data: bytes) -> tuple[str, ClientResult, list[dict[str, Any]]]:
    """Decode the bytes `data` that `pack_result` returned; see `read_result`."""
    return read_result(*decode(data))
