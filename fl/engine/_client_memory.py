"""What clients remember between rounds, where they run: in RAM, or one file a client and version."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from fl._codec import encode
from fl.engine.store import CheckpointError, read_message, write_atomically
from fl.message import Message

__all__ = ["MemoryStore"]


class MemoryStore:
    """Each client's memory, in versions: what an exchange writes is pending until a request or `settle` names it.

    Nobody here decides which version counts: the server knows which rounds are committed, and names the version in
    every request. So a lost `settle` does no harm, and what a failed or killed round wrote is never read.

    Args:
        folder: where each client gets a folder of its own; None keeps all in RAM.
    """

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._ram: dict[int, dict[str, Message]] = {}
        self._pending: list[tuple[int, str]] = []

    def _file(self, client: int, version: str) -> Path:
        assert self._folder is not None
        return self._folder / str(client) / f"{version}.safetensors"

    def _versions(self, client: int) -> list[str]:
        if self._folder is None:
            return list(self._ram.get(client, {}))
        return [p.stem for p in (self._folder / str(client)).glob("[0-9]*.safetensors")]

    def _clients(self) -> Iterator[int]:
        if self._folder is None:
            yield from list(self._ram)
        elif self._folder.exists():
            yield from (int(p.name) for p in self._folder.iterdir() if p.name.isdecimal())

    def _delete(self, client: int, version: str) -> None:
        if self._folder is None:
            self._ram.get(client, {}).pop(version, None)
        else:
            self._file(client, version).unlink(missing_ok=True)

    def _keep(self, client: int, version: str) -> None:
        """Delete all but one version."""
        for other in self._versions(client):
            if other != version:
                self._delete(client, other)

    def load(self, client: int, version: str, *, tidy: bool = True) -> Message:
        """A client's memory of this version ("" is none yet), as a copy that may be changed.

        Args:
            client: whose it is.
            version: its name, as the server gives it.
            tidy: whether all others are deleted, which are of rounds that failed. Not where the exchange only reads:
                what it is given may be pending, and then the committed one is needed again if the round fails.

        Raises:
            CheckpointError: it is lost or damaged; that must not look like a client that remembers nothing.
        """
        if tidy:
            self._keep(client, version)
        if not version:
            return Message()
        if self._folder is not None:
            return read_message(self._file(client, version))[0]
        if version not in self._ram.get(client, {}):
            raise CheckpointError(f"client {client} has lost its memory of version {version}")
        return self._ram[client][version].copy()

    def stage(self, client: int, version: str, memory: Message) -> None:
        """Keep a pending memory beside the one that was loaded.

        Args:
            client: whose it is.
            version: its name, which a later request or `settle` gives.
            memory: what the client remembers.
        """
        self._pending.append((client, version))
        if self._folder is None:
            self._ram.setdefault(client, {})[version] = memory
        else:
            write_atomically(self._file(client, version), encode(memory, {"client": str(client)}))

    def commit(self, versions: Mapping[int, str]) -> None:
        """The round is committed, and these versions count, by client; a client that is not named is left alone."""
        for client, version in versions.items():
            self._keep(client, version)
        self._pending = [(client, version) for client, version in self._pending if client not in versions]

    def rollback(self) -> None:
        """What is pending never counts: the round has failed."""
        for client, version in self._pending:
            self._delete(client, version)
        self._pending.clear()

    def cut(self, versions: Mapping[int, str]) -> None:
        """Delete everything but these versions: what was never committed, because the run was killed."""
        for client in self._clients():
            self._keep(client, versions.get(client, ""))
