"""The private example runs as a user runs it: every row states what its own ledger says."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

from distillkit.privacy import Ledger
from tests.scripts import load_script


@pytest.fixture(scope="module")
def feddm() -> ModuleType:
    return load_script("examples/feddm.py")


def play(module: ModuleType, monkeypatch: pytest.MonkeyPatch, out: Path, *more: str) -> list[dict]:
    words = ["feddm.py", "--preset", "smoke", "--out", str(out), "--workers", "1", "--device", "cpu", *more]
    monkeypatch.setattr(sys, "argv", words)
    module.main()
    return json.loads((out / "summary.json").read_text())


def test_every_private_row_is_at_the_epsilon_asked_for(
    feddm: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = play(feddm, monkeypatch, tmp_path, "--dp", *feddm.TITLES, "--epsilon", "8")
    said = capsys.readouterr().out
    assert len(lines) == len(feddm.TITLES) + 3 + 1
    for line in lines:
        ledger = tmp_path / line["run"] / "ledger.jsonl"
        if line["method"] == "FedDM":
            assert line["epsilon"] is None
            assert not ledger.exists()
            continue
        events = Ledger(ledger)
        assert line["epsilon"] == events.epsilon()
        assert 7.9 < line["epsilon"] <= 8 * (1 + 1e-9)
        assert {e.client for e in events.events} in ({"*"}, set(map(str, range(feddm.CLIENTS))))
        assert not any(e.seeded for e in events.events)
        assert f"{line['epsilon']:.3f}" in said
        assert (line["method"] == feddm.TITLES["client_dp"]) == ("one client" in str(events.guarantee()))
        assert ("secure sum" in str(events.guarantee())) == (line["method"] == feddm.TITLES["shares"])
    assert said.count("epsilon of the 10 clients") == 2 * 8
    before = (tmp_path / "summary.json").read_text()
    play(feddm, monkeypatch, tmp_path, "--dp", *feddm.TITLES, "--epsilon", "8")
    assert (tmp_path / "summary.json").read_text() == before


def test_without_privacy(feddm: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = play(feddm, monkeypatch, tmp_path, "--dp", "none", "--split", "iid")
    assert {x["method"] for x in lines} == {"FedAvg", "FedProx", "SCAFFOLD", "FedDM"}
    assert all(x["epsilon"] is None for x in lines)
