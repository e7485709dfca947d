"""Storage of the clients' memories, in RAM or in files.

A client's memory holds the values that a method keeps on this client between rounds (`Client.memory`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from torch import Tensor

from distillkit.sets import LabeledImages
from fl._codec import encode
from fl.engine.store import CheckpointError, read_message, remove, write_atomically
from fl.message import Message, Value


class MemoryStore:
    """Store of the clients' memories: the values that a method keeps on each client between rounds.

    A client that finishes a round stores a new version of its memory. This version is pending until the server commits
    the round. Every request of the server states which version is valid. Therefore a memory from a failed or killed
    round is never read, even if a client misses the call of `commit` or `rollback`.

    If the last checkpoint of the server is damaged, the server returns to its previous checkpoint. If memories are
    files, the version that belongs to the previous checkpoint is therefore kept, too.

    The name of a version starts with the number of its round, for example 7 in "7-3f-1". The rest differs each time a
    round is repeated.

    Args:
        folder: folder with one subfolder for each client; None keeps the memories in RAM.
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

    def _delete(self, client: int, version: str) -> None:
        if self._folder is None:
            self._ram.get(client, {}).pop(version, None)
        else:
            remove(self._file(client, version))

    def _keep(self, client: int, version: str) -> None:
        """Delete old versions of a client's memory, and keep `version`.

        If memories are files, one more version is kept: the latest one from an earlier round.
        """
        versions = self._versions(client)
        earlier = [v for v in versions if version and _round_of(v) < _round_of(version)]
        before = max(earlier, key=_round_of) if earlier and self._folder is not None else version
        for other in versions:
            if other not in (version, before):
                self._delete(client, other)

    def load(self, client: int, version: str, *, delete_others: bool = True) -> Message:
        """Return a copy of a client's memory. To store changes to the copy, pass it to `stage`.

        Args:
            client: index of the client.
            version: name of the version to load, from the server's request; "" if the client has no memory yet.
            delete_others: whether to delete versions of the client's memory that are no longer needed, such as those of
                failed rounds. Use False for requests that only read the memory, such as an evaluation after the
                training of the same round. If this round fails, the version of the last completed round is needed
                again.

        Raises:
            CheckpointError: the memory is lost or damaged.
        """
        if delete_others:
            self._keep(client, version)
        if not version:
            return Message()
        if self._folder is not None:
            message, facts = read_message(path := self._file(client, version))
            if facts != {"client": str(client), "version": version}:
                raise CheckpointError(f"{path} belongs to another client or round: restore the file")
            return message
        if version not in self._ram.get(client, {}):
            raise CheckpointError(f"client {client} has lost its memory of version {version}: start the run again")
        return _map_tensors(self._ram[client][version], Tensor.clone)

    def stage(self, client: int, version: str, memory: Message) -> None:
        """Store a new, pending version of a client's memory. Earlier versions are not deleted.

        Args:
            client: index of the client.
            version: name of the new version, for later calls of `load` and `commit`.
            memory: contents of the memory; the tensors are stored without autograd graphs.
        """
        self._pending.append((client, version))
        if self._folder is None:
            self._ram.setdefault(client, {})[version] = _map_tensors(memory, Tensor.detach)
        else:
            write_atomically(self._file(client, version), encode(memory, {"client": str(client), "version": version}))

    def commit(self, versions: Mapping[int, str]) -> None:
        """Commit a version of each client's memory, and delete the client's other versions.

        If memories are files, one of the other versions is kept: the latest one from an earlier round.

        Args:
            versions: name of the version to commit, by client index. The memories of all other clients do not change.
        """
        for client, version in versions.items():
            self._keep(client, version)
        self._pending = [(client, version) for client, version in self._pending if client not in versions]

    def rollback(self) -> None:
        """Delete the new versions of memories that clients stored in a failed round."""
        for client, version in self._pending:
            self._delete(client, version)
        self._pending.clear()

    def restore(self, versions: Mapping[int, str]) -> None:
        """Delete memories that clients stored in an interrupted round of a resumed run, which are files.

        Args:
            versions: name of the version of each client's memory after the last completed round, by client index. If a
                client is not in the mapping, all versions of its memory are deleted.
        """
        folders = self._folder.iterdir() if self._folder is not None and self._folder.exists() else ()
        for client in [int(path.name) for path in folders if path.name.isdecimal()]:
            self._keep(client, versions.get(client, ""))


def _round_of(version: str) -> int:
    return int(version.split("-")[0])


def _map_tensors(message: Message, change: Callable[[Tensor], Tensor]) -> Message:
    """Return a copy of a message in which every tensor is replaced by `change(tensor)`."""

    def changed(value: Value) -> Value:
        if isinstance(value, Tensor):
            return change(value)
        if isinstance(value, dict):
            return {name: change(tensor) for name, tensor in value.items()}
        if isinstance(value, LabeledImages):
            columns = {name: change(column) for name, column in value.columns.items()}
            return value._with(images=change(value.images), labels=change(value.labels), columns=columns)
        return value

    return Message.unchecked({key: changed(value) for key, value in message.items()})
