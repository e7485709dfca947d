"""Secure sums: the keys are in a folder next to the run's, and the server reads only the public keys."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fl import Client, FedAvg, Filtered, Keyring, Message, Registry, SecureSums
from fl.addons import SCAFFOLD


@dataclass(frozen=True, kw_only=True)
class Leaving(SecureSums):
    """Client 1 drops out of round 2 after masking its reply."""

    key = "SecureSums"

    def out(self, client: Client, message: Message, reply: Message) -> Message:
        masked = super().out(client, message, reply)
        if (client.round, client.id) == (2, 1):
            raise ConnectionError("the line went dead")
        return masked


SEALED: dict[str, type[SecureSums]] = {"SecureSums": SecureSums, "Leaving": Leaving}
BOUNDS = {FedAvg.update: 8.0, SCAFFOLD.drift: 100.0}
"""Maxima of the entries of a reply."""


def enrol(keys: Path, clients: int) -> None:
    """Create all clients' keys in a folder, and the registry of the public keys."""
    Keyring(keys / "secret").registry(clients).write(keys / "registry.json")


def averaging(most: float, **how: Any) -> FedAvg:
    """Return the method inside the filter; `most` limits the number of samples."""
    return FedAvg(SCAFFOLD(), max_samples=most, **how)


def sealed(name: str, keys: Path, *, node: bool, **how: Any) -> Filtered:
    """Return the method of a node, or that of the server, without secrets."""
    ring = Keyring(keys / "secret") if node else None
    secure = SEALED[name](Registry.read(keys / "registry.json"), keyring=ring, threshold=3, bounds=BOUNDS)
    return Filtered(averaging(400, **how), secure)
