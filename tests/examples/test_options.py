"""Every example understands the same options, says so, and refuses what they cannot mean."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

import pytest

from distillkit.data import load, partition
from distillkit.study import Study, Task, summary_table
from fl import FedAvg
from fl.study import Federated
from tests.scripts import ROOT, load_script

EXAMPLES = sorted(p.name for p in (ROOT / "examples").glob("[!_]*.py"))
COMMON = ("--preset", "--seeds", "--out", "--workers", "--device", "--data", "--estimate")


def test_there_are_examples() -> None:
    assert len(EXAMPLES) >= 5


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.py")), ids=lambda path: path.name)
def test_an_example_shows_the_idea_and_not_the_plumbing(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= 150


@pytest.mark.parametrize("name", EXAMPLES)
def test_help_names_the_common_options_and_what_the_example_is_for(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    example = load_script(f"examples/{name}")
    monkeypatch.setattr(sys, "argv", [name, "--help"])
    with pytest.raises(SystemExit) as ended:
        example.main()
    said = capsys.readouterr().out
    assert ended.value.code == 0
    assert [option for option in COMMON if f"  {option} " not in said and f"  {option}\n" not in said] == []
    assert (example.__doc__ or "").splitlines()[0].split(":")[0] in " ".join(said.split())


@pytest.mark.parametrize("words", ["--workers 0", "--workers 2.5", "--device gpu", "--preset large"])
@pytest.mark.parametrize("name", EXAMPLES)
def test_words_that_mean_nothing_are_refused_by_name(
    name: str, words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    example = load_script(f"examples/{name}")
    monkeypatch.setattr(sys, "argv", [name, *words.split()])
    with pytest.raises(SystemExit) as ended:
        example.main()
    assert ended.value.code == 2
    assert f"argument {words.split()[0]}: " in capsys.readouterr().err


@pytest.mark.parametrize("name", ["membership.py", "methods.py", "privacy_report.py", "quickstart.py"])
def test_data_that_would_not_be_read_are_refused(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [name, "--data", str(tmp_path), "--out", str(tmp_path / "out")])
    with pytest.raises(SystemExit) as ended:
        load_script(f"examples/{name}").main()
    assert ended.value.code == 2
    assert "would not be read: these digits come with scikit-learn; leave it out" in capsys.readouterr().err


def test_the_folder_is_the_presets_unless_it_is_named() -> None:
    options = load_script("examples/_options.py")
    parser = options.command_line("Nothing.", out="runs/nothing")
    assert options.parsed(parser, []).out == Path("runs/nothing-cpu")
    assert options.parsed(parser, ["--preset", "smoke"]).out == Path("runs/nothing-smoke")
    assert options.parsed(parser, ["--preset", "smoke", "--out", "here"]).out == Path("here")
    assert options.parsed(parser, ["--device", "cpu"]).device == "cpu"
    assert options.parsed(parser, []).device in ("cpu", "cuda")


def test_a_claim_stands_before_the_runs_and_below_the_table_and_an_estimate_runs_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = load_script("examples/_options.py")
    task = Task("digits", partial(load, "digits", size=8), partial(partition.iid, clients=2), rounds=1,
                factory_options={"width": 4, "depth": 1})  # fmt: skip
    study = Study(tmp_path / "out", task, {"FedAvg": Federated(FedAvg, settings={"steps": 1})}, seeds=[0])
    parser = options.command_line("Nothing.", out="runs/nothing")

    def play(*words: str, **how: object) -> str:
        given = options.parsed(parser, ["--workers", "1", "--device", "cpu", *words])
        options.run_study(study, given, lambda found: [summary_table(found)], claim="FedAvg learns.", **how)
        return capsys.readouterr().out

    assert "FedAvg learns." not in play("--estimate", ends=False)
    with pytest.raises(SystemExit):
        play("--estimate")
    assert not (tmp_path / "out" / "study.json").exists()
    capsys.readouterr()
    said = play()
    assert said.index("FedAvg learns.") < said.index("digits, seed 0, FedAvg") < said.index("| task")
    assert (tmp_path / "out" / "table.md").read_text().endswith("FedAvg learns.\n")
