"""The walk from a folder of pictures to an attacked file runs, and its script trains without distillkit."""

from __future__ import annotations

import doctest
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[1] / "docs" / "publish_a_set.md"


@pytest.mark.slow
def test_a_recipient_trains_on_the_file_in_plain_pytorch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    options = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    assert doctest.testfile(str(PAGE), module_relative=False, optionflags=options).failed == 0
    (script,) = re.findall(r"```python\n# train\.py\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    for name in ("set.npz", "test.npz"):
        (tmp_path / name).rename(elsewhere / name)
    blocked = "import sys\nsys.modules.update(dict.fromkeys(('distillkit', 'fl', 'attacks', 'torchvision')))\n"
    (elsewhere / "train.py").write_text(blocked + script, encoding="utf-8")
    ran = subprocess.run(
        [sys.executable, "train.py"], cwd=elsewhere, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True,
        text=True, check=False, encoding="utf-8",
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    found = re.fullmatch(r"([\d.]+) % of 899 pictures of 10 classes\n", ran.stdout)
    assert found, ran.stdout
    assert float(found[1]) > 85
