"""The script of the papers' cells: valid options, pieces, and the count of seconds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.scripts import EXAMPLES, load_script


def test_every_cell_has_options_that_its_script_accepts(
    script: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """With an empty data root, each script fails for lack of images only, after its options were accepted."""
    for name, cell in script.CELLS.items():
        example = load_script(EXAMPLES[cell.script])
        words = ["--preset", "paper", *cell.always.split(), *cell.paper.split(), "--seeds", "0", "--seconds", "9"]
        with pytest.raises(SystemExit) as ended:
            example.main([*words, "--data", str(tmp_path), "--out", str(tmp_path / name)])
        assert "cannot be read" in str(ended.value), name


def test_pieces_are_counted_and_a_failure_ends_the_script(
    script: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    calls: list[list[str]] = []
    statuses = [script.UNFINISHED, 0, script.UNFINISHED, 1]

    class Done:
        def __init__(self, words: list[str], check: bool) -> None:
            calls.append(words)
            self.returncode = statuses[len(calls) - 1]

    monkeypatch.setattr(script.subprocess, "run", Done)
    cells = ["vhl-fashionmnist", "single-image"]
    with pytest.raises(SystemExit):
        script.main(["--cells", *cells, "--out", str(tmp_path), "--data", "D"])
    assert [Path(words[1]).parent.name for words in calls] == ["vhl", "vhl", "single_image", "single_image"]
    assert calls[0] == calls[1]
    assert set(json.loads((tmp_path / "seconds.json").read_text(encoding="utf-8"))) == set(cells)
    assert "vhl-fashionmnist: finished after" in capsys.readouterr().out


def test_smoke_cell_runs_to_its_end_in_pieces(script: Any, tmp_path: Path) -> None:
    script.main(["--smoke", "--cells", "vhl-fashionmnist", "--seconds", "5", "--device", "cpu", "--out", str(tmp_path)])
    assert (tmp_path / "vhl-fashionmnist" / "table.md").is_file()
