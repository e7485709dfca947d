"""What the exchanges of a round cost, and who could not be used: the part of a history's row that is counted."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

__all__ = ["RoundStats"]


@dataclass
class RoundStats:
    """The counts of one round, over all its exchanges.

    Attributes:
        up, down: bytes of replies that counted, and of what clients were told, by entry's key.
        by_client: the same together, [up, down] by client.
        failed: why a client's reply is not in the round, by client.
        failed_after: why a client whose reply is in the round failed in an exchange after it, by verb and client.
        noted: what clients counted, summed.
        empty: clients that hold no images.
        same: the numbers in `by_client`: equal ones, as equal names in all rounds, are one object, for rows are held.
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

    def count(self, client: int, sent: Mapping[str, int], told: Mapping[str, int]) -> None:
        """Add the bytes of one exchange with a client.

        Args:
            client: its number.
            sent, told: bytes of its reply, and of its request, by entry's key.
        """
        for total, part in ((self.up, sent), (self.down, told)):
            for key, size in part.items():
                total[key] = total.get(key, 0) + size
        name = sys.intern(str(client))
        up, down = self.by_client.get(name, (0, 0))
        up, down = up + sum(sent.values()), down + sum(told.values())
        self.by_client[name] = [self.same.setdefault(up, up), self.same.setdefault(down, down)]

    def fail(self, verb: str, client: int, reason: str, *, folded: bool) -> None:
        """Note why a client is asked nothing more in this round.

        Args:
            verb: of the exchange in which it failed.
            client: its number.
            reason: in words for the history.
            folded: whether its reply is in the round already.
        """
        if folded:
            self.failed_after.setdefault(verb, {})[str(client)] = reason
        else:
            self.failed[str(client)] = reason if verb == "local" else f"{verb}: {reason}"

    def note(self, counts: Mapping[str, Any]) -> None:
        """Add what one client counted, by name (`counts`)."""
        for key, count in counts.items():
            self.noted[key] = self.noted.get(key, 0) + count

    def reasons(self) -> str:
        """The first reasons why clients are missing, in one line."""
        found = [*self.failed.items(), *(pair for who in self.failed_after.values() for pair in who.items())]
        return "; ".join(f"client {client} {reason}" for client, reason in found[:5])

    def row(self, drawn: list[int]) -> dict[str, Any]:
        """The columns of the history's row, for the clients that were `drawn`."""
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
