"""Table of all fields in messages between processes or machines, with the type and range of each field.

Received messages are untrusted. `read_fields` checks their fields before the values are used in any way.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

MAX_CLIENTS = 1_000_000
"""Largest number of clients of a run on nodes."""

_LONGEST_NAME = 1000


_TYPES: dict[str, tuple[type, ...]] = {
    "a string": (str,), "an integer": (int,), "a number": (int, float), "true or false": (bool,), "a list": (list,),
    "a mapping": (dict,),
}  # fmt: skip


@dataclass(frozen=True)
class Field:
    """Specification of one field in a message: the type and range of its value.

    Attributes:
        kind: name of the value's type, a key of `_TYPES`, such as "a string".
        least, most: smallest and largest value of a number, or smallest and largest length of a string, list or
            mapping.
        pattern: regular expression that the whole string must match; "" allows any string.
        optional: whether the value may be None.
        item: specification of each item of a list, or of each value of a mapping. The keys of a mapping may always have
            up to 1,000 characters.
    """

    kind: str
    least: float = 0
    most: float = 0
    pattern: str = ""
    optional: bool = False
    item: Field | None = None

    def accepts(self, value: Any) -> bool:
        """Return whether a value fits this specification, that is, has the right type, range and length."""
        if value is None and self.optional:
            return True
        if type(value) not in _TYPES[self.kind]:
            return False
        if isinstance(value, bool):
            return True
        size = value if isinstance(value, int | float) else len(value)
        if not self.least <= size <= self.most:  # NaN is in no range
            return False
        if isinstance(value, str):
            return not self.pattern or re.fullmatch(self.pattern, value) is not None
        if isinstance(value, dict) and any(len(name) > _LONGEST_NAME for name in value):
            return False
        items = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
        return self.item is None or all(self.item.accepts(one) for one in items)

    def __str__(self) -> str:
        if self.kind == "true or false":
            return self.kind
        size = "in" if self.kind in ("an integer", "a number") else "of a length in"
        shape = f" that matches {self.pattern}" if self.pattern else ""
        items = f", each {self.item}" if self.item is not None else ""
        return f"{self.kind} {size} [{self.least:g}, {self.most:g}]{shape}{items}"


def _text(most: int, pattern: str = "", least: int = 0, optional: bool = False) -> Field:
    return Field("a string", least, most, pattern, optional)


_FLAG, _CLIENT = Field("true or false"), Field("an integer", 0, MAX_CLIENTS - 1)
_VERSION = r"(\d{1,9}(-[0-9A-Za-z_-]{1,64})?)?"
_HEX = "[0-9a-f]*"
_KEY = _text(1000, least=1)

FIELDS: dict[str, dict[str, Field]] = {
    "job": {
        "header": Field("a mapping", 0, 10), "client": _CLIENT, "ledger": Field("a mapping", 0, 10, optional=True),
        "memory": _text(75, _VERSION), "entries": Field("a list", 0, 10_000, item=_KEY),
        "digests": Field("a mapping", 0, 10_000, item=_text(128, _HEX, 1)),
    },
    "header": {
        "verb": _text(64, "[A-Za-z_]+", 1), "round": Field("an integer", 0, 10**9),
        "attempt": _text(64, "[0-9A-Za-z_-]+", 1), "seed": Field("an integer", 0, 2**64),
        "secret": Field("an integer", 0, 2**64, optional=True),
    },
    "context": {
        "run": _text(16, "[0-9a-f]{16}", 16), "classes": Field("an integer", 1, 10**6, optional=True),
        "deadline": Field("a number", 0, 10**8), "ledger": Field("a mapping", 0, 10, optional=True),
    },
    "ledger position": {"name": _text(64, _HEX), "seen": Field("an integer", 0, 2**53)},
    "result": {
        "error": _text(500, optional=True), "absent": _FLAG, "seconds": Field("a number", 0, 10**9),
        "notes": Field("a mapping", 0, 1000), "remembers": _FLAG,
    },
    "exhausted": {"reason": _text(500), "remaining": Field("an integer", 0, 10**12)},
    "ledger report": {
        "name": _text(64, _HEX), "since": Field("an integer", 0, 2**53),
        "lines": Field("a list", 0, 100_000, item=Field("a list", 2, 2)),
    },
    "node": {
        "partition": _CLIENT, "partitions": Field("an integer", 1, MAX_CLIENTS), "method": _text(10**6),
        "task": _text(10**5), "fingerprint": _text(128, _HEX), "ledger": _text(128, _HEX), "classes": _text(10**6),
        "version": _text(100), "clock": Field("a number", 0, 10**12),
    },
}  # fmt: skip
"""Fields of each part of a message: a job, its header and context; a result, or the error that the run's budget is
exhausted; the server's position in a ledger, and the ledger's report; and the description of a node."""


def read_fields(part: str, value: str | Mapping[str, Any] | None) -> dict[str, Any]:
    """Parse one part of a received message, and return its fields after checking all of them."""
    try:
        found = json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError) as error:
        raise ValueError(f"its {part} is not JSON: {str(error)[:100]}") from error
    table = FIELDS[part]
    if not isinstance(found, dict) or found.keys() != table.keys():
        got = sorted(map(str, found))[:10] if isinstance(found, dict) else type(found).__name__
        raise ValueError(f"its {part} must have the fields {sorted(table)}, got {got!s:.200}")
    for name, field in table.items():
        if not field.accepts(found[name]):
            raise ValueError(f"its {part}'s {name} must be {field}, got {_shown(found[name])}")
    return found


def _shown(value: Any) -> str:
    try:
        return f"{value!r:.60}"
    except ValueError:  # an integer with more digits than Python prints
        return "a huge number"
