"""What clients sign in a round, and the bundle of keys that each of them announces: what both sides must read alike."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fl.secure import _crypto
from fl.secure._crypto import KEY_BYTES, SIGNATURE_BYTES, NotAuthentic
from fl.secure.keys import Registry

__all__ = ["BUNDLE_BYTES", "Bundle", "Round", "announced", "numbers"]

BUNDLE_BYTES = 3 * KEY_BYTES + SIGNATURE_BYTES


def numbers(*values: int) -> bytes:
    """Whole numbers (`values`) as bytes, 8 each; for what is signed."""
    return b"".join(value.to_bytes(8, "little", signed=True) for value in values)


@dataclass(frozen=True)
class Round:
    """Which sum it is: nothing that was made for one is of use in another.

    Attributes:
        seed: of the run.
        number: of the round.
        threshold: how many clients a sum is over at least.
    """

    seed: int
    number: int
    threshold: int

    def keys(self, client: int, keys: bytes) -> bytes:
        """What a client signs of its keys.

        Args:
            client: its number.
            keys: the bundle without the signature.
        """
        return _crypto.digest("keys", numbers(self.seed % 2**62, self.number, self.threshold, client), keys)

    def transcript(self, bundles: Mapping[int, Bundle]) -> bytes:
        """The digest of who takes part with which keys; what clients seal and sign later is tied to it.

        Args:
            bundles: by client.
        """
        said = [numbers(client) + bundles[client].raw for client in sorted(bundles)]
        return _crypto.digest("transcript", numbers(self.seed % 2**62, self.number, self.threshold), *said)

    @staticmethod
    def sum_over(transcript: bytes, partners: Sequence[int], survivors: Sequence[int]) -> bytes:
        """What a client signs before the masks are taken off: over whom the sum is.

        Args:
            transcript: of the keys.
            partners: whose masks are in the vectors.
            survivors: whose vectors are in the sum.
        """
        return _crypto.digest("sum", transcript, numbers(*partners), numbers(*survivors))

    @staticmethod
    def between(transcript: bytes, sender: int, receiver: int) -> bytes:
        """What a box is about: the sum (`transcript`), the `sender` and the `receiver`."""
        return transcript + numbers(sender, receiver)


@dataclass(frozen=True)
class Bundle:
    """What a client announces: its public keys for boxes and for masks, the digest of its own seed, and a signature.

    Attributes:
        raw: all of it, 160 bytes.
    """

    raw: bytes

    @property
    def agreement(self) -> bytes:
        """The public key with which boxes to this client are sealed."""
        return self.raw[:KEY_BYTES]

    @property
    def mask(self) -> bytes:
        """The public key of which masks between this client and others are made."""
        return self.raw[KEY_BYTES : 2 * KEY_BYTES]

    @property
    def commitment(self) -> bytes:
        """The digest of the seed of the client's own mask, by which a false one is told."""
        return self.raw[2 * KEY_BYTES : 3 * KEY_BYTES]

    def require(self, about: Round, client: int, registry: Registry) -> None:
        """Refuse keys that the client did not announce for this round.

        Args:
            about: the round.
            client: whose they are said to be.
            registry: the clients' public keys.

        Raises:
            NotAuthentic: naming the client.
        """
        keys, signature = self.raw[: 3 * KEY_BYTES], self.raw[3 * KEY_BYTES :]
        known = client in registry
        if not known or not _crypto.verify(registry.of(client), signature, about.keys(client, keys)):
            why = "are not signed for this round by the key that the registry names" if known else "are in no registry"
            raise NotAuthentic(f"the keys of client {client} {why}: forged, of another round, or of another keyring")


def announced(about: Round, client: int, identity: bytes, agreement: bytes, mask: bytes, seed: bytes) -> Bundle:
    """The bundle of a client.

    Args:
        about: the round.
        client: its number.
        identity: its private key, to sign with.
        agreement, mask: its public keys of this round.
        seed: of its own mask, of which the digest is in the bundle.
    """
    keys = agreement + mask + _crypto.digest("seed", seed)
    return Bundle(keys + _crypto.sign(identity, about.keys(client, keys)))
