"""What the server knows that each client has: the version of its memory, and which payloads of kept entries."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from fl.engine._transport import ClientRequest

__all__ = ["ClientCacheIndex", "Record"]


@dataclass(frozen=True)
class Record:
    """One client's committed memory version ("" for none), and the digests of its cached entries by key."""

    memory: str = ""
    payloads: Mapping[str, str] = field(default_factory=dict)


class ClientCacheIndex:
    """The server's records of clients, which change with the round or not at all.

    It holds a record for each client that was ever drawn and has anything, and says what a round changed, so that the
    checkpoint grows by a line of the drawn clients and is never written whole.
    """

    def __init__(self) -> None:
        self._committed: dict[int, Record] = {}
        self._pending: dict[int, Record] = {}

    def of(self, client: int) -> Record:
        """What the `client` has, this round included."""
        return self._pending.get(client) or self._committed.get(client, Record())

    def update(self, client: int, request: ClientRequest | None, memory: str = "") -> None:
        """Note that a client has got a request, and that its answer counts.

        Args:
            client: its number.
            request: what it was told; None if nothing was written.
            memory: the version that it now remembers; "" if it wrote nothing.
        """
        before = self.of(client)
        after = Record(memory or before.memory, {**before.payloads, **(request.digests if request is not None else {})})
        if after != before:
            self._pending[client] = after

    def changes(self) -> dict[str, Any]:
        """This round's new records, by client, for the checkpoint."""
        return {str(client): {"memory": r.memory, "bodies": dict(r.payloads)} for client, r in self._pending.items()}

    def commit(self) -> dict[int, str]:
        """The round is committed; returns the memories that count from now on, by client."""
        self._committed |= self._pending
        versions = {client: record.memory for client, record in self._pending.items() if record.memory}
        self._pending.clear()
        return versions

    def rollback(self) -> None:
        """The round has failed: nothing that was noted in it counts."""
        self._pending.clear()

    def restore(self, changes: Mapping[str, Any]) -> None:
        """Take over one round's `changes` from a checkpoint."""
        self._committed |= {int(client): Record(r["memory"], r.get("bodies", {})) for client, r in changes.items()}

    def versions(self) -> dict[int, str]:
        """The committed memories, by client."""
        return {client: record.memory for client, record in self._committed.items() if record.memory}
