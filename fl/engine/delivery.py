"""What passes between the server and one client: its side of the round, the message, and what the message weighs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from distillkit.privacy import Secret
from distillkit.rng import derive
from distillkit.sets import LabeledImages
from fl.codec import digest
from fl.engine.pool import Pool
from fl.engine.store import Memories
from fl.message import Entry, Message, sizes
from fl.method import Client, Method, Server

__all__ = ["Holding", "Post", "holding"]

_DIGEST_BYTES = 16


@dataclass(frozen=True)
class Holding:
    """What one client holds: training images, and (optionally) its own test images."""

    train: LabeledImages
    test: LabeledImages | None = None


def holding(client: LabeledImages | Holding) -> Holding:
    """A client as a `Holding`; a bare set is training images without test images."""
    if isinstance(client, LabeledImages):
        return Holding(client)
    if not isinstance(client, Holding):
        raise TypeError(f"clients must hold LabeledImages or Holding objects, got {type(client).__name__}")
    return client


class _Kept:
    """The client's memory of which bodies of kept entries it holds: JSON, key -> digest."""

    digests = Entry[str]("first")


class Post:
    """Reaches one client at a time.

    Attributes:
        committed: the last completed round; a client's memory is as of then, or as staged since.
        entries: what the method declares, by key.
    """

    def __init__(
        self,
        method: Method,
        clients: Sequence[LabeledImages | Holding],
        server: Server,
        memories: Memories,
        pool: Pool,
        secret: int | None = None,
    ) -> None:
        self.method, self.clients, self.server = method, clients, server
        self.memories, self.pool, self.secret, self.committed = memories, pool, secret, 0
        self.entries = {e.key: e for e in method.entries()}
        self._digests: dict[str, tuple[Any, str]] = {}

    def secret_of(self, owner: int | str) -> Secret:
        """Where the noise of a client, or of the server, comes from in this round."""
        if self.secret is None:
            return Secret()
        return Secret(int(torch.randint(2**62, (), generator=derive(self.secret, self.server.round, owner, "secret"))))

    def client(self, number: int) -> Client:
        """The client's side of this round."""
        server, held = self.server, holding(self.clients[number])
        memory, secret = self.memories.load(number, self.committed), self.secret_of(number)
        return Client(
            number, held.train, held.test, server.task, server.round, server.seed,
            memory=memory, stop=self.pool.stop, device=server.device, ledger=server.ledger, secret=secret,
        )  # fmt: skip

    def absent(self, client: Client) -> bool:
        """A client without images is not asked, unless that it has none is private."""
        return not self.method.private and not len(client.data)

    def message(self, number: int) -> Message:
        """What the server tells this client; made on the server's thread."""

        def work() -> Message:
            message = self.method.send(self.server, number)
            unknown = [key for key, _ in message.items() if key not in self.entries]
            if unknown:
                raise ValueError(f"{type(self.method).__name__} sends {unknown[0]}, which it does not declare")
            for key, value in message.items():
                if self.entries[key].kept:
                    self._digest(key, value)
            return message

        return self.pool.on_server(work)

    def _digest(self, key: str, value: Any) -> str:
        known = self._digests.get(key)
        if known is None or known[0] is not value:
            known = self._digests[key] = (value, digest(key, value))
        return known[1]

    def held(self, client: Client) -> str:
        """Which bodies of kept entries the client holds: JSON, key -> digest."""
        return client.memory.get(_Kept.digests, "{}")

    def down(self, message: Message, client: Client) -> dict[str, int]:
        """Bytes of the message to a client: of a kept entry that it holds, only the digest travels."""
        cost = sizes(message)
        known = json.loads(self.held(client))
        held = dict(known)
        for key, value in message.items():
            if not self.entries[key].kept:
                continue
            current = self._digest(key, value)
            if known.get(key) == current:
                cost = {k: n for k, n in cost.items() if k.split(":")[0] != key}
            cost[f"{key}:digest"] = _DIGEST_BYTES
            held[key] = current
        if held != known:
            client.memory[_Kept.digests] = json.dumps(held, sort_keys=True)
        return cost
