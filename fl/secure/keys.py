"""Keys of secure sums: the registry of the clients' public keys, and the keyring of each client."""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from distillkit._utils import check
from distillkit._utils.configurable import Configurable
from distillkit._utils.files import sync_folder, write_atomically
from distillkit.fingerprint import tensor_fingerprint
from fl.secure import _crypto


class Registry(Configurable):
    """Registry of all clients' public keys, with which clients verify each other's signatures.

    A server that can change the registry can impersonate clients. Therefore the operator of the federation must
    distribute the registry with each client's app and configuration, and never through the server.

    Args:
        keys: public key (Ed25519) of each client, by client index. A key is a string of 64 hexadecimal digits, as
            `Keyring.enroll` returns it. There must be at least two clients, and all keys must differ.

    Raises:
        TypeError, ValueError: `keys` is not such a mapping.
    """

    def __init__(self, keys: Mapping[int, str]) -> None:
        self._keys: dict[int, bytes] = {}
        if not isinstance(keys, Mapping):
            raise TypeError(f"keys must map clients' numbers to public keys; got {type(keys).__name__}")
        numbers = {
            check.positive_int(client, "a client's number in keys", least=0): key for client, key in keys.items()
        }
        for client, key in sorted(numbers.items()):
            try:
                found = bytes.fromhex(key)
            except (TypeError, ValueError):
                found = b""
            if len(found) != _crypto.KEY_BYTES:
                raise ValueError(
                    f"keys[{client}] must be 64 hexadecimal digits, as returned by Keyring.enroll; got {key!r:.80}"
                )
            self._keys[client] = found
        if len(self._keys) < 2:
            raise ValueError(f"keys must have the keys of at least two clients; got {len(self._keys)}")
        if len(set(self._keys.values())) < len(self._keys):
            raise ValueError("keys holds one key twice: each client needs its own key")

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> Registry:
        """Read the registry that `write` saved in the file `path`.

        Raises:
            OSError: the file cannot be read.
            ValueError: the file does not contain a registry.
        """
        try:
            entries = json.loads(check.path(path, "path").read_text(encoding="utf-8"))
            keys = {int(client): key for client, key in entries.items()}
        except (ValueError, AttributeError) as error:
            raise ValueError(f"{path} is not a registry, a JSON object of client -> public key: {error}") from error
        return cls(keys)

    def write(self, path: str | os.PathLike[str]) -> None:
        """Write the registry to the JSON file `path`."""
        entries = {str(client): key.hex() for client, key in self._keys.items()}
        write_atomically(check.path(path, "path"), json.dumps(entries, indent=1) + "\n")

    def of(self, client: int) -> bytes:
        """Return the public signing key of the client with index `client`, 32 bytes.

        Raises:
            LookupError: the client is not in the registry.
        """
        if client not in self._keys:
            raise LookupError(f"client {client} is not in the registry, which has {self._summary()}")
        return self._keys[client]

    def __len__(self) -> int:
        return len(self._keys)

    def __contains__(self, client: object) -> bool:
        return client in self._keys

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Registry) and self._keys == other._keys

    def __hash__(self) -> int:
        return hash(tuple(self._keys.items()))

    def _summary(self) -> str:
        numbers = list(map(str, self._keys))
        shown = numbers if len(numbers) <= 4 else [*numbers[:3], "...", numbers[-1]]
        return f"{len(numbers)} clients ({', '.join(shown)})"

    def __repr__(self) -> str:
        digest = tensor_fingerprint([json.dumps({c: k.hex() for c, k in self._keys.items()})])
        return f"Registry({len(self)} clients, {digest[:12]})"


class Keyring(Configurable):
    """Folder with the secrets of one or several clients: the signing key, and the secrets of the current round.

    The folder has one subfolder for each client. On a node there is a single client; in a simulation there are all
    clients. Before a client replies to a request, it writes to disk its secrets of the round and the name of the
    protocol step that it has just completed. It refuses a request that does not follow this step. In the last step, it
    deletes the secrets before it discloses shares of other clients' secrets. Therefore it never answers the same
    request twice, even after a restart. Unlike other values that a client keeps between rounds, these secrets are not
    rolled back after a failed round. The files can be read only by their owner.

    Args:
        folder: path of the folder, which is created when the first client enrolls.

    Raises:
        TypeError, ValueError, NotADirectoryError: `folder` is not the path of a folder.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = check.folder(folder, "folder")

    def __repr__(self) -> str:
        return f"Keyring({str(self.folder)!r})"

    def enroll(self, client: int) -> str:
        """Return a client's public signing key as hexadecimal digits. If the client has no key yet, create one.

        Args:
            client: index of the client.
        """
        check.positive_int(client, "client", least=0)
        path = self._client_folder(client) / "identity"
        if not path.exists():
            _write(path, _crypto.new_signing_key())
        return _crypto.signing_public_key(_read_key(path)).hex()

    def registry(self, clients: Sequence[int] | int) -> Registry:
        """Enroll all clients of a simulation, and return their registry.

        Args:
            clients: indices of the clients; or the number n of clients, for the indices 0 to n - 1.
        """
        numbers = range(check.positive_int(clients, "clients")) if isinstance(clients, int) else clients
        return Registry({number: self.enroll(number) for number in numbers})

    def signing_key(self, client: int) -> bytes:
        """Return the private signing key of the client with index `client`, 32 bytes.

        Raises:
            LookupError: the folder of this keyring has no key of the client, because the client has not enrolled.
        """
        path = self._client_folder(client) / "identity"
        if not path.exists():
            raise LookupError(
                f"client {client} has no key in its keyring: create one with Keyring(folder).enroll({client})"
            )
        return _read_key(path)

    def load_session(self, client: int) -> dict[str, Any] | None:
        """Return the secrets of the current round for the client with index `client`, or None if there are none."""
        path = self._client_folder(client) / "session"
        return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None

    def save_session(self, client: int, session: Mapping[str, Any]) -> None:
        """Replace the secrets of the current round for a client.

        The new secrets are on disk when this function returns.

        Args:
            client: index of the client.
            session: the new secrets, as JSON values.
        """
        _write(self._client_folder(client) / "session", json.dumps(session).encode())

    def delete_session(self, client: int) -> None:
        """Delete the secrets of the current round for the client with index `client`, including their file on disk."""
        path = self._client_folder(client) / "session"
        path.unlink(missing_ok=True)
        sync_folder(path.parent)

    def _client_folder(self, client: int) -> Path:
        return self.folder / str(client)


def _read_key(path: Path) -> bytes:
    key = path.read_bytes()
    if len(key) != _crypto.KEY_BYTES:
        raise ValueError(
            f"{path} must hold a key of {_crypto.KEY_BYTES} bytes, got {len(key)}: restore it from a backup, or delete "
            "it and enroll the client again in a new registry"
        )
    return key


def _write(path: Path, data: bytes) -> None:
    """Write the bytes of a secret atomically to a file that only its owner can read.

    The bytes are on disk when this function returns.
    """
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    sync_folder(path.parent)
