"""The tutorial: runs in an empty file with the printed output; one step in plain PyTorch; the last on Flower."""

from __future__ import annotations

import importlib
import json
import re
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from tests.fl.flower import fake_flower
from tests.scripts import load_script

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "tutorial.md"
POINTS = 15
"""How far a share in per cent may be from the page's: noise of private sets, and other processors."""

_NUMBER = re.compile(r"[+-]?\d+(?:\.\d+)?(?:e-?\d+)?")


def same(printed: str, page: str) -> bool:
    """Return whether words and numbers are equal: shares up to `POINTS`, intervals not compared, others exactly."""
    for line, wanted in zip(printed.strip().splitlines(), page.strip().splitlines(), strict=True):
        shares = "%" in wanted or "|" in wanted
        (a, x), (b, y) = (parts(text, shares) for text in (line, wanted))
        if a != b or any(abs(m - n) > (POINTS if shares else 0) for m, n in zip(x, y, strict=True)):
            return False
    return True


def parts(line: str, shares: bool) -> tuple[list[str], list[float]]:
    """Return a line's words with # for numbers, and the numbers, without table rules and intervals."""
    line = re.sub(r"-{2,}", " ", re.sub(r"\[.*?\]", "[]", line) if shares else line)
    return _NUMBER.sub("#", line).split(), [float(number) for number in _NUMBER.findall(line)]


@pytest.mark.parametrize(
    ("printed", "page", "expected"),
    [
        ("| FedDM | 81.3 ± 3.1 |", "|  FedDM | 85.0 ±  2.1 |", True),
        ("| FedDM | 81.3 ± 3.1 |", "| FedDM | 60.0 ± 2.1 |", False),
        ("| FedDM | 81.3 ± 3.1 |", "| FedAvg | 81.3 ± 3.1 |", False),
        ("120 test pictures", "121 test pictures", False),
        ("75 % [1.0, 2.0]", "80 % [-9.0, 9.0]", True),
    ],
)
def test_numbers_are_compared_by_their_kind(printed: str, page: str, expected: bool) -> None:
    assert same(printed, page) is expected


def test_statements_are_all_lines_of_the_page_but_output() -> None:
    page = PAGE.read_text(encoding="utf-8")
    lines = [line for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL) for line in block.splitlines()]
    script = load_script("docs/scripts/tutorial.py")
    found = [line for one in script.statements(page) for line in one.source.splitlines()]
    assert [line for line in found if line] == [line for line in lines if line and not line.startswith("#")]
    assert script.filled(page, [one.want for one in script.statements(page)]) == page


@pytest.mark.slow
def test_tutorial_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    script = load_script("docs/scripts/tutorial.py")
    page = PAGE.read_text(encoding="utf-8")
    printed, warned = script.walked(tmp_path, page)
    assert "Warning" not in warned
    for one, said in zip(script.statements(page), printed, strict=True):
        wanted = one.want
        assert len(said.splitlines()) == len(wanted.splitlines()), one.source
        assert same(said, wanted), f"{one.source}\n{said}\nis not\n{wanted}\nrun python docs/scripts/tutorial.py"
    for made in ("small.png", "curves.png", "runs/sites/sites-feddm-0/report/report.html"):
        assert (tmp_path / made).stat().st_size > 0
    monkeypatch.chdir(tmp_path)
    plain_pytorch(script, monkeypatch)
    assert re.search(r"\d+ % of 599 pictures", capsys.readouterr().out)
    on_flower(tmp_path, monkeypatch)


def plain_pytorch(script: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the marked step alone, where none of our packages can be imported."""
    page = PAGE.read_text(encoding="utf-8").split("## 4. ")[1].split("\n## ")[0]
    with monkeypatch.context() as without:
        for name in ("distillkit", "fl", "attacks"):
            without.setitem(sys.modules, name, None)
        exec("".join(one.source for one in script.statements(page)), {})


def on_flower(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the last step's configuration with the example's app on an in-memory grid."""
    page = PAGE.read_text(encoding="utf-8").split("## 10. ")[1]
    given = [as_toml(text) for text in re.findall(r"--node-config '([^']*)'", page)]
    (config,) = (as_toml(text) for text in re.findall(r"-c '([^']*)'", page))
    app = ROOT / "examples" / "flower_app"
    defaults = tomllib.loads((app / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["flwr"]["app"]["config"]
    assert set(config) <= set(defaults)
    assert [one["num-partitions"] for one in given] == [len(given)] * 3
    monkeypatch.syspath_prepend(str(app))
    with fake_flower.installed():
        nodes = {}
        for one in given:
            nodes[100 + one["partition-id"]] = made = fake_flower.context(
                100 + one["partition-id"], one["partition-id"], 3
            )
            made.node_config.update(one)
            made.run_config.update(defaults | config | {"server-epochs": 1})
        server = fake_flower.context(0, None, 0)
        server.run_config.update(made.run_config)
        client = importlib.import_module("flower_app.client_app").app
        importlib.import_module("flower_app.server_app").app(fake_flower.Grid(client, nodes), server)
        for name in [name for name in sys.modules if name.startswith("flower_app")]:
            monkeypatch.delitem(sys.modules, name)
    rows = [
        json.loads(line) for line in (folder / config["out"] / "history.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    assert [row["failed"] for row in rows] == [{}] * config["rounds"]


def as_toml(config: str) -> dict[str, Any]:
    """Parse Flower's `key=value key=value` as Flower does."""
    return tomllib.loads("\n".join(re.split(r" (?=[\w-]+=)", config)))
