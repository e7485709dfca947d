"""One round of the secure-sum protocol without an engine, so that tests can change single messages."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fl.secure import Keyring, Registry, _crypto, _shamir
from fl.secure._session import ClientSession
from fl.secure._signed_messages import KeyBundle, RoundContext
from fl.secure._unmasking import unmask


class InMemoryKeyring(Keyring):
    """Keyring without files, for tests with many rounds."""

    def __init__(self) -> None:
        super().__init__("nowhere")
        self.identities: dict[int, bytes] = {}
        self.sessions: dict[int, Any] = {}

    def enroll(self, client: int) -> str:
        return _crypto.signing_public_key(self.identities.setdefault(client, _crypto.new_signing_key())).hex()

    def signing_key(self, client: int) -> bytes:
        return self.identities[client]

    def load_session(self, client: int) -> dict[str, Any] | None:
        return self.sessions.get(client)

    def save_session(self, client: int, session: Any) -> None:
        self.sessions[client] = dict(session)

    def delete_session(self, client: int) -> None:
        del self.sessions[client]


class ProtocolRun:
    """All clients of one sum, and the messages that the server received.

    Args:
        clients: their numbers.
        threshold: t.
        number: number of the round.
        before: another run, with the keyring and registry to use.
    """

    def __init__(
        self, clients: Sequence[int], threshold: int, number: int = 1, before: ProtocolRun | None = None
    ) -> None:
        self.keyring: Any = before.keyring if before else InMemoryKeyring()
        self.registry: Registry = before.registry if before else self.keyring.registry(list(clients))
        self.context = RoundContext(seed=3, number=number, threshold=threshold)
        self.sessions = {k: ClientSession(self.keyring, self.registry, self.context, k) for k in clients}
        self.bundles: dict[int, KeyBundle] = {}
        self.boxes: dict[int, dict[int, bytes]] = {}
        self.masked: dict[int, Tensor] = {}
        self.signatures: dict[int, bytes] = {}
        self.shares: dict[int, list[bytes]] = {}

    def announce(self) -> None:
        self.bundles = {k: KeyBundle(session.announce_keys()) for k, session in self.sessions.items()}

    def deal(self, who: Collection[int] | None = None) -> None:
        for k in self.sessions if who is None else who:
            self.boxes[k] = dict(zip(sorted(self.bundles), self.sessions[k].share_secrets(self.bundles)))

    def boxes_for(self, client: int) -> dict[int, bytes]:
        """Return the boxes for one client."""
        return {sender: boxes[client] for sender, boxes in self.boxes.items()}

    def mask(self, vectors: dict[int, Tensor], who: Collection[int]) -> None:
        for k in who:
            self.masked[k] = self.sessions[k].mask_vector(vectors[k], self.boxes_for(k))

    def assent(self, who: Collection[int] | None = None) -> None:
        survivors = sorted(self.masked)
        for k in survivors if who is None else who:
            self.signatures[k] = self.sessions[k].sign_survivors(survivors)

    def disclose(self, who: Collection[int]) -> None:
        for k in who:
            self.shares[k] = self.sessions[k].disclose_shares(self.signatures)

    def sum(self) -> Tensor:
        total = torch.stack([self.masked[k] for k in sorted(self.masked)]).sum(0)
        shares = {k: self.shares[k] for k in sorted(self.shares)[: self.context.threshold]}
        transcript = self.context.transcript(self.bundles)
        unmask(total, self.bundles, transcript, sorted(self.boxes), sorted(self.masked), shares)
        return total

    def secret(self, index: int) -> bytes:
        """Return the secret of a partner that the shares of clients 0 to 2 give."""
        return recover({k + 1: int.from_bytes(self.shares[k][index]) for k in range(3)}).to_bytes(32)

    def run_until(self, step: str, vectors: dict[int, Tensor] | None = None) -> ProtocolRun:
        """Run all steps up to and including one, without dropouts."""
        numbers = list(self.sessions)
        steps = {
            "announce": self.announce,
            "deal": self.deal,
            "mask": lambda: self.mask(vectors or plain(numbers), numbers),
            "assent": self.assent,
            "disclose": lambda: self.disclose(numbers),
        }
        for name, play in steps.items():
            play()
            if name == step:
                break
        return self


def recover(shares: Mapping[int, int]) -> int:
    """Return the secret of Shamir's shares, by their points."""
    weights = _shamir.lagrange_coefficients(list(shares))
    return sum(share * weight for share, weight in zip(shares.values(), weights)) % _shamir.PRIME


def correlation(one: Tensor, other: Tensor) -> float:
    """Return the correlation of the numbers of two vectors."""
    return float(torch.corrcoef(torch.stack([one.double(), other.double()]))[0, 1])


def plain(clients: Collection[int], length: int = 500) -> dict[int, Tensor]:
    """Return vectors like those of small models: integers of 40 bits around 0."""
    generator = torch.Generator().manual_seed(5)
    return {k: torch.randint(-(2**40), 2**40, (length,), generator=generator) for k in clients}
