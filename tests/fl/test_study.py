"""The comparison of the docs: three folders of a user's images, killed midway and resumed to equal numbers."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parents[2]
HOSPITALS = ("north", "south", "west")
CHEAP = {
    "rounds=20": "rounds=2",
    '"steps": 20, "server_epochs": 20': '"steps": 2, "server_epochs": 2',
    "size=32": "size=8",
    '{"width": 32}': '{"width": 4, "depth": 1}',
    "seeds=(0, 1, 2)": "seeds=(0, 1)",
    "processes=2": "trial=False",
}
"""What the test makes smaller in the snippet; processes are tests/distillkit/study/test_study.py's."""


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


def start(folder: Path) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PYTHONIOENCODING": "utf-8"}
    return subprocess.Popen([sys.executable, "compare.py"], cwd=folder, env=environment, stdout=subprocess.PIPE)


def finished(folder: Path) -> str:
    with start(folder) as process:
        said = process.communicate(timeout=300)[0].decode()
    assert process.returncode == 0
    return said


def outcome(folder: Path) -> tuple[Any, Any]:
    """Return the choice and the runs' lines without seconds."""
    runs = folder / "runs" / "hospitals"
    lines = json.loads((runs / "summary.json").read_text(encoding="utf-8"))
    return json.loads((runs / "choice.json").read_text(encoding="utf-8")), [
        {key: value for key, value in line.items() if "seconds" not in key} for line in lines
    ]


@pytest.mark.slow
def test_killed_comparison_resumes_to_the_same_numbers(tmp_path: Path) -> None:
    for name in ("whole", "killed"):
        hospitals(tmp_path / name)
        (tmp_path / name / "compare.py").write_text(cheap(snippet()), encoding="utf-8")
    said = finished(tmp_path / "whole")
    assert "95 % interval" in said
    assert (tmp_path / "whole" / "runs" / "hospitals" / "curves.png").stat().st_size > 1000
    runs = tmp_path / "killed" / "runs" / "hospitals"
    with start(tmp_path / "killed") as process:
        deadline = time.monotonic() + 240
        while len(list(runs.rglob("*/summary.json"))) < 14:  # twelve searched runs and two final runs are done
            assert process.poll() is None, "it ended before it was killed"
            assert time.monotonic() < deadline
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
    assert not (runs / "curves.png").exists()
    finished(tmp_path / "killed")
    assert outcome(tmp_path / "killed") == outcome(tmp_path / "whole")
    choice, lines = outcome(tmp_path / "whole")
    assert {name: len(candidate["search"]) for name, candidate in choice["tasks"]["hospitals"].items()} == {
        "FedAvg": 4, "FedProx": 4, "FedDM": 4
    }  # fmt: skip
    assert len(lines) == 6
    assert all(len(line["hash"]) == 32 for line in lines)
