"""Exceptions from other processes keep their type, message and attributes."""

from __future__ import annotations

import importlib
import pickle
import pkgutil
from collections.abc import Callable, Iterator

import pytest

import attacks
import distillkit
import fl
from distillkit.locking import InUse
from distillkit.privacy import BudgetExhausted

OWN: dict[type[BaseException], Callable[[], BaseException]] = {
    InUse: lambda: InUse("runs/a is another's", 7),
    BudgetExhausted: lambda: BudgetExhausted("too much", remaining=3),
}
"""One of each class that is not made of a message alone."""


def exception_classes() -> Iterator[type[BaseException]]:
    """Return every class of exceptions that our packages define."""
    for package in (distillkit, attacks, fl):
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            for found in vars(importlib.import_module(module.name)).values():
                if isinstance(found, type) and issubclass(found, BaseException) and found.__module__ == module.name:
                    yield found


CLASSES = sorted(set(exception_classes()), key=lambda kind: kind.__qualname__)


def test_exception_classes_are_found() -> None:
    assert set(OWN) < set(CLASSES)
    assert set(OWN) == {kind for kind in CLASSES if "__init__" in vars(kind)}


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__qualname__)
def test_exception_survives_pickling(kind: type[BaseException]) -> None:
    error = OWN.get(kind, lambda: kind("the message"))()
    error.add_note("in a worker")
    found = pickle.loads(pickle.dumps(error))
    assert type(found) is kind
    assert str(found) == str(error)
    assert found.args == error.args
    assert vars(found) == vars(error)
