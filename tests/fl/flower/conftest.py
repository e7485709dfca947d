"""Flower, or its fake, for the tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.fl.flower import fake_flower


@pytest.fixture(autouse=True, scope="module")
def flower() -> Iterator[None]:
    with fake_flower.installed():
        yield
