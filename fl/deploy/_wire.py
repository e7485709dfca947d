"""Jobs and answers as bytes: all that passes between the server's side and a place where clients run."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

from fl._codec import Parts, as_bytes, decode, to_parts
from fl.engine._transport import ClientRequest, ClientResult, RequestHeader
from fl.message import Message, Value

__all__ = [
    "Held",
    "Job",
    "PayloadCache",
    "PayloadMissing",
    "answer_parts",
    "job_parts",
    "pack_answer",
    "pack_job",
    "read_answer",
    "read_job",
    "unpack_answer",
    "unpack_job",
]

_FIELDS: dict[str, tuple[type, ...]] = {
    "version": (str,), "client": (int,), "error": (str, type(None)), "absent": (bool,), "seconds": (int, float),
    "notes": (dict,), "remembers": (bool,), "silent": (bool,), "charged": (list,),
}  # fmt: skip
"""The fields of an answer, and what each may be."""


class PayloadMissing(LookupError):
    """A client was told by a digest alone what it has not, or no longer; the job must be sent again, whole."""

    def __init__(self, client: int) -> None:
        super().__init__(f"client {client} lacks the body of a kept entry")
        self.client = client

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.client,), vars(self)


@dataclass(frozen=True)
class Job:
    """What is asked of one client.

    Attributes:
        header, client, request: see `Transport.exchange`.
        ledger: of a private run, what the client must know of its ledger (see `child_state`).
    """

    header: RequestHeader
    client: int
    request: ClientRequest
    ledger: Mapping[str, Any] | None = None


class Held(Protocol):
    """The payloads of kept entries that lie at a place where clients run."""

    def keep(self, client: int, key: str, digest: str, value: Value) -> Value:
        """Hold the body `value` of this `digest`, which a `client` got under the entry `key`; returns an equal one."""
        ...

    def of(self, client: int, key: str, digest: str) -> Value:
        """The body that a `client` was told to have under the entry `key`, by its `digest`.

        Raises:
            PayloadMissing: it has not.
        """
        ...


@dataclass
class PayloadCache:
    """The payloads of kept entries that clients hold: one for each client and entry, and equal ones are kept once."""

    _held: dict[tuple[int, str], str] = field(default_factory=dict)
    _values: dict[str, Value] = field(default_factory=dict)

    def keep(self, client: int, key: str, digest: str, value: Value) -> Value:
        """Hold a body that came; returns it, or the equal one that was here before.

        Args:
            client: who holds it.
            key: of its entry.
            digest: its fingerprint.
            value: the body.
        """
        self._held[client, key] = digest
        kept = self._values.setdefault(digest, value)
        self._values = {d: self._values[d] for d in set(self._held.values())}
        return kept

    def of(self, client: int, key: str, digest: str) -> Value:
        """The body that a `client` was told to have under the entry `key`, by its `digest`.

        Raises:
            PayloadMissing: it has not.
        """
        if self._held.get((client, key)) != digest:
            raise PayloadMissing(client)
        return self._values[digest]


def job_parts(job: Job, facts: Mapping[str, str] | None = None, *, whole: bool = False) -> Parts:
    """A job taken apart; of a kept entry that the client holds, only the digest, unless it has to travel `whole`.

    Args:
        job: what is asked.
        facts: strings that go with it.
        whole: whether every body travels.
    """
    request = job.request
    held = frozenset[str]() if whole else request.cached
    values = dict(request.message.items())
    said = {
        "head": asdict(job.header), "client": job.client, "ledger": job.ledger, "memory": request.memory,
        "entries": list(values), "digests": dict(request.digests), "held": sorted(held),
    }  # fmt: skip
    message = Message.unchecked({k: v for k, v in values.items() if k not in held})
    return to_parts(message, {**(facts or {}), "job": json.dumps(said)})


def read_job(message: Message, facts: Mapping[str, str], payloads: Held) -> Job:
    """Read back what `job_parts` took apart, with the payloads that the client holds put in.

    Args:
        message, facts: what `fl._codec.from_parts` makes of it.
        payloads: what this place holds; what came is added.

    Raises:
        ValueError: no job.
        PayloadMissing: a body is not there; ask for the job whole.
    """
    said = json.loads(facts["job"])
    client, digests, came = said["client"], said["digests"], dict(message.items())
    for key, digest in digests.items():
        came[key] = payloads.keep(client, key, digest, came[key]) if key in came else payloads.of(client, key, digest)
    request = ClientRequest(Message.unchecked({key: came[key] for key in said["entries"]}), said["memory"], digests)
    return Job(RequestHeader(**said["head"]), client, request, said["ledger"])


def pack_job(job: Job, *, whole: bool = False) -> bytes:
    """A `job` as bytes; of a kept entry that the client holds, only the digest, unless it has to travel `whole`."""
    return as_bytes(job_parts(job, whole=whole))


def unpack_job(data: bytes, payloads: Held) -> Job:
    """Read back what `pack_job` wrote; see `read_job`.

    Args:
        data: the bytes.
        payloads: what this place holds; what came is added.
    """
    return read_job(*decode(data), payloads)


def answer_parts(
    version: str,
    answer: ClientResult,
    charged: Sequence[Mapping[str, Any]] = (),
    facts: Mapping[str, str] | None = None,
) -> Parts:
    """An answer taken apart, with the version of the header that it answers, and what was charged for it.

    One that cannot be written (a NaN among its numbers, say) is an answer with that error.

    Args:
        version: of the header.
        answer: what came of it.
        charged: lines of a ledger.
        facts: strings that go with it.
    """
    said: dict[str, Any] = {
        "version": version, "client": answer.client, "error": answer.error, "absent": answer.absent,
        "seconds": answer.seconds, "remembers": answer.remembers, "charged": list(charged),
    }  # fmt: skip
    try:
        if not isinstance(answer.reply, Message | None):
            raise TypeError(f"want a Message, got {type(answer.reply).__name__}")
        said |= {"notes": dict(answer.notes), "silent": answer.reply is None}
        reply = Message() if answer.reply is None else answer.reply
        return to_parts(reply, {**(facts or {}), "answer": json.dumps(said)})
    except Exception as error:  # a method may answer anything
        why = f"sent what cannot travel: {type(error).__name__}: {error}"
        said |= {"notes": {}, "silent": True, "error": why, "remembers": False}
        return to_parts(Message(), {**(facts or {}), "answer": json.dumps(said)})


def read_answer(reply: Message, facts: Mapping[str, str]) -> tuple[str, ClientResult, list[dict[str, Any]]]:
    """Read back what `answer_parts` took apart: the version that it bears, the answer, and what was charged for it.

    Args:
        reply, facts: what `fl._codec.from_parts` makes of it; it may come from anywhere.

    Raises:
        ValueError: no answer.
    """
    try:
        said = json.loads(facts["answer"])
        answer = ClientResult(
            said["client"], None if said["silent"] else reply, said["error"], said["absent"], said["seconds"],
            said["notes"], said["remembers"],
        )  # fmt: skip
        version, charged = said["version"], said["charged"]
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"not an answer: {type(error).__name__}: {error}") from error
    for name, kind in _FIELDS.items():
        if type(said[name]) not in kind:
            raise ValueError(f"not an answer: its {name} is {said[name]!r:.60}")
    if not all(isinstance(line, dict) for line in charged):
        raise ValueError("not an answer: what it charged must be a list of maps")
    return version, answer, charged


def pack_answer(version: str, answer: ClientResult, charged: Sequence[Mapping[str, Any]] = ()) -> bytes:
    """An `answer` to the header of this `version` as bytes, with what was `charged`; see `answer_parts`."""
    return as_bytes(answer_parts(version, answer, charged))


def unpack_answer(data: bytes) -> tuple[str, ClientResult, list[dict[str, Any]]]:
    """Read back what `pack_answer` wrote, the bytes `data`; see `read_answer`."""
    return read_answer(*decode(data))
