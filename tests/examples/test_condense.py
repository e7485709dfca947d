from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

from distillkit import LabeledImages
from distillkit.rng import derive
from tests.scripts import load_script


@pytest.fixture(scope="module")
def condense() -> ModuleType:
    return load_script("examples/condense.py")


def own_data(path: Path) -> Path:
    g = derive(0)
    arrays = {}
    for part, n in (("train", 40), ("test", 20)):
        labels = torch.arange(n) % 2
        pixels = torch.randint(0, 100, (n, 8, 8), generator=g) + 120 * labels.view(-1, 1, 1)
        arrays |= {f"{part}_images": pixels.to(torch.uint8).numpy(), f"{part}_labels": labels.numpy()}
    np.savez(path, **arrays)
    return path


def test_all_methods_on_own_data_write_what_they_promise(
    condense: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dataset = str(own_data(tmp_path / "mine.npz"))
    argv = ["--preset", "smoke", "--dataset", dataset, "--out", str(tmp_path / "out"), "--epochs", "8", "--ipc", "2"]
    rows = condense.main(argv)
    assert [r["method"] for r in rows] == list(condense.METHODS)
    assert json.loads((tmp_path / "out" / "summary.json").read_text()) == rows
    wanted = {"dataset", "method", "ipc", "steps", "nets", "accuracy_mean", "accuracy_std", "seconds"}
    for row in rows:
        assert wanted | {"command", "commit"} <= set(row)
        assert 0 <= row["accuracy_mean"] <= 1
        folder = tmp_path / "out" / row["run"]
        made = LabeledImages.load(folder / "set.safetensors")
        assert made.counts().tolist() == [2, 2]
        assert (folder / "grid.png").read_bytes().startswith(b"\x89PNG")
        config = json.loads((folder / "config.json").read_text())
        assert config["evaluation"]["images"] == 4
    assert {r["method"]: r["steps"] for r in rows} == {
        "random": 0, "herding": 0, "k-center": 0, "dm": 2, "dc": 2, "dsa": 2
    }  # fmt: skip
    shown = (tmp_path / "out" / "table.md").read_text()
    assert shown in capsys.readouterr().out

    again = condense.main(argv)
    assert again == rows
    assert capsys.readouterr().out.count("not run again") == 6


def test_interrupted_condensation_goes_on_to_the_same_set(
    condense: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset = str(own_data(tmp_path / "mine.npz"))
    argv = ["--preset", "smoke", "--dataset", dataset, "--methods", "dm", "--steps", "3", "--epochs", "1"]
    condense.main([*argv, "--out", str(tmp_path / "whole")])

    class Interrupted(Exception):
        pass

    real_keep = condense.keep

    def dies_after_two(state: Path) -> object:
        callback = real_keep(state, every=0.0)

        def wrapped(progress: object) -> None:
            callback(progress)
            if progress.step == 2:  # type: ignore[attr-defined]
                raise Interrupted

        return wrapped

    monkeypatch.setattr(condense, "keep", dies_after_two)
    with pytest.raises(Interrupted):
        condense.main([*argv, "--out", str(tmp_path / "cut")])
    monkeypatch.setattr(condense, "keep", real_keep)
    condense.main([*argv, "--out", str(tmp_path / "cut"), "--resume"])
    run = "mine-dm-ipc1-seed0/set.safetensors"
    a, b = (LabeledImages.load(tmp_path / name / run) for name in ("whole", "cut"))
    assert torch.equal(a.images, b.images)

    (tmp_path / "cut" / "summary.json").unlink()
    monkeypatch.setattr(condense.Condenser, "make", None)  # the set is there, so only the test is run again
    assert condense.main([*argv, "--out", str(tmp_path / "cut"), "--resume"])[0]["steps"] == 3


def test_presets_and_published_loops(condense: ModuleType) -> None:
    paper = condense.arguments(["--preset", "paper"])
    assert (paper.steps, paper.iterations, paper.loops, paper.init) == (20_000, 1000, (10, 50), "noise")
    assert paper.nets * len(paper.seeds) == 100
    assert condense.arguments(["--preset", "cpu", "--ipc", "50"]).ipc == 50
    assert condense.arguments(["--preset", "smoke"]).dataset == "digits"


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--steps", "-3"], "argument --steps: must be at least 0, got -3"),
        (["--ipc", "0"], "argument --ipc: must be at least 1, got 0"),
        (["--lr-dc", "nan"], "argument --lr-dc: must be a number above 0"),
        (
            ["--dataset", "nowhere"],
            "--dataset nowhere: there is no such folder or .npz, and no dataset of that name (dig",
        ),
        (["--data", "mine"], "--data mine would not be read: digits come with scikit-learn.*--dataset mine"),
    ],
)
def test_a_wrong_command_is_told_in_a_line(
    condense: ModuleType, argv: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        condense.main(["--preset", "smoke", *argv])
    assert end.value.code == 2
    first, _, second = words.partition(".*")
    told = capsys.readouterr().err
    assert first in told
    assert second in told


def test_data_that_cannot_be_read_end_the_program_without_a_traceback(condense: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "pets").mkdir()
    (tmp_path / "notes.txt").write_text("no arrays")
    for path, words in (
        (tmp_path / "pets", "has no sub-folders"),
        (tmp_path / "notes.txt", "is damaged or not an .npz"),
    ):
        with pytest.raises(SystemExit, match=f"--dataset {path}: .*{words}"):
            condense.main(["--preset", "smoke", "--dataset", str(path), "--out", str(tmp_path / "out")])
    with pytest.raises(SystemExit, match=r"mnist is not complete in .*Get it with"):
        condense.main(["--preset", "smoke", "--dataset", "mnist", "--data", str(tmp_path)])
