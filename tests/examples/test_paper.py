"""Comparison with the papers' numbers, chosen settings, and images sent to the server."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from distillkit import LabeledImages
from distillkit.study import Record, Records, summary_table
from fl import FedAvg, FedDM, simulate
from fl.study import Federated
from shared import paper
from shared.measurement import measure_runs, share_table
from tests.distillkit.study.sample_records import record
from tests.scripts import load_script


def test_papers_numbers_are_beside_ours_with_their_source() -> None:
    records = Records([record([0.1, a], candidate, 0) for candidate, a in (("FedAvg", 0.5), ("FedDM", 0.7))])
    table = paper.with_paper(summary_table(records), {"digits": {"FedDM": "72.0 ± 0.1"}}, "Table 2 of somebody, 2023.")
    assert table.header[-1] == "paper %"
    assert [line[-1] for line in table.cells] == ["–", "72.0 ± 0.1"]
    assert table.notes[-1] == "paper %: Table 2 of somebody, 2023."
    assert table.rows == summary_table(records).rows
    assert paper.with_paper(summary_table(records), {"mnist": {"FedDM": "1"}}, "another") == summary_table(records)


def test_settings_of_a_candidate_are_those_of_its_run_or_first_trials() -> None:
    records = Records([record(0.5, "FedDM", 0, settings={"rho": 5.0, "ipc": 10})])
    candidates = {"FedDM": Federated(FedDM, search=[{"rho": 20.0}, {"rho": 5.0}], settings={"ipc": 10})}
    assert paper.settings_of(records, candidates, "FedDM", "digits") == {"rho": 5.0, "ipc": 10}
    assert paper.settings_of(records, candidates, "FedDM", "mnist") == {"rho": 20.0, "ipc": 10}


def test_received_images_are_drawn_from_each_candidates_first_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
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


def test_late_tables_compare_the_main_candidates_and_show_one_seed_of_the_others() -> None:
    keys = [(task, method, seed) for task in ("a", "b") for method in ("Base", "New") for seed in (3, 4)]
    line = {"accuracy_last": 0.5, "accuracy_late": 0.5, "accuracy_best": 0.6}
    records = Records(
        Record({**line, "task": task, "method": method, "seed": seed, "accuracy_late": 0.5 + 0.1 * (method == "New")})
        for task, method, seed in [*keys, ("b", "Ablation", 3)]
    )
    given: Any = {"columns": ("accuracy_late",), "paper": {"b": {"New": "99"}}, "source": "Table 1"}
    own, *differences, rest = paper.late_tables(
        records, ("Base", "New"), "Base", ("accuracy_late", "accuracy_best"), **given
    )
    assert [(row["task"], row["method"]) for row in own.rows] == [(t, m) for t in "ab" for m in ("Base", "New")]
    assert [row["difference"] for table in differences for row in table.rows] == pytest.approx([0.1, 0.1, 0.0, 0.0])
    assert [(row["task"], row["method"]) for row in rest.rows] == [("b", m) for m in ("Base", "New", "Ablation")]
    assert all(table.header[-1] == "paper %" for table in (own, rest))
    assert len(paper.late_tables(Records(records[:-1]), ("Base", "New"), "Base", ("accuracy_late",), **given)) == 2


def test_measurements_are_made_once_and_shown_by_method(tmp_path: Path) -> None:
    records = Records(
        Record({"task": "t", "method": method, "seed": seed, "accuracy_last": 0.5}, (), tmp_path / f"{method}-{seed}")
        for method in ("A", "B") for seed in (0, 1)
    )  # fmt: skip
    failed = Record({"task": "t", "method": "D", "seed": 0, "accuracy_last": None, "error": "no"}, (), tmp_path / "D-0")
    measured: list[str] = []

    def measure(folder: Path) -> dict[str, float]:
        measured.append(folder.name)
        return {"x": 0.1 * int(folder.name[-1]), "y": 0.5}

    for _ in range(2):
        found = measure_runs(Records([*records, failed]), "x.json", measure)
    assert sorted(measured) == ["A-0", "A-1", "B-0", "B-1"]
    assert found == {name: [{"x": 0.0, "y": 0.5}, {"x": 0.1, "y": 0.5}] for name in "AB"}
    table = share_table(found, {"x": "x %"}, "A note.", {"B": {"x": "7.0", "y": "1"}})
    assert table.header == ("method", "x %")
    assert [[row["method"], row["x"]] for row in table.rows] == [["A", 0.05], ["B", 0.05]]
    assert [cells[1].startswith("5.0") for cells in table.cells] == [True, True]
    assert [cells[1].endswith(" (7.0)") for cells in table.cells] == [False, True]
    assert table.notes == ("A note.",)


@pytest.mark.parametrize("name", ["fedlgd", "vhl", "feddm", "fedcog", "single_image"])
def test_results_page_and_script_print_the_same_numbers_of_the_paper(name: str) -> None:
    module = load_script(f"examples/papers/{name}/{'domains' if name == 'fedlgd' else 'candidates'}.py")
    page = Path(__file__).parents[2] / "docs" / "results" / f"{name}_published.json"
    assert json.loads(page.read_text(encoding="utf-8")) == (module.AVERAGES[0] if name == "fedlgd" else module.PAPER)
