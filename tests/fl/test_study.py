"""The comparison of the docs: three folders of a user's images."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch

from tests.scripts import ROOT, run_script

HOSPITALS = ("north", "south", "west")
CHEAP = {
    "rounds=20": "rounds=2",
    '"steps": 20, "server_epochs": 20': '"steps": 2, "server_epochs": 2',
    "size=32": "size=8",
    '{"width": 32}': '{"width": 4, "depth": 1}',
    "seeds=(0, 1, 2)": "seeds=(0, 1)",
    "processes=2": "trial=False",
}
"""What the test makes smaller in the snippet; processes are tests/distillkit/study/test_executors.py's."""


def snippet() -> str:
    """Return the first code block of the page."""
    page = (ROOT / "docs" / "components" / "study.md").read_text(encoding="utf-8")
    found = re.search(r"```python\n(.*?)```", page, re.DOTALL)
    assert found is not None
    return found.group(1)


def cheap(text: str) -> str:
    for before, after in CHEAP.items():
        assert before in text, before
        text = text.replace(before, after)
    return text


def hospitals(root: Path) -> None:
    """Write three folders of images of two classes: dark and light, each hospital with its own contrast."""
    from PIL import Image

    rng = torch.Generator().manual_seed(0)
    for number, hospital in enumerate(HOSPITALS):
        for label, kind in enumerate(("healthy", "ill")):
            folder = root / "data" / hospital / kind
            folder.mkdir(parents=True)
            for i in range(15):
                pixels = 60 + 80 * label + 20 * number + 25 * torch.randn(8, 8, 3, generator=rng)
                Image.fromarray(pixels.clamp(0, 255).byte().numpy()).save(folder / f"{i}.png")


@pytest.mark.slow
def test_comparison_of_the_page_runs(tmp_path: Path) -> None:
    hospitals(tmp_path)
    (tmp_path / "compare.py").write_text(cheap(snippet()), encoding="utf-8")
    assert "95 % interval" in run_script(tmp_path / "compare.py", tmp_path, alone=True)
    runs = tmp_path / "runs" / "hospitals"
    assert (runs / "curves.png").stat().st_size > 1000
    choice = json.loads((runs / "choice.json").read_text(encoding="utf-8"))
    assert {name: len(candidate["search"]) for name, candidate in choice["tasks"]["hospitals"].items()} == {
        "FedAvg": 4, "FedProx": 4, "FedDM": 4
    }  # fmt: skip
    lines = json.loads((runs / "summary.json").read_text(encoding="utf-8"))
    assert [len(line["hash"]) for line in lines] == [32] * 6
