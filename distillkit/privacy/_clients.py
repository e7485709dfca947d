"""Names of clients in a ledger."""

from __future__ import annotations

from numbers import Integral

__all__ = ["ALL_CLIENTS", "client_id"]

ALL_CLIENTS = "*"
"""The client of an event that touches the records of all clients."""


def client_id(client: int | str) -> str:
    """Return a client's name in a ledger, a string: 1 and "1" are the same client.

    Args:
        client: a number or a name.

    Raises:
        TypeError: neither an integer nor a string.
    """
    if isinstance(client, bool) or not isinstance(client, str | Integral):
        raise TypeError(f"client must be an integer or a string, got {type(client).__name__}")
    return str(client)
