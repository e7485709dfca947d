"""The table of benchmarks: equal sides of a row, correct counts, and a page that equals its record."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from tests.benchmarks import race, show, table
from tests.benchmarks.clock import with_peak
from tests.benchmarks.limit import Convolutions
from tests.benchmarks.rows import ROWS
from tests.benchmarks.sizes import TINY
from tests.refused import refused
from tests.scripts import load_script

SCRIPT = load_script("docs/scripts/tables.py")


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(table.NAMES)), ids=table.NAMES)
def test_each_line_is_measured_and_both_sides_of_a_row_are_equal(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(race, "LEAST", 1)
    monkeypatch.setattr(race, "largest", lambda *_: [])
    made = table.line(number, True, 0.0)
    assert show.tables([made | dict.fromkeys((*table.SAME, "command", "commit", "when", "took"), 0.0)])
    if number < len(ROWS):
        assert made["difference_float64"] <= race.EXACT
        assert 0 < made["share"] < math.inf


def test_different_sides_are_not_timed() -> None:
    def other(sizes: Any) -> race.Race:
        made = ROWS[0].race(sizes)
        return replace(made, plain=lambda: lambda: made.plain()() * 1.001)

    with pytest.raises(RuntimeError, match=r"the two sides are 1\.0e-03 apart in torch\.float64"):
        race.measured(replace(ROWS[0], race=other), TINY, TINY, 0.0)
    assert torch.get_default_dtype() == torch.float32


def test_convolutions_are_counted_forward_backward_and_single() -> None:
    images = torch.randn(2, 3, 6, 6).contiguous(memory_format=torch.channels_last)
    kernel = torch.randn(4, 3, 3, 3, requires_grad=True)
    with Convolutions() as noted:
        for _ in range(40):
            F.conv2d(images, kernel, padding=1)
        F.conv2d(images, kernel, stride=2).sum().backward()
    found = {
        (call[0].__name__, call[1][2] if "backward" not in call[0].__name__ else None): n
        for call, n in noted.counts.items()
    }
    assert sorted(noted.counts.values()) == [1, 1, 40]
    assert ("convolution.default", images.stride()) in found
    for workers in (1, 2):
        cost = noted.alone(workers)()
        assert cost["wall"] > 0
        assert cost["cpu"] > 0


def test_setup_work_is_not_counted_in_later_steps() -> None:
    def images(noted: Convolutions) -> int:
        forward = [(call[1][1][0], n) for call, n in noted.counts.items() if call[0].__name__ == "convolution.default"]
        return sum(size * n for size, n in forward)

    made = next(row for row in ROWS if row.of).race(TINY)
    blocks, real, synthetic = 3, TINY.classes * TINY.real, TINY.classes * TINY.ipc
    assert images(made.convolutions(later=True)) == blocks * synthetic
    assert images(made.convolutions()) >= blocks * (real + synthetic)


def test_peak_memory_excludes_the_initial_use() -> None:
    kept = torch.ones(8 << 20)
    found, peak = with_peak(lambda: float(torch.ones(16 << 20).sum()))
    assert (found, len(kept)) == (16 << 20, 8 << 20)
    assert peak is None or 60 < peak < 100


def test_table_is_printed_and_saved_line_by_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "made.jsonl"
    words = ["--tiny", "--here", "--seconds", "0", "--out", str(out), "--only", "class means", "--only", "width"]
    lines = table.main(words)
    assert show.read(out) == json.loads(json.dumps(lines))
    assert [line.get("row", line.get("growth")) for line in lines] == [
        "private class means, a step",
        "width: a DM step",
    ]
    step, width = lines
    for side in ("ours", "plain", "convolutions"):
        assert len(step["seconds"][side]["cpu"]) == step["rounds"] == race.LEAST
    ratios = sorted(a / b for a, b in zip(step["seconds"]["ours"]["cpu"], step["seconds"]["plain"]["cpu"], strict=True))
    assert [step["least"], step["ratio"], step["most"]] == ratios
    assert width["ratios"][0] == 1.0
    for fact in ("command", "commit", "torch", "processor", "cores", "when"):
        assert all(fact in line for line in lines)
    said = capsys.readouterr().out
    assert "private class means, a step | CPU |" in " ".join(said.split())
    assert "| width: a DM step" in said
    refused(lambda: SCRIPT.measured(out.rename(tmp_path / "benchmarks.jsonl"), {}), ValueError, "made with --tiny")


def line(**changed: Any) -> dict[str, Any]:
    """Return a line of the record."""
    costs = {"cpu": [2.0], "wall": [1.0]}
    return {
        "row": "a", "by": "cpu", "threads": 1, "target": None, "share_target": None, "rounds": 1, "ratio": 0.5,
        "least": 0.4, "most": 0.6, "share": 0.7, "once": 0.0, "seconds": dict.fromkeys(("ours", "plain"), costs),
        "faults": {"ours": 1000, "plain": 12_345}, "memory": {"ours": None, "plain": 9.6}, "bounded_by": [],
        "difference": 1e-6, "difference_float64": 1e-12, "within": 0.01, **changed,
    }  # fmt: skip


def plain(table: str) -> list[str]:
    """Return the lines of a table without the spaces that align its columns."""
    return [" ".join(line.split()) for line in table.splitlines()]


def test_missed_target_is_marked_with_its_slowest_operations() -> None:
    good, slow = line(target=0.5), line(row="b", target=0.4, bounded_by=[["aten::mm", 0.613]])
    far = line(row="c", share_target=0.8)
    said = plain(show.rows([good, slow, far]))
    assert said[2] == "| a | CPU | 2 | 2 | 0.50 | 0.40 to 0.60 | 0.50 | 70 % | – / 10 | 1 / 12 |"
    assert "**0.50, missed**" in said[3]
    assert "**70 %, missed**" in said[4]
    assert said[-1] == "b misses its target; our step spends most of its time in `aten::mm` 61 %."
    other = show.rows([line(difference=0.023)]).splitlines()
    assert other[-1] == "a: both sides are 2.3e-02 apart in float32, more than 1e-02, but 1e-12 in float64."
    more = {"growth": "d", "sizes": [10, 1000], "base": 10, "ratios": [1.0, 1.2], "seconds": {"cpu": [[1.0], [1.2]]}}
    grown = {**more, "target": 1.05}
    assert show.missed([good, slow, far, more, grown]) == ["b", "c", "d"]
    assert plain(show.grown([grown]))[-1] == "| d | 10: 1, 1,000: 1.2 | 1.00, 1.20 (of 10), **missed** |"
