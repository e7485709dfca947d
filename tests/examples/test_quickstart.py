"""The demo as a user runs it, without repeating finished runs."""

from __future__ import annotations

import contextlib
import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from distillkit.study import Study, read_choice
from tests.distillkit.study.sample_records import search_sizes
from tests.examples.studies import configurations
from tests.kill_examples import killed_and_resumed, record, rounds_of

ROOT = Path(__file__).parents[2]
TASKS = ("dirichlet-0.1", "dirichlet-0.01")
WAYS = ("FedAvg", "FedProx", "FedDM", "Real")


def demo(script: Any, out: Path) -> str:
    """Return the demo's output, with its runs one after the other in this process."""
    said = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(said):
        patch.setattr(sys, "argv", ["quickstart.py", "--preset", "smoke", "--workers", "1", "--out", str(out)])
        script.main()
    return said.getvalue()


@pytest.fixture(scope="module")
def uninterrupted(script: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    out = tmp_path_factory.mktemp("untouched")
    return out, demo(script, out)


def test_demo_reports_each_run_prints_its_table_and_draws(uninterrupted: tuple[Path, str]) -> None:
    out, said = uninterrupted
    lines = json.loads((out / "summary.json").read_text(encoding="utf-8"))
    assert [(x["task"], x["method"]) for x in lines] == [(task, candidate) for task in TASKS for candidate in WAYS]
    for line in lines:
        rows = [json.loads(x) for x in (out / line["run"] / "history.jsonl").read_text(encoding="utf-8").splitlines()]
        assert line["accuracy_last"] == rows[-1]["accuracy"]
        assert line["bytes_up"] == sum(r["bytes_up"] for r in rows)
        assert line["epsilon"] is None
        told = [words for words in said.splitlines() if words.startswith(f"{line['task']}, seed 0, {line['method']} ")]
        assert [words.split(maxsplit=4)[-1] for words in told] == [f"{100 * line['accuracy_last']:.1f} % after round 2"]
        assert json.loads((out / line["run"] / "config.json").read_text(encoding="utf-8"))["recipe"] is not None
    assert (out / "table.md").read_text(encoding="utf-8").strip() in said
    assert search_sizes(out) == dict.fromkeys(TASKS, 1)
    drawn = ["accuracy_by_round", "accuracy_by_bytes_up", "accuracy_by_client_seconds", "synthetic_digits"]
    for name in (*drawn, *(f"partition_{task}" for task in TASKS)):
        assert (out / f"{name}.png").stat().st_size > 5000


def test_killed_and_restarted_demo_writes_the_same_records(tmp_path: Path, uninterrupted: tuple[Path, str]) -> None:
    """Only the parent is killed, in the middle; `python -m tests.kill_examples --kills 10` kills at random moments."""
    out = tmp_path / "run"
    done, _ = killed_and_resumed(out, lambda: rounds_of(out) >= 1)
    assert 1 <= done < 16
    assert record(out) == record(uninterrupted[0])


def test_all_candidates_have_eight_serializable_configurations(script: Any, tmp_path: Path) -> None:
    preset = script.PRESETS["cpu"]
    tasks = [script.task(alpha, preset["rounds"]) for alpha in preset["alphas"]]
    candidates = script.candidates("cpu")
    assert Study(tmp_path, tasks, candidates).num_configurations == 8
    assert [candidates.search for candidates in script.candidates("look").values()][:3] == [
        [one] for one in script.CHOSEN.values()
    ]
    assert {t["epochs"] for t in script.SEARCH["FedAvg"]} == {t["epochs"] for t in script.SEARCH["FedProx"]} == {1, 5}
    found = configurations(candidates, tasks[0], tmp_path)
    assert len({one for own in found.values() for one in own}) == 4 * 8


def test_demo_uses_the_best_of_the_recorded_configurations(script: Any) -> None:
    tuned, _ = read_choice(ROOT / "docs" / "results" / "quickstart.jsonl")
    best = {
        t.method: t.configurations[t.chosen]["settings"] for t in tuned if t.task == TASKS[1] and t.chosen is not None
    }
    assert best.keys() == script.CHOSEN.keys()
    for name, settings in script.CHOSEN.items():
        assert settings in script.SEARCH[name]
        assert {**best[name], **settings} == best[name]
