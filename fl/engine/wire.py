"""Jobs and answers as bytes: all that passes between the server's side and a place where clients run."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from fl.codec import decode, encode
from fl.engine.seam import Answer, Head, Letter
from fl.message import Message, Value

__all__ = ["Bodies", "Job", "Lacking", "pack_answer", "pack_job", "unpack_answer", "unpack_job"]


class Lacking(LookupError):
    """A client was told by a digest alone what it has not, or no longer; the job must be sent again, whole."""

    def __init__(self, client: int) -> None:
        super().__init__(f"client {client} lacks the body of a kept entry")
        self.client = client


@dataclass(frozen=True)
class Job:
    """What is asked of one client.

    Attributes:
        head, client, letter: see `Cohort.ask`.
        ledger: of a private run, what the client must know of its ledger (`distillkit.privacy.branch.known_of`).
    """

    head: Head
    client: int
    letter: Letter
    ledger: Mapping[str, Any] | None = None


@dataclass
class Bodies:
    """The bodies of kept entries that clients hold: one for each client and entry, and equal ones are kept once."""

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
            Lacking: it has not.
        """
        if self._held.get((client, key)) != digest:
            raise Lacking(client)
        return self._values[digest]


def pack_job(job: Job, *, whole: bool = False) -> bytes:
    """A job as bytes; of a kept entry that the client holds, only the digest, unless it has to travel `whole`."""
    letter = job.letter
    held = frozenset[str]() if whole else letter.held
    values = dict(letter.message.items())
    facts = {
        "head": asdict(job.head), "client": job.client, "ledger": job.ledger, "memory": letter.memory,
        "entries": list(values), "digests": dict(letter.digests), "held": sorted(held),
    }  # fmt: skip
    return encode(Message.of({k: v for k, v in values.items() if k not in held}), {"job": json.dumps(facts)})


def unpack_job(data: bytes, bodies: Bodies) -> Job:
    """Read back what `pack_job` wrote, with the bodies that the client holds put in.

    Args:
        data: the bytes.
        bodies: what this place holds; what came is added.

    Raises:
        ValueError: no job.
        Lacking: a body is not there; ask for the job whole.
    """
    message, found = decode(data)
    facts = json.loads(found["job"])
    client, digests, came = facts["client"], facts["digests"], dict(message.items())
    for key, digest in digests.items():
        came[key] = bodies.keep(client, key, digest, came[key]) if key in came else bodies.of(client, key, digest)
    letter = Letter(Message.of({key: came[key] for key in facts["entries"]}), facts["memory"], digests)
    return Job(Head(**facts["head"]), client, letter, facts["ledger"])


def pack_answer(version: str, answer: Answer, charged: Sequence[Mapping[str, Any]] = ()) -> bytes:
    """An answer as bytes, with the version of the head that it answers, and what was charged for it.

    One that cannot be written (a NaN among its numbers, say) is an answer with that error.
    """
    facts = {
        "version": version, "client": answer.client, "error": answer.error, "absent": answer.absent,
        "seconds": answer.seconds, "remembers": answer.remembers, "charged": list(charged),
    }  # fmt: skip
    try:
        if not isinstance(answer.reply, Message | None):
            raise TypeError(f"want a Message, got {type(answer.reply).__name__}")
        facts |= {"notes": dict(answer.notes), "silent": answer.reply is None}
        return encode(Message() if answer.reply is None else answer.reply, {"answer": json.dumps(facts)})
    except Exception as error:  # a method may answer anything
        why = f"sent what cannot travel: {type(error).__name__}: {error}"
        facts |= {"notes": {}, "silent": True, "error": why, "remembers": False}
        return encode(Message(), {"answer": json.dumps(facts)})


def unpack_answer(data: bytes) -> tuple[str, Answer, list[dict[str, Any]]]:
    """Read back what `pack_answer` wrote: the version that the answer bears, the answer, and what was charged for it.

    Args:
        data: the bytes.

    Raises:
        ValueError: no answer.
    """
    reply, found = decode(data)
    facts = json.loads(found["answer"])
    answer = Answer(
        facts["client"], None if facts["silent"] else reply, facts["error"], facts["absent"], facts["seconds"],
        facts["notes"], facts["remembers"],
    )  # fmt: skip
    return facts["version"], answer, facts["charged"]
