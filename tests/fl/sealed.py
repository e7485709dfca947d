"""A round of secure sums without an engine, step by step, so that tests may change what travels."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor

from fl.secure import Keyring, Registry
from fl.secure._session import Session
from fl.secure._signed_messages import Bundle, Round
from fl.secure._unmasking import Opening


class InMemory(Keyring):
    """A keyring without files, for laws that play many rounds."""

    def __init__(self) -> None:
        super().__init__("nowhere")
        self.identities: dict[int, bytes] = {}
        self.sessions: dict[int, Any] = {}

    def enroll(self, client: int) -> str:
        from fl.secure import _crypto

        return _crypto.identity_public(self.identities.setdefault(client, _crypto.new_identity())).hex()

    def identity(self, client: int) -> bytes:
        return self.identities[client]

    def session(self, client: int) -> dict[str, Any] | None:
        return self.sessions.get(client)

    def begin(self, client: int, session: Any) -> None:
        self.sessions[client] = dict(session)

    def end(self, client: int) -> None:
        del self.sessions[client]


class Table:
    """All parties of one sum at one table, and the server's notes of what it saw.

    Args:
        clients: their numbers.
        threshold: t.
        number: of the round.
        before: another table, whose keyring and registry are taken over.
    """

    def __init__(self, clients: Sequence[int], threshold: int, number: int = 1, before: Table | None = None) -> None:
        self.keyring: Any = before.keyring if before else InMemory()
        self.registry: Registry = before.registry if before else self.keyring.registry(list(clients))
        self.about = Round(seed=3, number=number, threshold=threshold)
        self.sessions = {k: Session(self.keyring, self.registry, self.about, k) for k in clients}
        self.bundles: dict[int, Bundle] = {}
        self.boxes: dict[int, dict[int, bytes]] = {}
        self.masked: dict[int, Tensor] = {}
        self.signatures: dict[int, bytes] = {}
        self.shares: dict[int, list[bytes]] = {}

    def announce(self) -> None:
        self.bundles = {k: Bundle(session.announce()) for k, session in self.sessions.items()}

    def deal(self, who: Collection[int] | None = None) -> None:
        for k in self.sessions if who is None else who:
            self.boxes[k] = dict(zip(sorted(self.bundles), self.sessions[k].deal(self.bundles)))

    def told(self, client: int) -> dict[int, bytes]:
        """The boxes for one client."""
        return {sender: boxes[client] for sender, boxes in self.boxes.items()}

    def cover(self, vectors: dict[int, Tensor], who: Collection[int]) -> None:
        for k in who:
            self.masked[k] = self.sessions[k].cover(vectors[k], self.told(k))

    def assent(self, who: Collection[int] | None = None) -> None:
        survivors = sorted(self.masked)
        for k in survivors if who is None else who:
            self.signatures[k] = self.sessions[k].assent(survivors)

    def disclose(self, who: Collection[int]) -> None:
        for k in who:
            self.shares[k] = self.sessions[k].open(self.signatures)

    def opening(self) -> Opening:
        shares = {k: self.shares[k] for k in sorted(self.shares)[: self.about.threshold]}
        return Opening(
            self.bundles, self.about.transcript(self.bundles), sorted(self.boxes), sorted(self.masked), shares
        )

    def sum(self) -> Tensor:
        total = torch.stack([self.masked[k] for k in sorted(self.masked)]).sum(0)
        self.opening().lift(total)
        return total

    def upto(self, step: str, vectors: dict[int, Tensor] | None = None) -> Table:
        """Play with nobody missing, up to a step and with it."""
        numbers = list(self.sessions)
        steps = {
            "announce": self.announce,
            "deal": self.deal,
            "cover": lambda: self.cover(vectors or plain(numbers), numbers),
            "assent": self.assent,
            "disclose": lambda: self.disclose(numbers),
        }
        for name, play in steps.items():
            play()
            if name == step:
                break
        return self


def plain(clients: Collection[int], length: int = 500) -> dict[int, Tensor]:
    """Vectors as small models have them: whole numbers of 40 bits around 0."""
    generator = torch.Generator().manual_seed(5)
    return {k: torch.randint(-(2**40), 2**40, (length,), generator=generator) for k in clients}
