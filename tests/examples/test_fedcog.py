"""FedCOG's script: equal models until its first round, distinct ablations, tables from the records."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from distillkit.serialization import to_config
from distillkit.study import read_records

WORDS = ("--preset", "smoke", "--rounds", "2", "--steps", "1", "--headline", "--workers", "1", "--device", "cpu")


def test_fedcog_equals_its_base_until_its_first_round(
    script: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script.main([*WORDS, "--out", str(tmp_path)])
    said = capsys.readouterr().out
    assert said.index("Claim, written before any run") < said.index("the accuracy of each run, as soon as it is done")
    records = {record.method: record for record in read_records(tmp_path).late(1)}
    base, cog = records["FedAvg"], records["FedCOG"]
    assert base.rows[0]["accuracy"] == cog.rows[0]["accuracy"]
    assert base.line["hash"] != cog.line["hash"]
    assert "FedCOG.first" not in str(cog.rows[1].get("noted"))
    for record in (base, cog):
        shown = record.line["accuracy_late"]
        assert shown == record.rows[1]["accuracy"]
        assert f"{100 * shown:.1f}" in next(row for row in said.splitlines() if f"| {record.method} " in row)
        assert record.last("accuracy_locals.mean") is not None
        assert json.loads((record.folder / "config.json").read_text(encoding="utf-8"))["recipe"] is not None
    drawn = {path.name for path in tmp_path.glob("*.png")}
    assert drawn == {f"accuracy_by_{by}.png" for by in ("round", "bytes_up", "client_seconds")} | {"generated.png"}
    assert (tmp_path / "table.md").read_text(encoding="utf-8") in said


def test_all_candidates_are_distinct_methods_with_fedavgs_choice(planned: Any, tmp_path: Path) -> None:
    study = planned("--preset", "smoke", "--out", tmp_path)
    candidates, task = study.design.candidates, study.design.tasks["digits-dirichlet"]
    split, seen = task.load(), dict[str, str]()
    for name, candidate in candidates.items():
        said = json.dumps(to_config(candidate.build(task, split, {"lr": 0.1}), store=tmp_path))
        assert said not in seen, (name, seen[said])
        seen[said] = name
        assert (candidate.like, candidate.seeds) == ((None, None) if name == "FedAvg" else ("FedAvg", candidate.seeds))
    assert len(candidates) == 20
    assert all(candidate.seeds == [0] for name, candidate in candidates.items() if name not in ("FedAvg", "FedCOG"))


def test_presets_are_the_claims_and_the_papers(planned: Any, script: Any, tmp_path: Path) -> None:
    study = planned("--preset", "cpu", "--data", tmp_path)
    assert (study.num_configurations, study.design.seeds) == (4, (0, 1, 2))
    dirichlet = ["fashionmnist-dirichlet", "cifar10-dirichlet"]
    assert list(study.design.tasks) == [dirichlet[0], "fashionmnist-two-classes", dirichlet[1]]
    ablated = {task for candidate in study.design.candidates.values() for task in candidate.tasks or ()}
    assert ablated == set(dirichlet)
    paper = planned("--preset", "paper", "--data", tmp_path)
    assert set(paper.design.tasks) == set(script.PAPER)
    assert {name for names in script.PAPER.values() for name in names} <= set(paper.design.candidates)
    task = paper.design.tasks["cifar10-dirichlet"]
    made = paper.design.candidates["FedCOG"].make(
        factory=lambda outputs: torch.nn.Linear(3, outputs), task=task, lr=0.01
    )
    cog = next(addon for addon in made.addons if addon.name == "FedCOG")
    assert (task.rounds, cog.start_round, cog.images, cog.steps, cog.disagreement) == (70, 51, 256, 100, 0.1)
    assert (made.settings.batch, made.settings.phases[0].steps, made.settings.lr) == (64, 400, 0.01)
    assert made.settings.augment is not None
    tried = planned("--preset", "paper", "--data", tmp_path, "--rounds", "1", "--steps", "10")
    made = tried.design.candidates["FedCOG"].make(
        factory=lambda outputs: torch.nn.Linear(3, outputs), task=task, lr=0.01
    )
    cog = next(addon for addon in made.addons if addon.name == "FedCOG")
    assert (cog.start_round, cog.steps, made.settings.phases[0].steps) == (1, 10, 10)


def test_user_image_folders_are_the_clients(script: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for north, name in enumerate(("north", "south", "west")):
        for label in range(2):
            (tmp_path / name / str(label)).mkdir(parents=True)
            for i in range(30 if label else 10 + 5 * north):
                pixel = (40 * north, 200 * label, 6 * i)
                Image.new("RGB", (16, 16), pixel).save(tmp_path / name / str(label) / f"{i}.png")
    folders = [str(tmp_path / name) for name in ("north", "south", "west")]
    script.main([*WORDS, "--rounds", "1", "--size", "16", "--data", *folders, "--out", str(tmp_path / "out")])
    assert "north-south-west, seed 0, FedCOG" in capsys.readouterr().out
    assert all(record.rows[0]["drawn"] == [0, 1, 2] for record in read_records(tmp_path / "out"))


def test_missing_dataset_is_reported_with_instructions(script: Any, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"(?s)fashionmnist-dirichlet cannot be read.*FashionMNIST/raw"):
        script.main(["--data", str(tmp_path), "--out", str(tmp_path / "out")])


def test_divisions_can_be_chosen(planned: Any) -> None:
    assert "cifar10-two-classes" not in planned("--preset", "cpu").design.tasks
    study = planned("--preset", "cpu", "--datasets", "cifar10", "--division", "two-classes", "--headline")
    assert list(study.design.tasks) == ["cifar10-two-classes"]
