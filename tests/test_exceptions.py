"""Exceptions from other processes keep their type, message and attributes."""

from __future__ import annotations

import importlib
import pickle
import pkgutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import attacks
import distillkit
import fl
from distillkit.data.readers._ganin_digits import _read_mat
from distillkit.data.readers._picture_decoding import read_picture
from distillkit.locking import InUse
from distillkit.networks._validation import check_network
from distillkit.privacy import BudgetExhausted
from tests.refused import refused

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


def test_an_error_without_a_message_is_told_by_its_type(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> Any:
        raise EOFError

    monkeypatch.setattr("PIL.Image.open", fail)
    monkeypatch.setattr("scipy.io.loadmat", fail)
    refused(lambda: read_picture(tmp_path / "a.png", None, None), ValueError, r"a\.png: EOFError$")
    refused(lambda: _read_mat(tmp_path / "a.mat"), ValueError, "lacks X or y: EOFError$")
    refused(lambda: check_network(fail, torch.zeros(2, 1, 4, 4), classes=3), ValueError, r"\(1, 4, 4\): EOFError\(\)$")
