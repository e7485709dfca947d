"""FedLGD's example: table numbers from records, and serializable candidates."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType

import pytest

from distillkit.study import read_records
from tests.distillkit.study.sample_records import search_sizes
from tests.examples.image_folder import folder
from tests.examples.studies import configurations, requested_study
from tests.scripts import load_script

TINY = ["--preset", "smoke", "--rounds", "2", "--steps", "1", "--workers", "1", "--device", "cpu"]


@pytest.fixture(scope="module")
def shows() -> ModuleType:
    return load_script("examples/papers/fedlgd/domains.py")


def test_table_of_the_paper_is_run_and_its_numbers_are_in_the_records(
    script: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script.main([*TINY, "--no-ablations", "--out", str(tmp_path)])
    said, records = capsys.readouterr().out, read_records(tmp_path)
    assert said.startswith(script.CLAIM.split("\n")[0])
    assert [record.method for record in records] == list(script.SEARCH)
    assert search_sizes(tmp_path) == {"domains": 1}
    text = (tmp_path / "table.md").read_text(encoding="utf-8")
    assert text in said
    assert script.CLAIM in text
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line[:1] == "|"]
    for record in records:
        assert record.folder is not None
        domains = json.loads((record.folder / "domains.json").read_text(encoding="utf-8"))
        main, own = ([row for row in rows if record.method in row[:2] and len(row) == n] for n in (10, 4))
        assert [row[3] for row in main] == [f"{100 * record.line['accuracy_last']:.1f}"]
        assert [row[1:] for row in own] == [[f"{100 * value:.1f}" for value in domains.values()]]
        mean = sum(domains.values()) / len(domains)
        assert mean == pytest.approx(record.line["accuracy_last"], abs=1e-6)
    for name in ("accuracy_by_round", "accuracy_by_bytes_down", "accuracy_by_client_seconds", "sets"):
        assert (tmp_path / f"{name}.png").stat().st_size > 5000


def test_every_candidate_is_a_distinct_serializable_method(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    study = requested_study(script, monkeypatch, "--preset", "cpu", "--domains", "digits", "digits-m-like")
    assert (study.num_configurations, study.design.seeds) == (4, (0, 1, 2))
    candidates = study.design.candidates
    [task] = study.design.tasks.values()
    for name, candidate in candidates.items():
        assert (candidate.seeds is None) == (name in script.SEARCH) == (candidate.like is None), name
    found = configurations(candidates, task, tmp_path)
    others = [set(own) for name, own in found.items() if not name.startswith("FedLGD")]  # a weight is an ablation, too
    ours = {one for name, own in found.items() if name.startswith("FedLGD") for one in own}
    assert len(ours.union(*others)) == len(ours) + sum(map(len, others)) >= 4 * 10


def test_paper_preset_has_the_papers_settings_and_can_be_shortened(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    study = requested_study(script, monkeypatch, "--preset", "paper", "--rounds", "1", "--steps", "10", "--ipc", "10")
    [task] = study.design.tasks.values()
    assert task.rounds == 1
    assert task.data.args[0] == ("mnist", "svhn", "usps", "synthdigits", "mnistm")  # type: ignore[union-attr]
    candidate = study.design.candidates["FedLGD"]
    assert dict(candidate.search[0]) == {"lr": 0.01, "weight": 10.0}
    cut = {"condense_steps": 10, "refine_steps": 10, "match_steps": 10}
    assert {k: v for k, v in candidate.settings.items() if k != "augment"} == {
        "ipc": 10, "anchors": 10, "batch": 32, "batch_real": 256, **cut
    }  # fmt: skip
    whole = requested_study(script, monkeypatch, "--preset", "paper").design.candidates["FedLGD"].settings
    assert [whole[name] for name in cut] == [10_000, 100, 500]
    assert whole["ipc"] == 50


def test_domains_have_equally_many_images_and_their_class_shares(shows: ModuleType) -> None:
    split = shows.digits(("digits", "digits-m-like", "synthdigits-like"), None, 16, 100, 30)
    assert split.domains == ("digits", "digits-m-like", "synthdigits-like")
    assert split.train.columns["domain"].bincount().tolist() == [100] * 3
    assert split.test.columns["domain"].bincount().tolist() == [30] * 3
    assert (split.train.shape, split.train.normalization.mean) == ((3, 16, 16), (0.5, 0.5, 0.5))
    for number in range(3):
        counts = split.train.labels[split.train.columns["domain"] == number].bincount(minlength=10)
        assert int(counts.min()) >= 9
        assert int(counts.max()) <= 11


def test_means_of_table_1_are_those_of_its_domains(shows: ModuleType) -> None:
    """Averages of Table 1 up to the rounding of its cells; the one that differs is the paper's."""
    for name, row in shows.TABLE_1.items():
        for cells in row:
            assert sum(cells[:5]) / 5 == pytest.approx(cells[5], abs=0.101), name


def test_user_images_in_three_folders_are_three_clients(
    script: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[tuple[str, ...]] = []
    monkeypatch.setattr(script, "draw", lambda records, task, images, out: drawn.append(images.domains))
    places = [str(folder(tmp_path / name, 60 * i)) for i, name in enumerate(("north", "south", "west"))]
    out = tmp_path / "out"
    script.main([*TINY, "--no-ablations", "--size", "16", "--data", *places, "--out", str(out)])
    said = capsys.readouterr().out
    assert "| method   | north % | south % | west % |" in said
    records = read_records(out)
    assert {record.rows[0]["drawn"][-1] for record in records} == {2}
    assert drawn == [("north", "south", "west")]
