"""VHL's example: table numbers from records, and serializable candidates."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest
from matplotlib.figure import Figure

from distillkit.study import Records, read_records, write_records
from tests.distillkit.study import sample_records
from tests.examples.image_folder import folder
from tests.examples.studies import configurations, requested_study

TINY = ["--preset", "smoke", "--rounds", "2", "--steps", "1", "--workers", "1", "--device", "cpu", "--no-ablations"]


def test_every_number_of_the_table_is_in_the_records(
    script: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script.main([*TINY, "--out", str(tmp_path)])
    said, records = capsys.readouterr().out, read_records(tmp_path)
    assert said.startswith(script.CLAIM.split("\n")[0])
    assert len(records) == 2 * (1 + len(script.BASES))
    text = (tmp_path / "table.md").read_text(encoding="utf-8")
    assert text in said
    assert script.CLAIM in text
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line[:1] == "|"]
    for record in records:
        [main] = (row for row in rows if row[1] == record.method and len(row) == 9)
        assert main[2:4] == ["1", f"{100 * record.line['accuracy_last']:.1f}"]
        assert main[6:8] == [f"{record.line[key] / 1e6:.2f}" for key in ("bytes_up", "bytes_down")]
    difference = {r.method: r.line["accuracy_last"] for r in records}
    [pair] = (row for row in rows if row[1] == "FedAvg + VHL" and len(row) == 6)
    assert pair[3] == f"{100 * (difference['FedAvg + VHL'] - difference['FedAvg']):+.1f}"
    pictures = ("accuracy_by_round", "accuracy_by_bytes", "accuracy_by_client_seconds", "noise")
    for name in pictures:
        assert (tmp_path / f"{name}.png").stat().st_size > 5000


def test_every_candidate_is_a_distinct_serializable_method(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    study = requested_study(script, monkeypatch, "--preset", "cpu", "--dataset", "fashionmnist", "digits")
    assert (study.num_configurations, study.design.seeds) == (4, (0, 1, 2))
    assert list(study.design.tasks) == ["fashionmnist", "digits"]
    candidates, task = study.design.candidates, study.design.tasks["digits"]
    for name, candidate in candidates.items():
        assert (candidate.seeds is None) == (name in script.SEARCH) == (candidate.like is None), name
        headline = name in (*script.SEARCH, *script.BASES) or name.endswith("+ VHL")
        assert candidate.tasks == (None if headline else ("digits",)), name
    found = configurations(candidates, task, tmp_path)
    assert len({one for own in found.values() for one in own}) == sum(len(set(own)) for own in found.values())
    assert len(candidates) == 8 + 12
    whole = candidate.build(task, task.load(), {"lr": 0.1}).settings
    assert (whole.momentum, whole.optimizer.weight_decay, whole.optimizer.lr_decay) == (0.9, 1e-4, 0.992)


@pytest.mark.parametrize(
    ("said", "name", "classes"),
    [
        ("0.1", "digits", None),
        (".05", "digits-0.05", None),
        ("two-classes", "digits-two-classes", 2),
        ("clusters", "digits-clusters", 2),
    ],
)
def test_split_norm_and_rate_apply_to_all_candidates(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, said: str, name: str, classes: int | None
) -> None:
    words = ["--dataset", "digits", "--split", said, "--norm", "batch", "--lr", "0.05", "--preset", "cpu", "--pair"]
    study = requested_study(script, monkeypatch, *words)
    [task] = study.design.tasks.values()
    assert task.name == name
    assert task.factory_options == {"width": 32, "depth": 2, "norm": "batch"}
    assert [candidate.search[0]["lr"] for candidate in study.design.candidates.values()] == [0.05, 0.05]
    assert study.num_configurations == 1
    clients = task.assign(task.load(), 0).clients
    assert len(clients) == 10
    if classes is not None:
        assert {len(client.labels.unique()) for client in clients} == {classes}
    if said == "clusters":
        assert {tuple(client.labels.unique().tolist()) for client in clients} == {(2 * k, 2 * k + 1) for k in range(5)}


def test_unknown_split_is_refused(script: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    for said in ("0", "pairs"):
        with pytest.raises(SystemExit):
            script.main(["--split", said])
    assert "--split" in capsys.readouterr().err


def test_user_images_have_equally_many_virtual_and_real_classes(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ("north", "south", "west")
    places = [str(folder(tmp_path / name, 60 * i, classes=("cat", "cow", "dog"))) for i, name in enumerate(names)]
    monkeypatch.setattr("shared.study.curves", lambda *_, **__: Figure())
    monkeypatch.setattr(script, "sets_sent", lambda *_, **__: None)
    script.main([*TINY, "--size", "16", "--data", *places, "--out", str(tmp_path / "out")])
    record = next(r for r in read_records(tmp_path / "out") if r.method == "FedAvg + VHL")
    assert record.rows[0]["down"]["VHL.noise:labels"] % (8 * 3) == 0
    assert len(record.rows[0]["drawn"]) == 2


def test_switch_uses_the_settings_of_another_study(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = [sample_records.record([0.5], name, task="cifar10", settings={"lr": 0.07}) for name in script.SEARCH]
    write_records(Records(runs), tmp_path / "there.jsonl")
    words = ["--pair", "--participation", "1", "--network", "resnet8", "--settings-of", str(tmp_path / "there.jsonl")]
    study = requested_study(script, monkeypatch, *words, "--dataset", "cifar10")
    assert [dict(candidate.search[0]) for candidate in study.design.candidates.values()] == [{"lr": 0.07}] * 2
    assert list(study.design.candidates) == list(script.SEARCH)
    [task] = study.design.tasks.values()
    assert (task.participation, task.factory) == (1.0, "resnet8")
    for dataset, said in ((["cifar10", "digits"], "is for one --dataset"), (["digits"], "no run of FedAvg and FedAvg")):
        with pytest.raises(SystemExit):
            script.main([*words, "--dataset", *dataset])
        assert said in capsys.readouterr().err
