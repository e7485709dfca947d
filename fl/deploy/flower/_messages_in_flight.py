"""Messages on their way over Flower's grid."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from fl._codec import Parts
from fl.deploy.flower._import import flower
from fl.deploy.flower._records import LARGEST, from_records, to_records

__all__ = ["Mail", "unanswered"]


class Mail:
    """Messages on their way over Flower's grid, each with whom it was sent to.

    Args:
        grid: Flower's.
        poll: seconds between two looks for answers.
        largest: bytes of the largest answer that is read.
    """

    def __init__(self, grid: Any, poll: float, largest: int = LARGEST) -> None:
        self.grid, self.poll, self._largest = grid, poll, largest
        self._open: dict[str, tuple[int, float]] = {}

    def send(self, kind: str, to: Mapping[int, tuple[int, Parts]], group: str, seconds: float) -> list[int]:
        """Send to clients; those whose message Flower did not take are returned.

        Args:
            kind: Flower's message type.
            to: by client, the node and what it is told.
            group: Flower's group of the messages.
            seconds: after which nobody waits for an answer any more.
        """
        made = flower("app").Message
        letters = [made(to_records(parts), node, kind, ttl=seconds, group_id=group) for node, parts in to.values()]
        given = list(self.grid.push_messages(letters))
        refused = []
        for client, name in zip(to, [*given, *[""] * (len(letters) - len(given))]):
            if name:
                self._open[name] = (client, time.monotonic() + seconds)
            else:
                refused.append(client)
        return refused

    def collect(self) -> list[tuple[int, Any]]:
        """Answers that have come, by client; None for one that is not waited for any more. Waits a little if none has.

        What answers nothing that is waited for, as a second answer, is dropped.
        """
        found: list[tuple[int, Any]] = []
        for message in self.grid.pull_messages(list(self._open)):
            client, _ = self._open.pop(message.metadata.reply_to_message_id, (None, 0.0))
            if client is not None:
                found.append((client, message))
        for name, (client, end) in list(self._open.items()):
            if time.monotonic() > end:
                del self._open[name]
                found.append((client, None))
        if not found:
            time.sleep(self.poll)
        return found

    def read(self, message: Any) -> Parts:
        """The parts of an answer.

        Args:
            message: one that has come, and is no error.

        Raises:
            ValueError: it is too large, or none of ours; see `from_records`.
        """
        return from_records(message.content, self._largest)

    def forget(self) -> None:
        """Nothing is waited for any more."""
        self._open.clear()


def unanswered(message: Any, seconds: float) -> str:
    """Why there is no answer: the `message` is Flower's error, or None if nothing has come in so many `seconds`."""
    if message is None:
        return f"lost: no answer in {seconds:g} seconds"
    return f"lost: Flower says {message.error.reason or 'nothing'} (code {message.error.code})"
