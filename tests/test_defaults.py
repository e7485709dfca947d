"""Defaults of public names are those of `tests/defaults.txt`: results are recorded with them.

`python -m tests.test_defaults` writes the list; its difference shows what changes for users.
"""

from __future__ import annotations

import importlib
import inspect
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.scripts import load_script

API = load_script("docs/scripts/api.py")
LIST = Path(__file__).with_name("defaults.txt")
SHARED = ("progress", "generator", "seed")  # `test_cheat_sheet.py` tests them all at once


def said(value: Any) -> str:
    """Return a default as text without an address."""
    shown = getattr(value, "__qualname__", repr(value))
    return type(value).__name__ if " at 0x" in shown else shown


def options(call: Any) -> str:
    """Return the defaults of a function or class that are not None."""
    try:
        parameters = inspect.signature(call).parameters.values()
    except (TypeError, ValueError):
        return ""
    given = [p for p in parameters if p.default not in (p.empty, None) and p.name not in SHARED]
    return ", ".join(f"{p.name}={said(p.default)}" for p in given)


def calls() -> Iterator[tuple[str, str]]:
    """Yield (module, call with its defaults) of every public function, class and method that has some."""
    for home, name in sorted({(home, name) for (_, name), home in API.homes().items()}):
        thing = getattr(importlib.import_module(home), name)
        named = {name: thing}
        if isinstance(thing, type):
            named |= {f"{name}.{n}": getattr(thing, n) for n in sorted(vars(thing)) if not n.startswith("_")}
        yield from ((home, f"{n}({found})") for n, c in named.items() if callable(c) and (found := options(c)))


def text() -> str:
    """Return a paragraph for each module."""
    found: dict[str, list[str]] = {}
    for home, call in calls():
        found.setdefault(f"{home}:", []).append(call)
    paragraphs = (" ".join([home, *sorted(set(found[home]))]) for home in found)
    return "\n".join(textwrap.fill(p, 118, break_long_words=False, break_on_hyphens=False) for p in paragraphs) + "\n"


def test_defaults_are_as_recorded() -> None:
    assert text() == LIST.read_text(encoding="utf-8")


if __name__ == "__main__":
    LIST.write_text(text(), encoding="utf-8")
