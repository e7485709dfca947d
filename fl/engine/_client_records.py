"""The server's records of the values that each client has stored: its memory, and the entries in its cache."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class ClientRecord:
    """The server's record of the values that one client keeps between requests.

    Attributes:
        memory: name of the latest stored version of the client's memory; "" if the client has no memory.
        cached: digest of each message entry that the client has in its cache, by the entry's key.
    """

    memory: str = ""
    cached: Mapping[str, str] = field(default_factory=dict)


class ClientRecords:
    """The records of all clients that were ever drawn. A round's changes are pending until `commit` or `rollback`."""

    def __init__(self) -> None:
        self._committed: dict[int, ClientRecord] = {}
        self._pending: dict[int, ClientRecord] = {}

    def __getitem__(self, client: int) -> ClientRecord:
        """Return the record of a client, with the pending changes of this round."""
        return self._pending.get(client) or self._committed.get(client, ClientRecord())

    def update(self, client: int, digests: Mapping[str, str], memory: str = "") -> None:
        """Record a valid reply: the client now has the request's cached entries and, if named, a new memory."""
        before = self[client]
        after = ClientRecord(memory or before.memory, {**before.cached, **digests})
        if after != before:
            self._pending[client] = after

    def changes(self) -> dict[str, Any]:
        """Return the records that changed in this round as JSON values by client index, for the checkpoint."""
        return {str(client): {"memory": r.memory, "cached": dict(r.cached)} for client, r in self._pending.items()}

    def commit(self) -> dict[int, str]:
        """Commit the changes of this round, and return the new versions of memories by client index."""
        self._committed |= self._pending
        versions = {client: record.memory for client, record in self._pending.items() if record.memory}
        self._pending.clear()
        return versions

    def rollback(self) -> None:
        """Discard the changes of a failed round."""
        self._pending.clear()

    def restore(self, changes: Mapping[str, Any]) -> None:
        """In a resumed run, restore the records that changed in one round, as `changes` returned them."""
        for client, record in changes.items():
            self._committed[int(client)] = ClientRecord(record["memory"], record["cached"])

    def versions(self) -> dict[int, str]:
        """Return the name of the committed version of each client's memory, by client index."""
        return {client: record.memory for client, record in self._committed.items() if record.memory}
