"""Comparison with the papers' numbers, chosen settings, and images sent to the server."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import pytest
import torch
from matplotlib.figure import Figure

from distillkit import LabeledImages
from distillkit.study import Record, Records, summary_table
from fl import FedAvg, FedDM, simulate
from fl.study import Federated
from tests.distillkit.study.sample_records import record
from tests.scripts import load_script


@pytest.fixture(scope="module")
def paper() -> ModuleType:
    return load_script("examples/shared/paper.py")


def test_papers_numbers_are_beside_ours_with_their_source(paper: ModuleType) -> None:
    records = Records([record([0.1, a], candidate, 0) for candidate, a in (("FedAvg", 0.5), ("FedDM", 0.7))])
    table = paper.with_paper(summary_table(records), {"digits": {"FedDM": "72.0 ± 0.1"}}, "Table 2 of somebody, 2023.")
    assert table.header[-1] == "paper %"
    assert [line[-1] for line in table.cells] == ["–", "72.0 ± 0.1"]
    assert table.notes[-1] == "paper %: Table 2 of somebody, 2023."
    assert table.rows == summary_table(records).rows
    assert paper.with_paper(summary_table(records), {"mnist": {"FedDM": "1"}}, "another") == summary_table(records)


def test_settings_of_a_candidate_are_those_of_its_run_or_first_trials(paper: ModuleType) -> None:
    records = Records([record(0.5, "FedDM", 0, settings={"rho": 5.0, "ipc": 10})])
    candidates = {"FedDM": Federated(FedDM, search=[{"rho": 20.0}, {"rho": 5.0}], settings={"ipc": 10})}
    assert paper.settings_of(records, candidates, "FedDM", "digits") == {"rho": 5.0, "ipc": 10}
    assert paper.settings_of(records, candidates, "FedDM", "mnist") == {"rho": 20.0, "ipc": 10}


def test_received_images_are_drawn_from_each_candidates_first_run(
    paper: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def factory(outputs: int) -> torch.nn.Module:
        return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(16, 4), torch.nn.Linear(4, outputs))

    clients = [
        LabeledImages(torch.linspace(0, 1, 128).reshape(8, 1, 4, 4), torch.arange(8) % 2, num_classes=2)
        for _ in range(2)
    ]
    methods = {"FedDM": FedDM(factory=factory, ipc=2, steps=1, server_epochs=1), "FedAvg": FedAvg(factory=factory)}
    records = []
    for seed in (0, 1):
        for name, method in methods.items():
            out = tmp_path / f"{name}-{seed}"
            rows = simulate(method, clients, rounds=1, seed=seed, progress=False, out=out).rows
            line = {"task": "noise", "method": name, "seed": seed, "accuracy_last": None}
            records.append(Record(line, rows, out))
    drawn: list[LabeledImages] = []
    whole = paper.plot.grid
    monkeypatch.setattr(paper.plot, "grid", lambda one, **how: drawn.append(one) or whole(one, **how))
    paper.sets_sent(records, FedDM.images, tmp_path / "sent.png")
    assert [len(one) for one in drawn] == [2 * 2 * 2]
    assert (tmp_path / "sent.png").stat().st_size > 1000
    paper.sets_sent(records[1::2], FedDM.images, tmp_path / "none.png")
    assert not (tmp_path / "none.png").exists()


def test_ablations_are_drawn_beside_the_headline_if_they_ran(
    paper: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[list[tuple[str, str, int]]] = []

    def curves(records: Sequence[Record]) -> Figure:
        drawn.append([(r.task, r.method, r.seed) for r in records])
        return Figure()

    monkeypatch.setattr(paper, "curves", curves)
    keys = [(task, candidate, seed) for seed in (0, 1) for task in ("a", "b") for candidate in ("Main", "Other")]
    lines = [*keys, ("b", "Ablation", 0)]
    records = [Record({"task": t, "method": m, "seed": s, "accuracy_last": 0.5}) for t, m, s in lines]
    paper.ablation_curves(records, ["Main"], ["Ablation"], tmp_path / "one.png")
    assert drawn == [[("b", "Main", 0), ("b", "Ablation", 0)]]
    assert (tmp_path / "one.png").exists()
    paper.ablation_curves(records[:-1], ["Main"], ["Ablation"], tmp_path / "none.png")
    assert not (tmp_path / "none.png").exists()


@pytest.mark.parametrize("name", ["fedlgd", "vhl", "feddm", "fedcog", "single_image"])
def test_results_page_and_script_print_the_same_numbers_of_the_paper(name: str) -> None:
    module = load_script(f"examples/papers/{name}/{'domains' if name == 'fedlgd' else 'candidates'}.py")
    page = Path(__file__).parents[2] / "docs" / "results" / f"{name}_published.json"
    assert json.loads(page.read_text(encoding="utf-8")) == (module.AVERAGES[0] if name == "fedlgd" else module.PAPER)
