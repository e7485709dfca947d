"""Secure sums: the keys lie in a folder beside the run's, and the server's side reads the public ones alone."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fl import Client, FedAvg, Filtered, Keyring, Message, Registry, SecureSums
from fl.addons import SCAFFOLD


@dataclass(frozen=True, kw_only=True)
class Leaving(SecureSums):
    """Client 1 drops out of round 2 when its reply is under masks and the others count on it."""

    key = "SecureSums"

    def out(self, client: Client, message: Message, reply: Message) -> Message:
        masked = super().out(client, message, reply)
        if (client.round, client.id) == (2, 1):
            raise ConnectionError("the line went dead")
        return masked


SEALED: dict[str, type[SecureSums]] = {"SecureSums": SecureSums, "Leaving": Leaving}
MOST = {FedAvg.update: 8.0, SCAFFOLD.drift: 100.0}
"""No number of a reply is beyond these."""


def enrol(keys: Path, clients: int) -> None:
    """Make everybody's keys in a folder, and the registry of the public ones."""
    Keyring(keys / "secret").registry(clients).write(keys / "registry.json")


def averaging(most: float, **how: Any) -> FedAvg:
    """What is under the masks, or is not; no client has more samples."""
    return FedAvg(SCAFFOLD(), max_samples=most, **how)


def sealed(name: str, keys: Path, *, node: bool, **how: Any) -> Filtered:
    """A method as a node has it, or as the server has it: without secrets."""
    ring = Keyring(keys / "secret") if node else None
    secure = SEALED[name](Registry.read(keys / "registry.json"), keyring=ring, threshold=3, most=MOST)
    return Filtered(averaging(400, **how), secure)
