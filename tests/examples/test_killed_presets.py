"""Two smoke presets in pieces of twelve seconds, killed and continued three times; `make killed` does so for all."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.kill_examples import finish, killed_in_pieces, record, start


@pytest.mark.parametrize("example", ["single_image", "vhl"])
def test_smoke_preset_killed_three_times_equals_an_uninterrupted_run(tmp_path: Path, example: str) -> None:
    whole, pieces = tmp_path / "whole", tmp_path / "pieces"
    finish(start(whole, example=example))
    killed, _ = killed_in_pieces(pieces, random.Random(example), whole, 3, example=example, seconds=12)
    assert len(killed) == 3
    assert record(whole) == record(pieces)
