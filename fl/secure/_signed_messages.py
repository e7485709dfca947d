"""Statements that clients sign in a secure sum, and the bundle of public keys that each client announces."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fl.secure import _crypto
from fl.secure._crypto import KEY_BYTES, SIGNATURE_BYTES, AuthenticationError
from fl.secure.keys import Registry

BUNDLE_BYTES = 3 * KEY_BYTES + SIGNATURE_BYTES


def _encode(*values: int) -> bytes:
    """Return the concatenated encodings of integers, with 8 bytes for each integer."""
    return b"".join(value.to_bytes(8, "little", signed=True) for value in values)


@dataclass(frozen=True)
class RoundContext:
    """Identity of one secure sum, from which the bytes to be signed are computed.

    Because these bytes depend on the run and the round, a signature from one sum is invalid in another sum.

    Attributes:
        seed: seed of the run.
        number: index of the round.
        threshold: smallest allowed number of clients in the sum.
    """

    seed: int
    number: int
    threshold: int

    def keys_digest(self, client: int, keys: bytes) -> bytes:
        """Return the digest that a client signs when it announces its public keys.

        Args:
            client: index of the client.
            keys: bytes of the client's `KeyBundle` without the signature.
        """
        return _crypto.digest("keys", _encode(self.seed % 2**62, self.number, self.threshold, client), keys)

    def transcript(self, bundles: Mapping[int, KeyBundle]) -> bytes:
        """Return a digest of the participants of the sum and their announced keys.

        The digest is part of everything that clients later encrypt or sign. Clients that received different keys from
        the server therefore cannot read each other's messages.

        Args:
            bundles: announced keys of all participants, by client index.
        """
        entries = [_encode(client) + bundles[client].raw for client in sorted(bundles)]
        return _crypto.digest("transcript", _encode(self.seed % 2**62, self.number, self.threshold), *entries)

    @staticmethod
    def sum_digest(transcript: bytes, partners: Sequence[int], survivors: Sequence[int]) -> bytes:
        """Return the digest that a client signs to confirm, before the masks are removed, which clients a sum contains.

        Args:
            transcript: digest of the participants and their keys, as the method `transcript` returns it.
            partners: indices of the clients that share pairwise masks with each other, in ascending order.
            survivors: indices of the clients whose masked vectors are in the sum, in ascending order.
        """
        return _crypto.digest("sum", transcript, _encode(*partners), _encode(*survivors))

    @staticmethod
    def box_context(transcript: bytes, sender: int, receiver: int) -> bytes:
        """Return the bytes that identify an encrypted message ("box") between two clients.

        Args:
            transcript: digest of the participants and their keys, as the method `transcript` returns it.
            sender: index of the client that encrypts the message.
            receiver: index of the client that decrypts the message.
        """
        return transcript + _encode(sender, receiver)


@dataclass(frozen=True)
class KeyBundle:
    """Public keys that one client announces for a round, with its signature.

    The bundle contains a public key for encrypted messages, a public key for pairwise masks, a digest, and the
    signature. The digest is that of a secret seed, from which the client draws a mask that it shares with no other
    client.

    Attributes:
        raw: the bundle as 160 bytes.
    """

    raw: bytes

    @property
    def agreement(self) -> bytes:
        """Public key with which other clients encrypt messages for this client."""
        return self.raw[:KEY_BYTES]

    @property
    def mask(self) -> bytes:
        """Public key from which another client derives its pairwise mask with this client."""
        return self.raw[KEY_BYTES : 2 * KEY_BYTES]

    @property
    def commitment(self) -> bytes:
        """Digest of the seed of the client's own mask. The server compares it with the recovered seed's digest."""
        return self.raw[2 * KEY_BYTES : 3 * KEY_BYTES]

    def verify(self, context: RoundContext, client: int, registry: Registry) -> None:
        """Check that a client signed this bundle for this round.

        Args:
            context: run, round and threshold of the sum.
            client: index of the client that the bundle claims to come from.
            registry: public signing keys of all clients.

        Raises:
            AuthenticationError: the client did not sign the bundle for this round, or is not in the registry.
        """
        keys, signature = self.raw[: 3 * KEY_BYTES], self.raw[3 * KEY_BYTES :]
        known = client in registry
        if not known or not _crypto.verify(registry.of(client), signature, context.keys_digest(client, keys)):
            why = "are not signed for this round by its key in the registry" if known else "have no key in the registry"
            raise AuthenticationError(
                f"the keys of client {client} {why}: they are forged, or from another round or keyring"
            )


def sign_bundle(
    context: RoundContext, client: int, signing_key: bytes, agreement: bytes, mask: bytes, seed: bytes
) -> KeyBundle:
    """Sign a client's public keys for a round, and return them as a bundle."""
    keys = agreement + mask + _crypto.digest("seed", seed)
    return KeyBundle(keys + _crypto.sign(signing_key, context.keys_digest(client, keys)))
