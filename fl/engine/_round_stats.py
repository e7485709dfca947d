"""Bytes, times and failures of one round."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass
class RoundStats:
    """Bytes, times and failures of one round, summed over all its exchanges.

    In an exchange, clients get a request and send a reply. The exchange "local" is the training.

    Attributes:
        up: bytes of the valid replies, by entry key.
        down: bytes of the requests, by entry key.
        by_client: pair [bytes of the replies, bytes of the requests] by client index.
        failed: reasons why clients failed in the "local" exchange or an earlier one, by client index. The replies of
            these clients are not used.
        failed_after: reasons why clients failed in an exchange after "local", by the exchange's name and the client
            index. The "local" replies of these clients are used.
        noted: numbers that clients report in `Client.notes`, summed over the clients, by name.
        dominant: clients that make up most of an aggregate, and its share, if the server sees single replies.
        empty: indices of the clients without images.
        replied: indices of the clients that sent a reply in the present exchange, whether it is usable or not.
        integer_pool: pool of the integers in `by_client`. Equal integers share one object to save memory, because the
            pairs of all rounds stay in memory.
        seconds: CPU seconds of all clients.
        server_seconds: CPU seconds that the server took to process the replies.
    """

    up: dict[str, int] = field(default_factory=dict)
    down: dict[str, int] = field(default_factory=dict)
    by_client: dict[str, list[int]] = field(default_factory=dict)
    integer_pool: dict[int, int] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    failed_after: dict[str, dict[str, str]] = field(default_factory=dict)
    noted: dict[str, float] = field(default_factory=dict)
    dominant: dict[int, str] = field(default_factory=dict)
    empty: list[int] = field(default_factory=list)
    replied: set[int] = field(default_factory=set)
    seconds: float = 0.0
    server_seconds: float = 0.0

    def count(self, client: int, sent: Mapping[str, int], received: Mapping[str, int]) -> None:
        """Add the sizes in bytes of one client's request and reply to the counts of the round."""
        for total, part in ((self.up, sent), (self.down, received)):
            for key, size in part.items():
                total[key] = total.get(key, 0) + size
        name = sys.intern(str(client))
        up, down = self.by_client.get(name, (0, 0))
        up, down = up + sum(sent.values()), down + sum(received.values())
        self.by_client[name] = [self.integer_pool.setdefault(up, up), self.integer_pool.setdefault(down, down)]

    def fail(self, verb: str, client: int, reason: str, *, after_local: bool) -> None:
        """Record that a client failed. Such a client is left out of the rest of the round."""
        if after_local:
            self.failed_after.setdefault(verb, {})[str(client)] = reason
        else:
            self.failed[str(client)] = reason if verb in ("answer", "local") else f"{verb}: {reason}"

    def note(self, counts: Mapping[str, Any]) -> None:
        """Add one client's `counts` (the numbers in its `Client.notes`, by name) to the sums over all clients."""
        for key, count in counts.items():
            self.noted[key] = self.noted.get(key, 0) + count

    def reasons(self) -> str:
        """Return one line of text: up to five reasons why clients failed, with the number of clients for each."""
        found = [*self.failed.items(), *(pair for failed in self.failed_after.values() for pair in failed.items())]
        by_reason: dict[str, list[str]] = {}
        for client, reason in found:
            by_reason.setdefault(reason, []).append(client)
        texts = [
            f"{f'client {c[0]}' if len(c) == 1 else f'{len(c)} of {len(self.by_client)} clients'} {reason}"
            for reason, c in by_reason.items()
        ]
        return "; ".join(texts[:5] + [f"and {len(texts) - 5} more"] * (len(texts) > 5))

    def row(self, drawn: list[int]) -> dict[str, Any]:
        """Return the round's bytes, failures and times as a row for the history, by column name.

        `history.masked` hides the client indices of a secret draw; tell it of a new column that has some.
        """
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
            **({"dominant": {str(client): share for client, share in self.dominant.items()}} if self.dominant else {}),
            **({"noted": self.noted} if self.noted else {}),
            "client_seconds": self.seconds,
            "server_seconds": self.server_seconds,
        }
