from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType

import pytest
import torch

import quickstart
from attacks.membership import ShadowScores, Target, halves
from distillkit.rng import derive
from membership import pipelines, results


def read(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_rows_are_appended_and_finished_ones_not_run_again(
    script: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["--preset", "smoke", "--workers", "1", "--out", str(tmp_path), "--rows"]
    script.main([*words, "dm"])
    first = read(tmp_path / "records.jsonl")
    assert [(one["kind"], one["attack"]) for one in first] == [
        *(("model", name) for name in results.MODEL), ("set", "nearest"), ("set", "distance")
    ]  # fmt: skip
    assert {one["row"] for one in first} == {"dm"}
    assert all({"commit", "seed", "shadows", "numbers", "accuracy"} <= set(one) for one in first)
    assert all(float(str(one["cpu_seconds"])) > 0 and str(one["command"]).endswith("--rows dm") for one in first)
    near = first[-2]
    assert near["started"]["share"] == pytest.approx(0.1)  # type: ignore[index]
    assert near["started"]["tpr"][0] > 0.4  # type: ignore[index]
    with monkeypatch.context() as patch:
        patch.setattr(script, "run_shadows", lambda *_, **__: pytest.fail("run again"))
        script.main([*words, "dm"])
    assert read(tmp_path / "records.jsonl") == first
    monkeypatch.setitem(quickstart.PRESETS, "smoke", {"rounds": 1, "steps": 1, "server_epochs": 1})
    script.main([*words, "transcript"])
    both = read(tmp_path / "records.jsonl")
    assert both[:-1] == first
    assert (both[-1]["row"], both[-1]["attack"]) == ("transcript", "distance")
    shown = capsys.readouterr().out
    assert shown.endswith((tmp_path / "table.md").read_text(encoding="utf-8"))
    assert "| raw data               | not run yet |" in shown
    assert "above 25 dB" in shown


def test_cost_is_estimated_from_one_timed_run_which_is_kept(
    script: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--preset", "smoke", "--workers", "1", "--out", str(tmp_path), "--rows", "raw", "--shadows", "600"]
    for _ in range(2):
        with pytest.raises(SystemExit):
            script.main([*words, "--estimate"])
    first, total = capsys.readouterr().out.splitlines()[:2]
    seconds = json.loads((tmp_path / "raw" / "cost.json").read_text(encoding="utf-8"))["cpu_seconds"]
    assert first == f"raw: {seconds:.3g} CPU s per run"
    assert total == f"all: {seconds * 10:.0f} CPU minutes for 600 runs of each"
    assert len(list((tmp_path / "raw").glob("shadow-*"))) == 1


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--seeds 0 1", "--seeds takes one seed here"),
        ("--shadows 9", "--shadows must be even because they come in pairs of complements, got 9"),
        ("--device cpu:0", "--device must be cpu"),
    ],
    ids=["seeds", "shadows", "device"],
)
def test_unsupported_arguments_are_refused(
    script: ModuleType, words: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        script.main(words.split())
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("row", pipelines.ROWS)
def test_every_pipeline_returns_scores_of_its_model_and_sets(row: str) -> None:
    pipeline = pipelines.pipeline(row, "smoke")
    inside = halves(4, len(pipeline.images), 0)[0]
    scorers = pipeline.fit(inside.nonzero().flatten(), 1)
    sets = {"nearest", "distance"} if row not in ("raw", "dp-sgd") else set()
    real = {"started"} if row in ("dm", "feddm") else set()
    assert set(scorers) == {"model", "margin"} | sets | real
    scores = {name: scorer(pipeline.images, pipeline.labels) for name, scorer in scorers.items()}
    assert bool(((scores["margin"] > 0) | (scores["model"] < 0)).all())
    if sets:
        assert len(scores["nearest"].unique()) > 100  # no image hides another one that is the same
    if real:
        started = scores["started"] > 0
        assert not bool((started & ~inside).any())
        numbers = pipelines.NUMBERS["smoke"]
        most = 10 * numbers["ipc"]
        assert int(started.sum()) == most if row == "dm" else most < int(started.sum()) <= most * numbers["rounds"]
        near = -scores["distance"]
        assert float(near[started].median()) < float(near[inside & ~started].median())


def test_two_sided_scores_are_distances_from_the_mean_without_record() -> None:
    target = Target(
        torch.tensor([3.0, -1.0]), torch.tensor([[True, False], [False, True], [False, False]]),
        torch.tensor([[9.0, 1.0], [1.0, 7.0], [2.0, 3.0]]), None, None, None,
    )  # fmt: skip
    assert results.two_sided(target).tolist() == [1.5, 3.0]


def test_few_shadows_are_the_first_sixteen_complete_pairs() -> None:
    inside = halves(24, 50, 0)
    scores = torch.randn(25, 50, generator=derive(0), dtype=torch.float64)
    changed = torch.cat([scores[:16], scores[16:24] + 5.0])
    one, other = (
        results.fewer(Target(scores[24], inside, s, None, None, None), online=True) for s in (scores[:24], changed)
    )
    assert torch.equal(one, other)
    assert not torch.equal(one, results.MODEL["LiRA online"](Target(scores[24], inside, changed, None, None, None)))


def test_share_is_a_mean_over_runs_with_an_interval_over_pairs() -> None:
    of = torch.ones(6, 10, dtype=torch.bool)
    called = torch.arange(10) < torch.tensor([1, 3, 2, 2, 5, 5])[:, None]
    mean, low, high = results.share(called, of)
    assert mean == pytest.approx(0.3)
    half = 4.30265 * torch.tensor([0.2, 0.2, 0.5]).std() / 3**0.5  # Student's with two degrees of freedom
    assert (low, high) == pytest.approx((0.0, 0.3 + float(half)), abs=1e-4)
    same = results.share(torch.zeros(6, 10, dtype=torch.bool), of)
    assert same == pytest.approx([0.0, 0.0, 1 - 0.025 ** (1 / 60)])  # Clopper and Pearson's, of sixty


def test_leaking_pipeline_is_visible_in_its_records() -> None:
    inside, generator = halves(8, 400, 0), derive(1)
    margin = torch.randn(8, 50, generator=generator, dtype=torch.float64)
    model = torch.randn(8, 400, generator=generator, dtype=torch.float64) + 3.0 * inside
    started = inside & (torch.rand(8, 400, generator=generator) < 0.5)
    noise = 0.1 * torch.rand(8, 400, generator=generator, dtype=torch.float64)
    scores = {"model": model, "margin": model, "nearest": noise + started, "started": started.double()}
    found = ShadowScores(inside, scores, {"model": margin, "margin": margin})
    lines = {line["attack"]: line for line in results.result_lines("dm", found, {"shadows": 8})}
    assert lines["LiRA online"]["tpr"][0] > 0.4
    assert lines["threshold"]["accuracy"] == pytest.approx(float((margin > 0).double().mean()))
    near = lines["nearest"]
    assert near["started"]["share"] == pytest.approx(0.5, abs=0.03)
    assert near["started"]["tpr"][:2] == [1.0, pytest.approx(1.0, abs=0.01)]
    assert near["started"]["rest"][0] < 0.04
    assert near["tpr"][0] == pytest.approx(0.5, abs=0.04)
