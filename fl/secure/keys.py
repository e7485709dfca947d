"""Who the clients are: a registry of their public keys, and each client's own ring of secrets on its machine."""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from distillkit._utils import check
from distillkit._utils.configurable import Configurable
from distillkit.fingerprint import tensor_fingerprint
from fl.secure import _crypto

__all__ = ["Keyring", "Registry"]


class Registry(Configurable):
    """The clients' public keys, which every client and the server must have from whoever runs the federation.

    Secure sums stand on it: a server that could write it would play all other clients itself. So give it to each client
    with its app and its configuration, and do not let the server send it.

    Args:
        keys: client's number -> its public key (Ed25519), 64 hexadecimal digits, as `Keyring.enroll` gives it. At least
            two clients, and no key twice.

    Raises:
        TypeError, ValueError: no such mapping.
    """

    def __init__(self, keys: Mapping[int, str]) -> None:
        self._keys: dict[int, bytes] = {}
        if not isinstance(keys, Mapping):
            raise TypeError(f"keys must map clients' numbers to public keys, got {type(keys).__name__}")
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
                    f"keys[{client}] must be 64 hexadecimal digits, as Keyring.enroll gives, got {key!r:.80}"
                )
            self._keys[client] = found
        if len(self._keys) < 2:
            raise ValueError(f"keys must name at least two clients, got {len(self._keys)}: a sum over one is that one")
        if len(set(self._keys.values())) < len(self._keys):
            raise ValueError("keys holds one key twice: each client needs its own, or one could speak for two")

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> Registry:
        """Read what `write` wrote to `path`.

        Raises:
            OSError: the file cannot be read.
            ValueError: it holds no registry.
        """
        try:
            said = json.loads(Path(path).read_text())
            keys = {int(client): key for client, key in said.items()}
        except (ValueError, AttributeError) as error:
            raise ValueError(f"{path} is no registry, a JSON object of client -> public key: {error}") from error
        return cls(keys)

    def write(self, path: str | os.PathLike[str]) -> None:
        """Write the keys, which are public, to the JSON file `path`."""
        said = {str(client): key.hex() for client, key in self._keys.items()}
        Path(path).write_text(json.dumps(said, indent=1) + "\n")

    def of(self, client: int) -> bytes:
        """A client's public key.

        Raises:
            LookupError: the registry does not name the `client`.
        """
        if client not in self._keys:
            raise LookupError(f"client {client} is not in the registry, which has {self._said()}")
        return self._keys[client]

    def __len__(self) -> int:
        return len(self._keys)

    def __contains__(self, client: object) -> bool:
        return client in self._keys

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Registry) and self._keys == other._keys

    def __hash__(self) -> int:
        return hash(tuple(self._keys.items()))

    def _said(self) -> str:
        numbers = list(self._keys)
        shown = ", ".join(map(str, numbers[:3])) + (f", ..., {numbers[-1]}" if len(numbers) > 4 else "")
        return f"{len(numbers)} clients ({shown})"

    def __repr__(self) -> str:
        digest = tensor_fingerprint([json.dumps({c: k.hex() for c, k in self._keys.items()})])
        return f"Registry({len(self)} clients, {digest[:12]})"


class Keyring(Configurable):
    """Where a client keeps the secrets of secure sums: its key to sign with, and those of the round under way.

    A folder with a folder of each client: on a node that is one, in a simulation all. The secrets of a round are
    written before an answer leaves and deleted before the shares of others do, so that no server can ask twice, and no
    restart forgets what was said. Unlike a client's memory they are never rolled back. Nobody else may read the folder.

    Args:
        folder: where; made when the first client enrols.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        if not isinstance(folder, str | os.PathLike):
            raise TypeError(f"folder must be a path, got {type(folder).__name__}")
        self.folder = Path(folder)

    def __repr__(self) -> str:
        return f"Keyring({str(self.folder)!r})"

    def enroll(self, client: int) -> str:
        """The public key of a client as hexadecimal digits; a key is made if it has none yet.

        Args:
            client: its number.
        """
        check.positive_int(client, "client", least=0)
        path = self._of(client) / "identity"
        if not path.exists():
            _write(path, _crypto.new_identity())
        return _crypto.identity_public(path.read_bytes()).hex()

    def registry(self, clients: Sequence[int] | int) -> Registry:
        """Enrol all clients of a simulation, and give their registry.

        Args:
            clients: their numbers; or how many there are, from 0 on.
        """
        numbers = range(check.positive_int(clients, "clients")) if isinstance(clients, int) else clients
        return Registry({number: self.enroll(number) for number in numbers})

    def identity(self, client: int) -> bytes:
        """The private key of a `client`, to sign with.

        Raises:
            LookupError: it never enrolled here.
        """
        path = self._of(client) / "identity"
        if not path.exists():
            raise LookupError(f"client {client} has no key in its keyring: Keyring(folder).enroll({client}) makes one")
        return path.read_bytes()

    def session(self, client: int) -> dict[str, Any] | None:
        """The secrets of the round under way of a `client`; None if there is none."""
        path = self._of(client) / "session"
        return json.loads(path.read_text()) if path.exists() else None

    def begin(self, client: int, session: Mapping[str, Any]) -> None:
        """Keep the secrets of a round, and forget those before; on disk when it returns.

        Args:
            client: whose.
            session: JSON values.
        """
        _write(self._of(client) / "session", json.dumps(session).encode())

    def end(self, client: int) -> None:
        """Forget the secrets of the round of a `client`; done when it returns."""
        path = self._of(client) / "session"
        path.unlink(missing_ok=True)
        _synced(path.parent)

    def _of(self, client: int) -> Path:
        return self.folder / str(client)


def _write(path: Path, data: bytes) -> None:
    """Write a secret: whole or not at all, readable by its owner alone, and on the disk when this returns."""
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
    _synced(path.parent)


def _synced(folder: Path) -> None:
    if os.name != "posix":  # elsewhere a folder cannot be opened
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
