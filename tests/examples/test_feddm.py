"""The private example runs as a user runs it: every row states what its own ledger says."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType

import pytest

from distillkit.privacy import Ledger
from distillkit.study import Study, equal_tries, read_records
from tests.scripts import load_script


@pytest.fixture(scope="module")
def feddm() -> ModuleType:
    return load_script("examples/feddm.py")


def play(module: ModuleType, out: Path, *more: str) -> None:
    module.main(["--preset", "smoke", "--out", str(out), "--workers", "1", "--device", "cpu", *more])


def test_every_private_row_is_at_the_epsilon_asked_for(
    feddm: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    play(feddm, tmp_path, "--dp", *feddm.TITLES, "--epsilon", "8")
    said = capsys.readouterr().out
    records = read_records(tmp_path)
    assert len(records) == len(feddm.TITLES) + 3 + 1
    for record in records:
        assert json.loads((record.folder / "config.json").read_text())["recipe"] is not None
        line, ledger = record.line, record.folder / "ledger.jsonl"
        if record.method == "FedDM":
            assert line["epsilon"] is None
            assert not ledger.exists()
            continue
        events = Ledger(ledger)
        assert line["epsilon"] == events.epsilon()
        assert 7.9 < line["epsilon"] <= 8 * (1 + 1e-9)
        assert (line["noise"], line["delta"]) == ("operating system", feddm.DELTA)
        assert {e.client for e in events.events} in ({"*"}, set(map(str, range(feddm.CLIENTS))))
        whole = record.method.startswith(feddm.TITLES["client_dp"])
        assert line["relation"] == f"add or remove one {'client' if whole else 'record'}"
        assert ("secure sum" in str(events.guarantee())) == record.method.startswith(feddm.TITLES["shares"])
    assert equal_tries(tmp_path) == {"digits-dirichlet": 1}
    assert (tmp_path / "table.md").read_text() in said


def test_tries_are_equally_many_at_every_epsilon_on_public_images(
    feddm: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    studies: list[Study] = []
    monkeypatch.setattr(feddm, "run_study", lambda study, *_: studies.append(study))
    feddm.main(["--dp", *feddm.TITLES, "--epsilon", "8", "2", "--dataset", "mnist", "--split", "iid"])
    study = studies[-1]
    assert (list(study.plan.tasks), study.tries, len(study.plan.ways)) == (["mnist-iid"], 6, 2 * 8 + 1)
    assert {way.like for way in study.plan.ways.values()} == {None}
    assert study.plan.tune_on is not None
    assert study.plan.tune_on.data.args[0] == "usps"  # type: ignore[union-attr]
    feddm.main(["--dp", "none"])
    assert set(studies[-1].plan.ways) == {"FedAvg", "FedProx", "SCAFFOLD", "FedDM"}


def test_a_step_of_dp_sgd_has_no_more_records_than_it_may(feddm: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    studies: list[Study] = []
    monkeypatch.setattr(feddm, "run_study", lambda study, *_: studies.append(study))
    feddm.main([])
    way, task = studies[0].plan.ways["FedAvg with DP-SGD, epsilon 8"], studies[0].plan.tasks["digits-dirichlet"]
    for dataset, rate, size in (("digits", 0.5, 143), ("mnist", 120 / 6000, 6000)):
        renamed = type(task)(f"{dataset}-iid", task.data, task.partition, factory_options=task.factory_options)
        made = way.made(renamed, task.load(), dict(way.tries[1]))
        [dp] = made.addons
        assert (dp.rate, dp.size) == (rate, size)
