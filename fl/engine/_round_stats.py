"""Counts of one round: bytes, seconds, notes and failures of its exchanges."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

__all__ = ["RoundStats"]


@dataclass
class RoundStats:
    """Counts of one round, over all its exchanges.

    Attributes:
        up, down: bytes of the replies that counted, and of the requests, by entry key.
        by_client: both together, [up, down] by client.
        failed: why a client's reply is not in the round, by client.
        failed_after: why a client whose reply is in the round failed in a later exchange, by verb and client.
        noted: the clients' notes, summed.
        empty: clients without images.
        same: the numbers in `by_client`; equal numbers are one object, because the rows of all rounds stay in memory.
        seconds, server_seconds: CPU seconds of the clients, and of the server between the exchanges.
    """

    up: dict[str, int] = field(default_factory=dict)
    down: dict[str, int] = field(default_factory=dict)
    by_client: dict[str, list[int]] = field(default_factory=dict)
    same: dict[int, int] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    failed_after: dict[str, dict[str, str]] = field(default_factory=dict)
    noted: dict[str, float] = field(default_factory=dict)
    empty: list[int] = field(default_factory=list)
    seconds: float = 0.0
    server_seconds: float = 0.0

    def count(self, client: int, sent: Mapping[str, int], received: Mapping[str, int]) -> None:
        """Add the bytes of one exchange with a client.

        Args:
            client: its number.
            sent, received: bytes of its reply, and of its request, by entry key.
        """
        for total, part in ((self.up, sent), (self.down, received)):
            for key, size in part.items():
                total[key] = total.get(key, 0) + size
        name = sys.intern(str(client))
        up, down = self.by_client.get(name, (0, 0))
        up, down = up + sum(sent.values()), down + sum(received.values())
        self.by_client[name] = [self.same.setdefault(up, up), self.same.setdefault(down, down)]

    def fail(self, verb: str, client: int, reason: str, *, late: bool) -> None:
        """Record why a client is left out of the rest of the round.

        Args:
            verb: the exchange in which it failed.
            client: its number.
            reason: text for the history.
            late: whether its "local" reply is accumulated already.
        """
        if late:
            self.failed_after.setdefault(verb, {})[str(client)] = reason
        else:
            self.failed[str(client)] = reason if verb in ("answer", "local") else f"{verb}: {reason}"

    def note(self, counts: Mapping[str, Any]) -> None:
        """Add one client's notes, by name (`counts`)."""
        for key, count in counts.items():
            self.noted[key] = self.noted.get(key, 0) + count

    def reasons(self) -> str:
        """Return the first five reasons why clients failed, in one line."""
        found = [*self.failed.items(), *(pair for failed in self.failed_after.values() for pair in failed.items())]
        return "; ".join(f"client {client} {reason}" for client, reason in found[:5])

    def row(self, drawn: list[int]) -> dict[str, Any]:
        """Return the columns of the history's row, for the clients that were `drawn`."""
        return {
            "bytes_up": sum(self.up.values()),
            "bytes_down": sum(self.down.values()),
            "up": self.up,
            "down": self.down,
            "bytes_by_client": self.by_client,
            "drawn": drawn,
            "failed": self.failed,
            **({"failed_after": self.failed_after} if self.failed_after else {}),
            "empty": self.empty,
            **({"noted": self.noted} if self.noted else {}),
            "client_seconds": self.seconds,
            "server_seconds": self.server_seconds,
        }
