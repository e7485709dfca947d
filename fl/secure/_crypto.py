"""Cryptographic primitives of secure sums: signatures, key agreement, encrypted messages ("boxes"), and random masks.

They use the `cryptography` library, which is imported on first use. Keys and seeds have 32 bytes. The input of every
key derivation and every signature begins with a label for its purpose, so a value made for one purpose is useless for
another.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

KEY_BYTES = 32
SIGNATURE_BYTES = 64
BOX_OVERHEAD = 16
"""Number of bytes by which a sealed box is longer than its content."""
_WORDS = 1 << 17
"""Number of 64-bit words of a mask that are generated at a time (1 MB)."""


class MissingCryptography(ImportError):
    """Error: the `cryptography` library is not installed. The message says how to install it."""


class AuthenticationError(ValueError):
    """Error: a public key, encrypted message or signature does not come from the client that is given as its sender."""


def require_cryptography() -> None:
    """Check that the `cryptography` library is installed."""
    try:
        import cryptography.hazmat.primitives.asymmetric.x25519  # noqa: F401
    except ImportError as error:
        raise MissingCryptography(
            f'secure sums need cryptography 50 or later ({error}): pip install "distillkit[secure]"'
        ) from error


def digest(label: str, *parts: bytes) -> bytes:
    """Return the SHA-256 hash of several byte strings, together with a label for the purpose of the hash.

    The length of each string is hashed, too, so different lists of strings never give the same input of the hash.

    Args:
        label: text for the purpose, such as "keys" or "sum".
        parts: the byte strings.
    """
    from cryptography.hazmat.primitives.hashes import SHA256, Hash

    found = Hash(SHA256())
    for part in (label.encode(), *parts):
        found.update(len(part).to_bytes(8, "little") + part)
    return found.finalize()


def _derive_key(shared: bytes, label: str, *context: bytes) -> bytes:
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF

    return HKDF(SHA256(), KEY_BYTES, None, digest(label, *context)).derive(shared)


# Signatures: Ed25519.


def new_signing_key() -> bytes:
    """Draw and return a private key for signatures (Ed25519), from the operating system's random generator."""
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    return Ed25519PrivateKey.generate().private_bytes_raw()


def signing_public_key(private: bytes) -> bytes:
    """Return the public key that belongs to the `private` key of a signer (Ed25519)."""
    return _load_signing_key(private).public_key().public_bytes_raw()


def _load_signing_key(private: bytes) -> Any:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    return Ed25519PrivateKey.from_private_bytes(private)


def sign(private: bytes, statement: bytes) -> bytes:
    """Return the signature (Ed25519, 64 bytes) of the bytes `statement` with the signer's `private` key."""
    return _load_signing_key(private).sign(statement)


def verify(public: bytes, signature: bytes, statement: bytes) -> bool:
    """Return whether an Ed25519 signature of a statement is valid."""
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    try:
        Ed25519PublicKey.from_public_bytes(public).verify(signature, statement)
    except (InvalidSignature, ValueError):
        return False
    return True


# Key agreement: X25519.


def new_agreement_keys() -> tuple[bytes, bytes]:
    """Draw a pair of keys for key agreement (X25519) from the operating system's random generator."""
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

    key = X25519PrivateKey.generate()
    return key.private_bytes_raw(), key.public_key().public_bytes_raw()


def agreement_public_key(private: bytes) -> bytes:
    """Return the public key that belongs to a `private` key for key agreement (X25519)."""
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

    return X25519PrivateKey.from_private_bytes(private).public_key().public_bytes_raw()


def _agree(private: bytes, public: bytes) -> bytes:
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey

    try:
        return X25519PrivateKey.from_private_bytes(private).exchange(X25519PublicKey.from_public_bytes(public))
    except ValueError as error:  # a point of small order gives everybody the same shared secret
        raise AuthenticationError("not a valid public key for key agreement (a point of small order)") from error


def derive_mask_key(private: bytes, public: bytes, transcript: bytes) -> bytes:
    """Derive the seed of a pair's mask, which one client adds to its reply, and the other subtracts from its own.

    Both clients derive the same seed, from their own private key and the other client's public key.
    """
    return _derive_key(_agree(private, public), "mask", transcript)


# Boxes (encrypted messages): ChaCha20-Poly1305. Every key encrypts only one box, so the nonce can be constant.


def _box_cipher(private: bytes, public: bytes, context: bytes) -> Any:
    from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

    return ChaCha20Poly1305(_derive_key(_agree(private, public), "box", context))


def seal_box(private: bytes, public: bytes, content: bytes, context: bytes) -> bytes:
    """Encrypt and authenticate a message from one client to another, and return it as a "box".

    Never encrypt two messages with the same pair of keys and the same `context`.
    """
    return _box_cipher(private, public, context).encrypt(bytes(12), content, context)


def open_box(private: bytes, public: bytes, box: bytes, context: bytes) -> bytes:
    """Decrypt a message from another client."""
    from cryptography.exceptions import InvalidTag

    try:
        return _box_cipher(private, public, context).decrypt(bytes(12), box, context)
    except InvalidTag as error:
        raise AuthenticationError("cannot open a box: it was changed, or comes from another client or round") from error


# Masks: ChaCha20.


def add_mask(total: Tensor, seed: bytes, sign: int) -> None:
    """Generate a pseudorandom mask from a seed, and add it to a vector or subtract it, in place and mod 2^64."""
    from cryptography.hazmat.primitives.ciphers import Cipher
    from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20

    stream = Cipher(ChaCha20(seed, bytes(16)), mode=None).encryptor()
    zeros = bytes(8 * min(_WORDS, len(total)))
    for start in range(0, len(total), _WORDS):
        part = total[start : start + _WORDS]
        part.add_(torch.frombuffer(bytearray(stream.update(zeros[: 8 * len(part)])), dtype=torch.int64), alpha=sign)
