"""FedCOG's script: equal models until its first round, distinct ablations, tables from the records."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from distillkit.study import read_records
from tests.examples.studies import configurations

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
    candidates = study.design.candidates
    found = configurations(candidates, study.design.tasks["digits-dirichlet"], tmp_path)
    assert len({one for own in found.values() for one in own}) == len(candidates) == 20
    assert {name: candidate.like for name, candidate in candidates.items()} == {
        name: None if name == "FedAvg" else "FedAvg" for name in candidates
    }
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


def test_divisions_can_be_chosen(planned: Any) -> None:
    assert "cifar10-two-classes" not in planned("--preset", "cpu").design.tasks
    study = planned("--preset", "cpu", "--datasets", "cifar10", "--division", "two-classes", "--headline")
    assert list(study.design.tasks) == ["cifar10-two-classes"]
