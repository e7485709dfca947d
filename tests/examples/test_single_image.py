"""The single image's script: selections differing in one setting, baselines with equal clients, tables from records."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import torch
from PIL import Image

from distillkit.study import read_records
from tests.examples.image_folder import folder
from tests.examples.studies import configurations

WORDS = ("--preset", "smoke", "--rounds", "2", "--steps", "1", "--headline", "--workers", "1", "--device", "cpu")


def test_selections_are_compared_and_shown_from_the_records(
    script: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script.main([*WORDS, "--out", str(tmp_path)])
    said = capsys.readouterr().out
    assert said.index("Claim, written before any run") < said.index("the accuracy of each run, as soon as it is done")
    records = {record.method: record for record in read_records(tmp_path).late(script.LATE)}
    assert list(records) == ["Single image", "No selection", "Random selection"]
    assert len({record.line["hash"] for record in records.values()}) == 3
    assert {tuple(row["drawn"]) for row in records["Single image"].rows} == {
        tuple(row["drawn"]) for row in records["No selection"].rows
    }
    for name, record in records.items():
        shown = record.line["accuracy_late"]
        assert shown == fmean(row["accuracy"] for row in record.rows)
        assert f"{100 * shown:.1f}" in next(row for row in said.splitlines() if f"| {name} " in row)
        assert json.loads((record.folder / "config.json").read_text(encoding="utf-8"))["recipe"] is not None
        assert record.rows[1]["initialised"] == 0
    names = {path.name for path in tmp_path.glob("*.png")}
    assert names == {f"accuracy_by_{by}.png" for by in ("round", "bytes_up", "client_seconds")} | {"crops.png"}
    assert (tmp_path / "table.md").read_text(encoding="utf-8") in said


def test_all_candidates_are_distinct_and_cover_the_papers_rows(planned: Any, script: Any, tmp_path: Path) -> None:
    study = planned("--preset", "smoke", "--out", tmp_path)
    candidates = study.design.candidates
    found = configurations(candidates, study.design.tasks["digits"], tmp_path)
    assert len({one for own in found.values() for one in own}) == len(candidates) == 17
    for name, candidate in candidates.items():
        assert candidate.like == (None if name in ("Single image", "No selection") else "Single image")
    assert {name for names in script.PAPER.values() for name in names} <= set(candidates)
    assert all(candidate.seeds == [0] for name, candidate in list(candidates.items())[3:])


def test_presets_are_the_claims_and_the_papers(planned: Any, tmp_path: Path) -> None:
    study = planned("--preset", "cpu", "--data", tmp_path)
    assert (study.num_configurations, study.design.seeds, list(study.design.tasks)) == (4, (0, 1, 2), ["cifar10"])
    assert list(planned("--data", tmp_path, "--alpha", "0.1").design.tasks) == ["cifar10-alpha0.1"]
    paper = planned("--preset", "paper", "--data", tmp_path)
    task = paper.design.tasks["cifar10"]
    made = paper.design.candidates["Single image"].make(lambda outputs: torch.nn.Linear(3, outputs), task, 0.01, 0.005)
    shared = next(addon for addon in made.addons if addon.name == "SharedImage")
    assert (shared.keep, shared.count, shared.rate, shared.steps, shared.lr) == (5000, 50_000, 0.2, 500, 0.005)
    assert (made.settings.batch, made.settings.optimizer.name, made.settings.phases[0].epochs) == (512, "adam", 40)
    assert (task.rounds, task.participation, made.settings.augment is not None) == (30, 0.4, True)
    nothing = paper.design.candidates["No selection"].make(
        lambda outputs: torch.nn.Linear(3, outputs), task, 0.01, 0.005
    )
    unselected = next(addon for addon in nothing.addons if addon.name == "SharedImage")
    assert (unselected.keep, unselected.count) == (5000, 5000)


def test_user_images_are_clients_and_a_user_image_is_shared(
    script: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    places = [str(folder(tmp_path / name, 60 * i)) for i, name in enumerate(("north", "south", "west"))]
    generator = torch.Generator().manual_seed(0)
    shared = torch.randint(0, 256, (40, 50, 3), generator=generator, dtype=torch.uint8)
    Image.fromarray(shared.numpy()).save(tmp_path / "shared.png")
    own = ["--size", "16", "--data", *places]
    script.main(
        [*WORDS, "--rounds", "1", *own, "--image", str(tmp_path / "shared.png"), "--out", str(tmp_path / "out")]
    )
    assert "north-south-west, seed 0, Single image" in capsys.readouterr().out
    records = read_records(tmp_path / "out")
    assert all(record.rows[0]["drawn"] == [0, 1, 2] for record in records)
    assert torch.equal(script.photograph(tmp_path / "shared.png", 3), shared.permute(2, 0, 1) / 255)
