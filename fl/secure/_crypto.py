"""The cryptography library's primitives, as the protocol needs them; imported where they are used.

Keys and seeds are 32 bytes. Everything that is agreed on or signed begins with what it is for, so that nothing made
for one purpose is of use for another.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

__all__ = [
    "BOX_BYTES", "KEY_BYTES", "SIGNATURE_BYTES", "MissingCryptography", "NotAuthentic", "add_mask", "digest",
    "identity_public", "mask_key", "new_identity", "new_pair", "open_box", "public_of", "require_library", "seal_box",
    "sign", "verify",
]  # fmt: skip

KEY_BYTES = 32
SIGNATURE_BYTES = 64
BOX_BYTES = 16
"""How much longer a sealed box is than what it holds."""
_WORDS = 1 << 17
"""64-bit words of a mask that are made at a time: 1 MB."""


class MissingCryptography(ImportError):
    """The cryptography library is not installed here; the message says how to get it."""


class NotAuthentic(ValueError):
    """A key, a box or a signature is not of the client that it is said to be of."""


def require_library() -> None:
    """Find out whether the cryptography library is here, before anything depends on it.

    Raises:
        MissingCryptography: it is not.
    """
    try:
        import cryptography.hazmat.primitives.asymmetric.x25519  # noqa: F401
    except ImportError as error:
        raise MissingCryptography(
            f'secure sums need cryptography 50 or later ({error}): pip install "distillkit[secure]"'
        ) from error


def digest(label: str, *parts: bytes) -> bytes:
    """SHA-256 of a label and of parts, each with its length, so that no two lists have one digest by construction."""
    from cryptography.hazmat.primitives.hashes import SHA256, Hash

    found = Hash(SHA256())
    for part in (label.encode(), *parts):
        found.update(len(part).to_bytes(8, "little") + part)
    return found.finalize()


def _derived(shared: bytes, label: str, *about: bytes) -> bytes:
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF

    return HKDF(SHA256(), KEY_BYTES, None, digest(label, *about)).derive(shared)


# Signatures, Ed25519.


def new_identity() -> bytes:
    """A private key to sign with, from the operating system's generator."""
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    return Ed25519PrivateKey.generate().private_bytes_raw()


def identity_public(private: bytes) -> bytes:
    """The public key that belongs to a `private` key to sign with."""
    return _signer(private).public_key().public_bytes_raw()


def _signer(private: bytes) -> Any:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    return Ed25519PrivateKey.from_private_bytes(private)


def sign(private: bytes, statement: bytes) -> bytes:
    """A `private` key's signature of a `statement`, 64 bytes."""
    return _signer(private).sign(statement)


def verify(public: bytes, signature: bytes, statement: bytes) -> bool:
    """Whether a signature of a statement was made with the private key that belongs to a public one.

    Args:
        public: of the signer.
        signature: 64 bytes.
        statement: what was signed.
    """
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    try:
        Ed25519PublicKey.from_public_bytes(public).verify(signature, statement)
    except (InvalidSignature, ValueError):
        return False
    return True


# Key agreement, X25519.


def new_pair() -> tuple[bytes, bytes]:
    """A fresh private key for key agreement from the operating system's generator, and its public key."""
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

    key = X25519PrivateKey.generate()
    return key.private_bytes_raw(), key.public_key().public_bytes_raw()


def public_of(private: bytes) -> bytes:
    """The public key that belongs to a `private` one for key agreement."""
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

    return X25519PrivateKey.from_private_bytes(private).public_key().public_bytes_raw()


def _shared(private: bytes, public: bytes) -> bytes:
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey

    try:
        return X25519PrivateKey.from_private_bytes(private).exchange(X25519PublicKey.from_public_bytes(public))
    except ValueError as error:  # a point of small order, with which everybody would agree on the same
        raise NotAuthentic("a public key for key agreement is none that a client could have drawn") from error


def mask_key(private: bytes, public: bytes, transcript: bytes) -> bytes:
    """The key of the mask between two clients; both find the same.

    Args:
        private: the one's.
        public: the other's.
        transcript: digest of who takes part, with which keys.
    """
    return _derived(_shared(private, public), "mask", transcript)


# Boxes, ChaCha20-Poly1305. A key is used for one box, so the nonce need not vary.


def _box(private: bytes, public: bytes, about: bytes) -> Any:
    from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

    return ChaCha20Poly1305(_derived(_shared(private, public), "box", about))


def seal_box(private: bytes, public: bytes, content: bytes, about: bytes) -> bytes:
    """Encrypt what only one other client may read, and in which nobody can change a bit.

    Args:
        private: the sender's.
        public: the receiver's.
        content: to be sent; once only with these keys and this `about`.
        about: from whom to whom, in which round: what must be the same where the box is opened.
    """
    return _box(private, public, about).encrypt(bytes(12), content, about)


def open_box(private: bytes, public: bytes, box: bytes, about: bytes) -> bytes:
    """Decrypt what another client has sealed.

    Args:
        private: the receiver's.
        public: the sender's.
        box: what came.
        about: as where it was sealed.

    Raises:
        NotAuthentic: it was changed, or is another client's, or of another round.
    """
    from cryptography.exceptions import InvalidTag

    try:
        return _box(private, public, about).decrypt(bytes(12), box, about)
    except InvalidTag as error:
        raise NotAuthentic("a box does not open: it was changed, or is of another client or round") from error


# Masks, ChaCha20.


def add_mask(total: Tensor, seed: bytes, sign: int) -> None:
    """Add or subtract, in place and mod 2^64, the mask that follows from a seed.

    Args:
        total: int64, of one dimension, on the CPU.
        seed: 32 bytes; of one mask only.
        sign: 1 or -1.
    """
    from cryptography.hazmat.primitives.ciphers import Cipher
    from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20

    stream = Cipher(ChaCha20(seed, bytes(16)), mode=None).encryptor()
    zeros = bytes(8 * min(_WORDS, len(total)))
    for start in range(0, len(total), _WORDS):
        part = total[start : start + _WORDS]
        part.add_(torch.frombuffer(bytearray(stream.update(zeros[: 8 * len(part)])), dtype=torch.int64), alpha=sign)
