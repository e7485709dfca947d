"""The table of benchmarks: both sides of a row are the same, what is noted is right, the page is its record."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from tests.benchmarks import growth, race, show, table
from tests.benchmarks.clock import with_peak
from tests.benchmarks.limit import Convolutions
from tests.benchmarks.rows import ROWS
from tests.benchmarks.sizes import TINY
from tests.scripts import load_script

SCRIPT = load_script("docs/scripts/benchmarks.py")


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_both_sides_of_a_row_are_the_same(row: race.Row) -> None:
    assert race.checked(row, TINY) <= race.EXACT


def test_sides_that_differ_are_not_timed() -> None:
    def other(sizes: Any) -> race.Race:
        made = ROWS[0].race(sizes)
        return replace(made, plain=lambda: lambda: made.plain()() * 1.001)

    with pytest.raises(RuntimeError, match=r"the two sides are 1\.0e-03 apart in torch\.float64"):
        race.measured(replace(ROWS[0], race=other), TINY, TINY, 0.0)
    assert torch.get_default_dtype() == torch.float32


def test_convolutions_are_noted_forward_and_backward_and_done_alone() -> None:
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


def test_what_is_done_once_is_no_part_of_a_later_steps_convolutions() -> None:
    def images(noted: Convolutions) -> int:
        forward = [(call[1][1][0], n) for call, n in noted.counts.items() if call[0].__name__ == "convolution.default"]
        return sum(size * n for size, n in forward)

    made = next(row for row in ROWS if row.of).race(TINY)
    blocks, real, synthetic = 3, TINY.classes * TINY.real, TINY.classes * TINY.ipc
    assert images(made.convolutions(later=True)) == blocks * synthetic
    assert images(made.convolutions()) >= blocks * (real + synthetic)


def test_a_peak_is_what_the_work_takes_beyond_what_there_was() -> None:
    kept = torch.ones(8 << 20)
    found, peak = with_peak(lambda: float(torch.ones(16 << 20).sum()))
    assert (found, len(kept)) == (16 << 20, 8 << 20)
    assert peak is None or 60 < peak < 100


def test_the_table_is_printed_and_kept_line_by_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
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
    assert "| private class means, a step | CPU |" in said
    assert "| width: a DM step |" in said
    with pytest.raises(ValueError, match="made with --tiny"):
        SCRIPT.filled(SCRIPT.PAGE.read_text(), out)


def test_what_is_done_once_is_shared_by_the_steps_it_is_for() -> None:
    costs = [{"cpu": 1.0, "wall": 1.0, "faults": 0.0}] * 3
    sides = {"ours": costs, "plain": [{**c, "cpu": 10.0} for c in costs], "convolutions": costs}
    line = race._line(replace(ROWS[0], of=100), sides, {"cpu": 201.0, "wall": 1.0, "faults": 0.0})
    assert line["ratio"] == pytest.approx(0.3)
    assert line["share"] == 1.0


def line(**changed: Any) -> dict[str, Any]:
    """A line as it is kept."""
    costs = {"cpu": [2.0], "wall": [1.0]}
    return {
        "row": "a", "by": "cpu", "threads": 1, "target": None, "share_target": None, "rounds": 1, "ratio": 0.5,
        "least": 0.4, "most": 0.6, "share": 0.7, "once": 0.0, "seconds": dict.fromkeys(("ours", "plain"), costs),
        "faults": {"ours": 1000, "plain": 12_345}, "memory": {"ours": None, "plain": 9.6}, "bounded_by": [], **changed,
    }  # fmt: skip


def test_a_target_that_is_missed_is_marked_with_what_takes_the_time() -> None:
    good, slow = line(target=0.5), line(row="b", target=0.4, bounded_by=[["aten::mm", 0.613]])
    far = line(row="c", share_target=0.8)
    said = show.rows([good, slow, far]).splitlines()
    assert said[2] == "| a | CPU | 2 | 2 | 0.50 | 0.40 to 0.60 | 0.50 | 70 % | – / 10 | 1 / 12 |"
    assert "**0.50, missed**" in said[3]
    assert "**70 %, missed**" in said[4]
    assert said[-1] == "b misses its target; the most time of a step of ours is in `aten::mm` 61 %."
    more = {"growth": "d", "sizes": [10, 1000], "base": 10, "ratios": [1.0, 1.2], "seconds": {"cpu": [[1.0], [1.2]]}}
    grown = {**more, "target": 1.05}
    assert show.missed([good, slow, far, more, grown]) == ["b", "c", "d"]
    assert show.grown([grown]).splitlines()[-1] == "| d | 10: 1, 1,000: 1.2 | 1.00, 1.20 (of 10), **missed** |"


def test_a_profile_names_the_operations_of_all_threads() -> None:
    def work() -> None:
        from distillkit.threads import thread_pool

        with thread_pool(2, "work") as pool:
            list(pool.map(lambda _: torch.ones(300, 300) @ torch.ones(300, 300), range(8)))

    assert "aten::mm" in [name for name, _ in race.largest(work)]


def test_the_page_is_of_its_record(tmp_path: Path) -> None:
    text = SCRIPT.PAGE.read_text()
    assert SCRIPT.TABLE.search(text)
    assert SCRIPT.filled(text, SCRIPT.RECORD) == text, "run python docs/scripts/benchmarks.py"
    part = tmp_path / "part.jsonl"
    part.write_text(json.dumps(line(tiny=False)))
    with pytest.raises(ValueError, match=f"lacks {ROWS[0].name}, .*{growth.NAMES[-1]}"):
        SCRIPT.filled(text, part)
