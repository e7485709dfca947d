"""Common options of all examples, their help, and refusal of invalid ones."""

from __future__ import annotations

import re
import sys
from argparse import Namespace
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure

from distillkit.data import load, partition
from distillkit.study import Records, Study, Task, read_records, summary_table, write_records
from fl import FedAvg
from fl.study import Federated
from shared.options import command_line, number, parse_arguments
from shared.study import run_study
from tests.examples.image_folder import folder
from tests.scripts import EXAMPLES, ROOT, load_script

NAMES = sorted({*EXAMPLES} - {"gpu"})  # which runs other scripts, and has options of its own
OPTIONS = ROOT / "examples" / "shared" / "options.py"
COMMON = ("--preset", "--seeds", "--out", "--workers", "--device", "--estimate")
WITHOUT_DATA = ("membership", "methods", "privacy_report", "quickstart")


def test_readme_names_every_script_with_options_that_exist_and_pages_name_no_other() -> None:
    text = (ROOT / "examples" / "README.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\S+\.py)([^`]*)` \|", text, re.MULTILINE)
    assert {ROOT / "examples" / script for script, _ in rows} == {*EXAMPLES.values()}
    for script, words in rows:
        source = (ROOT / "examples" / script).read_text(encoding="utf-8") + OPTIONS.read_text(encoding="utf-8")
        assert all(f'"{option}"' in source for option in re.findall(r"--[a-z-]+", words)), script
    assert all((ROOT / "examples" / link).exists() for link in re.findall(r"\]\((\S+)\)", text))
    assert len(text.split()) <= 350
    pages = [ROOT / "README.md", ROOT / "Makefile", *sorted((ROOT / "docs").rglob("*.md")), *EXAMPLES.values()]
    for page in pages:
        named = re.findall(r"\bexamples/[\w/]+\.py", page.read_text(encoding="utf-8"))
        assert not [path for path in named if not (ROOT / path).is_file()], page


@pytest.mark.parametrize("name", NAMES)
def test_help_names_the_common_options_and_the_purpose(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    example = load_script(EXAMPLES[name])
    monkeypatch.setattr(sys, "argv", [name, "--help"])
    with pytest.raises(SystemExit) as ended:
        example.main()
    said = capsys.readouterr().out
    assert ended.value.code == 0
    wanted = COMMON if name in WITHOUT_DATA else (*COMMON, "--data")
    assert [option for option in wanted if f"  {option} " not in said and f"  {option}\n" not in said] == []
    assert (example.__doc__ or "").splitlines()[0].split(":")[0] in " ".join(said.split())


@pytest.mark.parametrize("words", ["--workers 0", "--workers 2.5", "--device gpu", "--preset large"])
@pytest.mark.parametrize("name", NAMES)
def test_unknown_options_are_refused_by_name(
    name: str, words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    example = load_script(EXAMPLES[name])
    monkeypatch.setattr(sys, "argv", [name, *["fedcog"] * (name == "claims"), *words.split()])
    with pytest.raises(SystemExit) as ended:
        example.main()
    assert ended.value.code == 2
    assert f"argument {words.split()[0]}: " in capsys.readouterr().err


def test_folder_values_and_seeds_are_the_presets_by_default() -> None:
    def parsed(*words: str) -> Namespace:
        parser = command_line("Nothing.", out="runs/nothing", presets={"smoke": {"few": 1}, "cpu": {"few": 2}})
        parser.add_argument("--few", type=number(1))
        return parse_arguments(parser, words)

    assert (parsed().out, parsed().few, parsed().seeds) == (Path("runs/nothing-cpu"), 2, [0, 1, 2])
    smoke = parsed("--preset", "smoke")
    assert (smoke.out, smoke.few, smoke.seeds) == (Path("runs/nothing-smoke"), 1, [0])
    given = parsed("--preset", "smoke", "--out", "here", "--few", "7", "--seeds", "5")
    assert (given.out, given.few, given.seeds) == (Path("here"), 7, [5])
    assert parsed("--device", "cpu").device == "cpu"
    assert parsed().device in ("cpu", "cuda")


def test_claim_is_printed_first_and_with_the_table_and_estimates_run_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    task = Task("digits", partial(load, "digits", size=8), partial(partition.iid, clients=2), rounds=1,
                factory_options={"width": 4, "depth": 1})  # fmt: skip
    study = Study(
        tmp_path / "out",
        task,
        {name: Federated(FedAvg, settings={"steps": 1}) for name in ("FedAvg", "Other")},
        seeds=[0],
    )
    parser = command_line("Nothing.", out="runs/nothing", presets={"cpu": {}})
    drawn: list[list[str]] = []
    monkeypatch.setattr(
        "shared.study.curves", lambda records, by: drawn.append([r.method for r in records]) or Figure()
    )

    def play(*words: str, **how: Any) -> str:
        given = parse_arguments(parser, ["--workers", "1", "--device", "cpu", *words])
        run_study(study, given, lambda found: [summary_table(found)], claim="FedAvg learns.", **how)
        return capsys.readouterr().out

    assert "FedAvg learns." not in play("--estimate", ends=False)
    with pytest.raises(SystemExit):
        play("--estimate")
    assert not (tmp_path / "out" / "study.json").exists()
    capsys.readouterr()
    said = play(by=("round", "bytes"), main=("FedAvg",))
    assert drawn == [["FedAvg"]] * 2
    assert said.index("FedAvg learns.") < said.index("digits, seed 0, FedAvg") < said.index("| task")
    assert (tmp_path / "out" / "table.md").read_text(encoding="utf-8").endswith("FedAvg learns.\n")


@pytest.mark.parametrize(
    ("name", "words", "said"),
    [
        *((name, "--data PICTURES", "unrecognized arguments: --data") for name in WITHOUT_DATA),
        ("feddm", "--epsilon 8", "--epsilon has no effect without --dp"),
        *(("feddm", f"--dp none {option}", f"{option.split()[0]} has no effect with --dp")
          for option in ("--only claim", "--tries 2", "--rounds 3", "--steps 1")),
        ("feddm", "--data PICTURES --dataset digits", "--dataset has no effect with these pictures in --data"),
        ("feddm", "--data PICTURES PICTURES --split iid", "--split has no effect with these pictures in --data"),
        ("fedcog", "--data PICTURES --datasets cifar10", "--datasets has no effect with pictures of your own"),
        ("fedlgd", "--data PICTURES --domains mnist", "--domains has no effect with pictures of your own"),
        ("vhl", "--data PICTURES --dataset svhn", "--dataset has no effect with pictures of your own in --data"),
        ("vhl", "--pair --no-ablations", "--no-ablations has no effect with --pair"),
        ("single_image", "--data PICTURES PICTURES --alpha 1", "--alpha has no effect with a client a folder"),
        *((name, "--size 16", "--size has no effect without pictures of your own in --data")
          for name in ("feddm", "fedcog", "fedlgd", "vhl", "single_image")),
        ("membership", "--rows transcript --shadows 8", "--shadows has no effect with --rows transcript alone"),
        *(("privacy_report", f"--run there {option}", f"{option.split()[0]} has no effect with --run")
          for option in ("--method FedDM", "--init real", "--seeds 0", "--out o")),
        ("privacy_report", "--method FedAvg --init real", "--init has no effect with --method FedAvg"),
        ("private_sets", "--methods random --epsilons 8", "--epsilons has no effect without class_means"),
        ("private_sets", "--methods class_means larger", "--methods larger are not for --dataset digits"),
        ("condense", "--network mlp --width 8", "--width has no effect with a --network that is no convnet"),
        ("condense", "--methods random dsa --steps 3", "--steps has no effect without dm in --methods"),
        ("condense", "--methods dm --iterations=1", "--iterations has no effect without dc or dsa in --methods"),
        ("condense", "--methods herding --batch-real 8", "--batch-real has no effect without dm, dc or dsa"),
        ("condense", "--dataset PICTURES --data .", "--data has no effect with --dataset "),
    ],
    ids=lambda value: value,
)  # fmt: skip
def test_ignored_combinations_of_options_are_refused(
    name: str,
    words: str,
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Each option alone is valid; defaults do not count."""
    place = str(folder(tmp_path / "pictures", each=1))
    given = ["--preset", "smoke", *(place if word == "PICTURES" else word for word in words.split())]
    monkeypatch.setattr(sys, "argv", [name, *given])
    with pytest.raises(SystemExit) as ended:
        load_script(EXAMPLES[name]).main()
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


def test_repeated_run_is_compared_with_its_record(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    example = load_script(EXAMPLES["vhl"])
    tiny = ["--preset", "smoke", "--rounds", "2", "--steps", "1", "--workers", "1", "--device", "cpu", "--pair"]
    tiny += ["--seeds", "3", "--out"]
    example.main([*tiny, str(tmp_path / "first")])
    records = read_records(tmp_path / "first")
    file, run = tmp_path / "records.jsonl", str(records[1].line["run"])
    write_records(records, file)

    def repeated(records: Path, run: str, out: str) -> tuple[object, str]:
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            example.main([*tiny, str(tmp_path / out), "--repeat", str(records), run])
        return ended.value.code, capsys.readouterr().out

    def same(records: Path, run: str) -> bool:
        status, said = repeated(records, run, "again")
        return (status, "Same as the record" in said, "after each of 2 rounds" in said) == (0, True, True)

    assert same(file, run)
    assert same(file, str(records[0].line["run"])), "another run has its own folder"
    rows = [{**row, "accuracy": 0.5} for row in records[1].rows]
    elsewhere = replace(records[1], line={**records[1].line, "task": "other"}, rows=rows)
    write_records(Records([elsewhere, records[1]]), tmp_path / "twice.jsonl")
    assert same(tmp_path / "twice.jsonl", run), "the run on the study's task is meant"

    other = replace(records[1], rows=[records[1].rows[0], {**records[1].rows[1], "accuracy": 0.5}])
    write_records(Records([other]), tmp_path / "changed.jsonl")
    status, said = repeated(tmp_path / "changed.jsonl", run, "changed")
    assert (status, "instead of 0.5 after round 2" in said) == (1, True)

    assert "has no run 'nothing'" in str(repeated(file, "nothing", "none")[0])
    write_records(Records([replace(other, line={**other.line, "method": "X"})]), tmp_path / "foreign.jsonl")
    assert "these options give no method 'X', only 'FedAvg'" in str(repeated(tmp_path / "foreign.jsonl", run, "x")[0])
