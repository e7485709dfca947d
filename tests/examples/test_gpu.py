"""The program for accelerators, with tiny sizes on a CPU: records, pieces that continue, and tests of the device."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from distillkit import LabeledImages
from tests.scripts import EXAMPLES, load_script


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "gpu.jsonl").read_text(encoding="utf-8").splitlines()]


def test_interrupted_condensation_continues_with_the_same_result(script: Any, tmp_path: Path) -> None:
    words = ["--smoke", "--pieces", "dm", "--device", "cpu"]
    with pytest.raises(SystemExit) as ended:
        script.main([*words, "--out", str(tmp_path / "a"), "--seconds", "0"])
    assert ended.value.code == 3
    assert [line["finished"] for line in lines(tmp_path / "a")] == [False]
    for name in ("a", "b"):
        script.main([*words, "--out", str(tmp_path / name)])
    first, second = (LabeledImages.load(tmp_path / name / "dm-10-set.safetensors") for name in ("a", "b"))
    assert first.images.equal(second.images)
    before = lines(tmp_path / "b")
    assert [line.get("finished") for line in before] == [None, True]
    assert {line["device"] for line in before} == {"cpu"}
    assert (before[0]["what"], before[0]["published"]) == ("DM, 10 per class", "48.9 %")
    script.main([*words, "--out", str(tmp_path / "b")])
    assert lines(tmp_path / "b") == before


def test_other_sizes_are_condensed_beside_the_first(script: Any, tmp_path: Path) -> None:
    script.main(["--smoke", "--pieces", "dm-1", "dm-50", "--device", "cpu", "--out", str(tmp_path)])
    rows = [line for line in lines(tmp_path) if "what" in line]
    assert [(row["what"], row["published"]) for row in rows] == [
        ("DM, 1 per class", "26.0 %"),
        ("DM, 50 per class", "63.0 %"),
    ]
    sets = [LabeledImages.load(tmp_path / f"dm-{ipc}-set.safetensors") for ipc in (1, 50)]
    assert [len(small) for small in sets] == [10, 500]
    assert list(script.PIECES) == ["tests", "speed", "dm", "dm-1", "dm-50", "cells"]


def test_speed_and_tests_of_the_device_are_written(script: Any, tmp_path: Path) -> None:
    script.main(["--smoke", "--pieces", "tests", "speed", "--device", "cpu", "--out", str(tmp_path)])
    found = lines(tmp_path)
    assert [line["status"] for line in found if "status" in line] == [0, 0]
    assert "7 passed" in found[0]["said"][-1]
    assert [line["piece"] for line in found if line.get("finished")] == ["tests", "speed"]
    speed = [json.loads(line) for line in (tmp_path / "speed.jsonl").read_text(encoding="utf-8").splitlines()]
    assert speed[0]["tflops"] > 0
    assert speed[1]["gb_per_s"] > 0
    assert len([line for line in speed if "ms" in line]) == 5


def test_every_cell_has_options_that_its_script_accepts(script: Any, tmp_path: Path) -> None:
    """With an empty data root, each script fails for lack of images only, after its options were accepted."""
    for name, (example, always, paper, _) in script.CELLS.items():
        words = ["--preset", "paper", *always.split(), *paper.split(), "--seeds", "0", "--seconds", "9"]
        with pytest.raises(SystemExit) as ended:
            load_script(EXAMPLES[example]).main([*words, "--data", str(tmp_path), "--out", str(tmp_path / name)])
        assert "cannot be read" in str(ended.value), name


def test_cells_continue_until_one_fails(script: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    calls: list[list[str]] = []
    statuses = [script.UNFINISHED, 0, script.UNFINISHED, 1]

    class Done:
        def __init__(self, words: list[str], check: bool) -> None:
            calls.append(words)
            self.returncode = statuses[len(calls) - 1]

    monkeypatch.setattr(script, "git_commit", lambda folder: None)
    monkeypatch.setattr(script.subprocess, "run", Done)
    cells = ["vhl-fashionmnist", "single-image", "vhl-cifar10"]
    with pytest.raises(SystemExit) as ended:
        script.main(["--pieces", "cells", "--cells", *cells, "--out", str(tmp_path), "--data", "D", "--device", "cpu"])
    assert ended.value.code == 1
    assert [Path(words[1]).parent.name for words in calls] == ["vhl", "vhl", "single_image", "single_image"]
    assert calls[0] == calls[1]
    assert {"--dataset", "fashionmnist", "150", "D", "paper"} <= {*calls[0]}
    assert [(line["cell"], line["status"]) for line in lines(tmp_path)] == [(cells[0], 0), (cells[1], 1)]


def test_smoke_cell_runs_to_its_end_in_pieces(script: Any, tmp_path: Path) -> None:
    script.main(["--smoke", "--pieces", "cells", "--seconds", "5", "--device", "cpu", "--out", str(tmp_path)])
    assert (tmp_path / "cells" / "vhl-fashionmnist" / "table.md").is_file()
