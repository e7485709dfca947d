"""What one client is asked at a time: one question, or two that go to its node in one message."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from fl._codec import Parts, entry_key
from fl.deploy._wire import Job, job_parts
from fl.deploy.flower._message_pairs import join, split
from fl.engine._transport import ClientResult
from fl.message import payload_bytes

__all__ = ["Question", "Take", "pack", "unpack"]

Take = Callable[[ClientResult], None]


@dataclass(frozen=True)
class Question:
    """One question to a client.

    Attributes:
        job: what is asked.
        take: gets the answer; None: it is yielded.
        resent: bytes of bodies that the client lacked, so that it is asked again; None if it was asked once.
        common: bytes of its letter that the other one in the same message had, but for bodies: who is told one twice
            has it from the first letter, and the second counts only its digest.
    """

    job: Job
    take: Take | None
    resent: int | None = None
    common: int = 0

    def again(self) -> Question:
        """The same question, for a client that lacks a body."""
        costs = payload_bytes(self.job.request.message).items()
        return replace(self, resent=sum(n for key, n in costs if key.split(":")[0] in self.job.request.cached))


def pack(
    questions: Sequence[Question], facts: Mapping[str, str], *, whole: bool = False
) -> tuple[list[Question], Parts]:
    """The message that asks one or two questions.

    Args:
        questions: to one client.
        facts: strings that go with each.
        whole: whether every body travels, held or not.

    Returns:
        The questions, with what they have in common; the parts of the message.
    """
    parts, *rest = [job_parts(one.job, facts, whole=whole) for one in questions]
    if not rest:
        return list(questions), parts
    tensors, kept = parts[0], questions[0].job.request.digests
    parts, common = join(parts, rest[0])
    size = sum(tensors[name].nbytes for name in common if entry_key(name) not in kept)
    return [replace(questions[0], common=size), questions[1]], parts


def unpack(questions: Sequence[Question], parts: Parts) -> list[Parts]:
    """The answers to the questions, from the parts of what came; a node that could read none says so once for all.

    Raises:
        ValueError: these are no answers to so many questions.
    """
    found = split(parts)
    if len(found) == 1:
        return found * len(questions)
    if len(found) != len(questions):
        raise ValueError("it answers two questions, and was asked one")
    return found
