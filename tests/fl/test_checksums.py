"""Changed or missing files of a run are noticed before the run continues or is read (defects B7 and B8)."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

import pytest

from fl import CheckpointError, FedAvg, Run, simulate
from fl.engine.store import Store
from fl.study import load
from tests.fl.federations import Tiny, federation
from tests.refused import refused

METHOD = FedAvg(factory=Tiny, steps=1, lr=0.1)


def play(folder: Path, rounds: int, **options: Any) -> Run:
    return simulate(METHOD, federation(), rounds=rounds, seed=0, out=folder, progress=False, **options)


@pytest.mark.parametrize("name", ["history.jsonl", "config.json"])
def test_a_flipped_bit_is_noticed(name: str, tmp_path: Path) -> None:
    play(tmp_path, 3)
    path, draws = tmp_path / name, random.Random(0)
    whole = path.read_bytes()
    upto = len(whole.splitlines()[0]) if name == "history.jsonl" else len(whole)  # the last row can be run again
    places = [i for i, byte in enumerate(whole[:upto]) if chr(byte).isdecimal()]
    for place in draws.sample(places, 20):
        digit = str((int(chr(whole[place])) + 1 + draws.randrange(9)) % 10).encode()
        path.write_bytes(whole[:place] + digit + whole[place + 1 :])
        for use in (lambda: play(tmp_path, 4, resume=True), lambda: load(tmp_path, method=METHOD)):
            with pytest.raises((ValueError, RuntimeError)) as caught:
                use()
            assert str(path) in str(caught.value) or re.search("settings|method must be that", str(caught.value))
    path.write_bytes(whole)
    assert play(tmp_path, 4, resume=True).rows[-1]["round"] == 4


def test_missing_manifest_does_not_start_the_run_anew(tmp_path: Path) -> None:
    play(tmp_path, 3)
    manifest = tmp_path / "checkpoint" / "manifest.json"
    whole = manifest.read_bytes()
    manifest.unlink()
    (tmp_path / "checkpoint" / "manifest.previous.json").unlink()
    with pytest.raises(CheckpointError, match=r"manifest.json is missing, although the history has rounds"):
        play(tmp_path, 4, resume=True)
    assert len((tmp_path / "history.jsonl").read_bytes().splitlines()) == 3
    manifest.write_bytes(whole)
    assert len(play(tmp_path, 4, resume=True).rows) == 4


@pytest.mark.parametrize("end", [None, -1, 9], ids=["whole", "without newline", "torn"])
def test_run_killed_in_its_first_round_starts_anew(end: int | None, tmp_path: Path) -> None:
    """The row of the round is written before the manifest."""
    play(tmp_path, 1)
    (tmp_path / "checkpoint" / "manifest.json").unlink()
    row = (tmp_path / "history.jsonl").read_bytes()
    (tmp_path / "history.jsonl").write_bytes(row[:end])
    assert [row["round"] for row in play(tmp_path, 2, resume=True).rows] == [1, 2]


def test_checksums_cover_the_committed_rounds_only(tmp_path: Path) -> None:
    """A row that a killed round has written is cut, and the checksum of a resumed run continues the old one."""
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    play(whole, 4)
    for rounds in (1, 2, 4):
        play(parts, rounds, resume=(parts / "config.json").exists())
        with (parts / "history.jsonl").open("ab") as file:
            file.write(json.dumps({"round": rounds + 1}).encode() + b"\n")
    assert [row["accuracy"] for row in Store(parts).rows()] == [row["accuracy"] for row in Store(whole).rows()]
    path = parts / "checkpoint" / "manifest.json"
    manifest = json.loads(path.read_bytes())
    assert manifest.pop("sums").keys() == {"config.json", "history.jsonl", "checkpoint/clients.jsonl"}
    path.write_bytes(json.dumps(manifest).encode())
    refused(Store(parts).rows, CheckpointError, r"config.json was changed after the run wrote it .*: restore the file$")
