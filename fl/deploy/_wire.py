"""Encoding of requests (jobs) and results as tensors and strings, for clients on other machines.

The value of a cached entry is called a payload. If a client already has it, the server sends only its digest.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fl._codec import Parts, encode, to_parts
from fl.deploy._fields import read_fields
from fl.engine._transport import ClientRequest, ClientResult, RequestHeader
from fl.engine.store import CheckpointError, read_message, write_atomically
from fl.message import Message, Value

_MAX_ERROR = 500
"""Maximum number of characters of a client's error text in the history."""


class PayloadMissing(LookupError):
    """Error: a client lacks the payload of a cached entry, so the server must send all payloads again."""


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


class PayloadFolder:
    """A client's store of payloads in a folder, with a file for the latest payload of each entry."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def _file(self, key: str) -> Path:
        return self._folder / f"{hashlib.blake2b(key.encode(), digest_size=12).hexdigest()}.safetensors"

    def keep(self, key: str, digest: str, value: Value) -> None:
        """Save a payload."""
        write_atomically(self._file(key), encode(Message.unchecked({key: value}), {"digest": digest}))

    def load(self, key: str, digest: str) -> Value:
        """Return a saved payload; raise `PayloadMissing` if there is none with this digest."""
        try:
            message, metadata = read_message(self._file(key))
        except CheckpointError as error:  # the server sends the payload again
            raise PayloadMissing(key) from error
        if metadata.get("digest") != digest:
            raise PayloadMissing(key)
        return dict(message.items())[key]


def job_parts(job: Job, metadata: Mapping[str, str] | None = None, *, include_cached: bool = False) -> Parts:
    """Encode a job as tensors and strings. An entry that the client has in its cache is encoded as its digest."""
    request = job.request
    cached = frozenset[str]() if include_cached else request.cached
    values = dict(request.message.items())
    fields = {
        "header": asdict(job.header), "client": job.client, "ledger": job.ledger, "memory": request.memory,
        "entries": list(values), "digests": dict(request.digests),
    }  # fmt: skip
    message = Message.unchecked({k: v for k, v in values.items() if k not in cached})
    return to_parts(message, {**(metadata or {}), "job": json.dumps(fields)})


def read_job(
    message: Message,
    metadata: Mapping[str, str],
    payloads: PayloadFolder,
    accept: Callable[[RequestHeader, int], None] | None = None,
) -> Job:
    """Decode an untrusted job that `job_parts` encoded, with missing payloads from `payloads`.

    The function `accept` may refuse the job before any payload is stored.
    """
    fields = read_fields("job", metadata.get("job", ""))
    header = RequestHeader(**read_fields("header", fields["header"]))
    client, digests, values = fields["client"], fields["digests"], dict(message.items())
    if accept is not None:
        accept(header, client)
    if unknown := sorted(values.keys() - set(fields["entries"])):
        raise ValueError(f"its job does not name the entry {unknown[0]!r:.60}")
    if missing := sorted(set(fields["entries"]) - values.keys() - digests.keys()):
        raise ValueError(f"its job lacks the entry {missing[0]!r:.60}")
    for key, digest in digests.items():
        if key in values:
            payloads.keep(key, digest, values[key])
        else:
            values[key] = payloads.load(key, digest)
    request = ClientRequest(
        Message.unchecked({key: values[key] for key in fields["entries"]}), fields["memory"], digests
    )
    return Job(header, client, request, fields["ledger"])


def result_parts(result: ClientResult, metadata: Mapping[str, str] | None = None) -> Parts:
    """Encode a client's result as tensors and strings.

    If the result cannot be encoded, for example because the reply is not a `Message`, a result with the error is
    encoded instead.
    """
    fields: dict[str, Any] = {
        "error": _cut(result.error), "absent": result.absent, "seconds": result.seconds,
        "remembers": result.remembers, "notes": {},
    }  # fmt: skip
    try:
        if not isinstance(result.reply, Message | None):
            raise TypeError(f"expected a Message, got {type(result.reply).__name__}")
        reply = Message() if result.reply is None else result.reply
        encoded = json.dumps({**fields, "notes": dict(result.notes)})
        return to_parts(reply, {**(metadata or {}), "result": encoded})
    except Exception as error:  # a method may return anything
        why = f"its reply cannot be sent: {type(error).__name__}: {error}"
        fields |= {"error": _cut(why), "remembers": False}
        return to_parts(Message(), {**(metadata or {}), "result": json.dumps(fields)})


def _cut(error: str | None) -> str | None:
    return None if error is None else error[:_MAX_ERROR]


def read_result(client: int, reply: Message, metadata: Mapping[str, str]) -> ClientResult:
    """Decode an untrusted result of a client that `result_parts` encoded. A reply without entries is None."""
    fields = read_fields("result", metadata.get("result", ""))
    return ClientResult(client=client, reply=reply if len(reply) else None, **fields)
