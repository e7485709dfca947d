"""Messages that clients sign, and the bundle of public keys that each client announces."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fl.secure import _crypto
from fl.secure._crypto import KEY_BYTES, SIGNATURE_BYTES, AuthenticationError
from fl.secure.keys import Registry

__all__ = ["BUNDLE_BYTES", "KeyBundle", "RoundContext", "sign_bundle"]

BUNDLE_BYTES = 3 * KEY_BYTES + SIGNATURE_BYTES


def _encode(*values: int) -> bytes:
    """Encode integers as 8 bytes each."""
    return b"".join(value.to_bytes(8, "little", signed=True) for value in values)


@dataclass(frozen=True)
class RoundContext:
    """Identity of one secure sum. Every key and signature is bound to this identity, and useless in another sum.

    Attributes:
        seed: seed of the run.
        number: index of the round.
        threshold: smallest number of clients in the sum.
    """

    seed: int
    number: int
    threshold: int

    def keys_digest(self, client: int, keys: bytes) -> bytes:
        """Return the digest that a client signs with its announced keys.

        Args:
            client: index of the client.
            keys: bytes of the bundle without its signature.
        """
        return _crypto.digest("keys", _encode(self.seed % 2**62, self.number, self.threshold, client), keys)

    def transcript(self, bundles: Mapping[int, KeyBundle]) -> bytes:
        """Return the digest of the participants and their keys, to which all later boxes and signatures are bound.

        Args:
            bundles: announced key bundles, by client.
        """
        entries = [_encode(client) + bundles[client].raw for client in sorted(bundles)]
        return _crypto.digest("transcript", _encode(self.seed % 2**62, self.number, self.threshold), *entries)

    @staticmethod
    def sum_digest(transcript: bytes, partners: Sequence[int], survivors: Sequence[int]) -> bytes:
        """Return the digest that a client signs before the masks are removed.

        Args:
            transcript: digest of the participants and their keys.
            partners: clients whose masks are in the vectors, in ascending order.
            survivors: clients whose vectors are in the sum, in ascending order.
        """
        return _crypto.digest("sum", transcript, _encode(*partners), _encode(*survivors))

    @staticmethod
    def box_context(transcript: bytes, sender: int, receiver: int) -> bytes:
        """Return the bytes that bind a box to the `transcript`, the `sender` and the `receiver`."""
        return transcript + _encode(sender, receiver)


@dataclass(frozen=True)
class KeyBundle:
    """Announcement of one client: public keys for boxes and masks, the digest of a mask seed, and a signature.

    Attributes:
        raw: bytes of the bundle (160 bytes).
    """

    raw: bytes

    @property
    def agreement(self) -> bytes:
        """Public key with which boxes for this client are sealed."""
        return self.raw[:KEY_BYTES]

    @property
    def mask(self) -> bytes:
        """Public key from which the masks shared with this client are derived."""
        return self.raw[KEY_BYTES : 2 * KEY_BYTES]

    @property
    def commitment(self) -> bytes:
        """Digest of the seed of the client's own mask, from which the server detects a false seed."""
        return self.raw[2 * KEY_BYTES : 3 * KEY_BYTES]

    def verify(self, context: RoundContext, client: int, registry: Registry) -> None:
        """Check that a client signed this bundle for this round.

        Args:
            context: identity of the sum.
            client: index of the alleged sender.
            registry: the clients' public keys.

        Raises:
            AuthenticationError: the client did not sign the bundle; the message names the client.
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
    """Return the signed bundle of a client.

    Args:
        context: identity of the sum.
        client: index of the client.
        signing_key: the client's private signing key.
        agreement: the client's public key for boxes in this round.
        mask: the client's public key for masks in this round.
        seed: seed of the client's own mask; the bundle contains only its digest.
    """
    keys = agreement + mask + _crypto.digest("seed", seed)
    return KeyBundle(keys + _crypto.sign(signing_key, context.keys_digest(client, keys)))
