"""What a docstring must have that a machine can see: a sentence, and a word on every argument."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import pkgutil
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest

ROOMS = ("attacks", "distillkit", "fl")


class Documented(NamedTuple):
    """Something public, where it stands, what it says, and what it takes."""

    name: str
    text: str
    arguments: list[str]


def modules(room: str) -> Iterator[Any]:
    """The public modules of a room."""
    top = importlib.import_module(room)
    yield top
    for found in pkgutil.walk_packages(getattr(top, "__path__", ()), f"{room}."):
        if not any(part.startswith("_") for part in found.name.split(".")):
            yield importlib.import_module(found.name)


def taken(function: Any) -> list[str]:
    """The names of a function's arguments, but for `self`, `cls` and what is none of a user's business."""
    names = inspect.signature(function).parameters
    return [n for n in names if n not in ("self", "cls") and not n.startswith("_")]


def members(cls: type) -> Iterator[Documented]:
    """The public methods and properties that a class writes; one that it inherits is named where it was first."""
    for name, member in vars(cls).items():
        function = member.__func__ if isinstance(member, staticmethod | classmethod) else member
        function = getattr(function, "fget", None) or getattr(function, "func", None) or function
        if (name.startswith("_") and name != "__call__") or not inspect.isfunction(function):
            continue
        first = not any(name in vars(base) for base in cls.__mro__[1:])
        where = f"{cls.__module__}.{cls.__qualname__}.{name}"
        yield Documented(where, inspect.getdoc(function) or "", taken(function) if first else [])


def inherited(cls: type) -> set[str]:
    """The fields that a dataclass takes over from its bases, where they are named."""
    return {f.name for base in cls.__mro__[1:] if dataclasses.is_dataclass(base) for f in dataclasses.fields(base)}


def documented(room: str) -> Iterator[Documented]:
    """Everything public that a room defines."""
    for module in modules(room):
        for name, value in vars(module).items():
            if name.startswith("_") or getattr(value, "__module__", None) != module.__name__:
                continue
            text = inspect.getdoc(value) or ""
            if inspect.isfunction(value):
                yield Documented(f"{module.__name__}.{name}", text, taken(value))
            elif isinstance(value, type):
                own = "__init__" in vars(value) or dataclasses.is_dataclass(value)
                arguments = taken(value.__init__) if own and not getattr(value, "_is_protocol", False) else []
                first = [n for n in arguments if n not in inherited(value)]
                yield Documented(f"{module.__name__}.{name}", text, first)
                yield from members(value)


def wrong(found: Documented) -> str:
    """What a docstring lacks, or ""."""
    if len(found.text.split()) < 4:
        return f"{found.name}: {found.text!r} is no sentence"
    lacking = [n for n in found.arguments if not re.search(rf"(?<!\w){re.escape(n)}(?!\w)", found.text)]
    return f"{found.name}: not a word on {', '.join(lacking)}" if lacking else ""


@pytest.mark.parametrize("room", ROOMS)
def test_every_public_docstring_is_a_sentence_and_names_every_argument(room: str) -> None:
    found = list(documented(room))
    assert found
    assert [said for said in map(wrong, found) if said] == []
