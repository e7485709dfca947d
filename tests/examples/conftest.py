"""The script that a test file is named after, and the study that its command line requests. All tests are slow."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.examples.studies import requested_study
from tests.scripts import EXAMPLES, load_script


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests in this folder: they run whole scripts."""
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            item.add_marker(pytest.mark.slow)


@pytest.fixture(scope="module")
def script(request: pytest.FixtureRequest) -> Any:
    return load_script(EXAMPLES[request.module.__name__.split(".")[-1].removeprefix("test_")])


@pytest.fixture
def planned(script: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    return partial(requested_study, script, monkeypatch)
