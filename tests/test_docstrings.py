"""Formal requirements on docstrings: a sentence, and a description of every argument."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import pkgutil
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest

PACKAGES = ("attacks", "distillkit", "fl")


class Documented(NamedTuple):
    """A public object: its name, docstring and arguments."""

    name: str
    text: str
    arguments: list[str]


def modules(package: str) -> Iterator[Any]:
    """Yield the public modules of a package."""
    top = importlib.import_module(package)
    yield top
    for found in pkgutil.walk_packages(getattr(top, "__path__", ()), f"{package}."):
        if not any(part.startswith("_") for part in found.name.split(".")):
            yield importlib.import_module(found.name)


def argument_names(function: Any) -> list[str]:
    """Return the names of a function's arguments, except `self`, `cls` and private ones."""
    names = inspect.signature(function).parameters
    return [n for n in names if n not in ("self", "cls") and not n.startswith("_")]


def members(cls: type) -> Iterator[Documented]:
    """Yield the public methods and properties of a class. Arguments of overridden methods are described in the base
    class.
    """
    for name, member in vars(cls).items():
        function = member.__func__ if isinstance(member, staticmethod | classmethod) else member
        function = getattr(function, "fget", None) or getattr(function, "func", None) or function
        if (name.startswith("_") and name != "__call__") or not inspect.isfunction(function):
            continue
        first = not any(name in vars(base) for base in cls.__mro__[1:])
        where = f"{cls.__module__}.{cls.__qualname__}.{name}"
        yield Documented(where, inspect.getdoc(function) or "", argument_names(function) if first else [])


def inherited(cls: type) -> set[str]:
    """Return the fields that a dataclass inherits from its bases, where they are described."""
    return {f.name for base in cls.__mro__[1:] if dataclasses.is_dataclass(base) for f in dataclasses.fields(base)}


def documented(package: str) -> Iterator[Documented]:
    """Yield every public object that a package defines."""
    for module in modules(package):
        for name, value in vars(module).items():
            if name.startswith("_") or getattr(value, "__module__", None) != module.__name__:
                continue
            text = inspect.getdoc(value) or ""
            if inspect.isfunction(value):
                yield Documented(f"{module.__name__}.{name}", text, argument_names(value))
            elif isinstance(value, type):
                own = "__init__" in vars(value) or dataclasses.is_dataclass(value)
                arguments = argument_names(value.__init__) if own and not getattr(value, "_is_protocol", False) else []
                first = [n for n in arguments if n not in inherited(value)]
                yield Documented(f"{module.__name__}.{name}", text, first)
                yield from members(value)


def defects(found: Documented) -> str:
    """Return what is missing in a docstring, or ""."""
    if len(found.text.split()) < 4:
        return f"{found.name}: {found.text!r} is no sentence"
    lacking = [n for n in found.arguments if not re.search(rf"(?<!\w){re.escape(n)}(?!\w)", found.text)]
    return f"{found.name}: not a word on {', '.join(lacking)}" if lacking else ""


@pytest.mark.parametrize("package", PACKAGES)
def test_every_public_docstring_is_a_sentence_and_names_every_argument(package: str) -> None:
    found = list(documented(package))
    assert found
    assert [said for said in map(defects, found) if said] == []
