"""The README: snippets run in an empty file, and its table of methods equals the code, each with a golden test."""

from __future__ import annotations

import ast
import re
import tomllib
from pathlib import Path

import pytest

import fl.addons
import fl.methods
from tests.refused import refused
from tests.scripts import load_script, run_script

ROOT = Path(__file__).parents[1]
SNIPPETS = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)


def test_readme_shows_how_to_begin() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(SNIPPETS) >= 4
    assert "condensed" in re.findall(r"!\[[^\]]*\]\(docs/pictures/[^)]*\)\s+([^\[]+)", readme)[0]
    install = readme.split("## Install\n")[1].split("\n## ")[0]
    for said in ("pip install", r"[\d.]+ GB on disk", r"\w+ minutes"):
        assert re.search(said, install), said
    wheel = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["hatch"]["build"]["targets"][
        "wheel"
    ]
    assert all(f"`{package}`" in install for package in wheel["packages"])


def test_readme_images_exist() -> None:
    pictures = re.findall(r"!\[[^\]]+\]\(([^)]+)\)", (ROOT / "README.md").read_text(encoding="utf-8"))
    assert len(pictures) >= 2
    assert all((ROOT / picture).is_file() for picture in pictures)


def test_setup_commands_are_as_documented() -> None:
    steps = (ROOT / "Makefile").read_text(encoding="utf-8").split("$(STAMP): pyproject.toml\n")[1].split("\n\n")[0]
    assert re.search(r"@echo .*GB.*minutes", steps)
    assert not re.search(r"\s(-q|--quiet)\b|@.*pip", steps)


@pytest.mark.slow
@pytest.mark.parametrize("snippet", SNIPPETS, ids=range(len(SNIPPETS)))
def test_snippet_runs_when_pasted_into_an_empty_file(snippet: str, tmp_path: Path) -> None:
    path = tmp_path / "pasted.py"
    path.write_text(snippet, encoding="utf-8")
    assert run_script(path, tmp_path, alone=snippet == SNIPPETS[0]).strip()


def test_every_golden_test_names_its_source() -> None:
    """A paper's algorithm, equation or section, a file of a release, or that the construction is our own."""
    cited = re.compile(r"Algorithm|Eqs?\.|section|\.py\b|no formula is printed|of our own", re.ASCII)
    found = 0
    for path in sorted((ROOT / "tests" / "fl").glob("test_*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "pytest.mark.golden":
                given = {k.arg: ast.literal_eval(k.value) for k in node.keywords}
                assert cited.search(given.get("source", "")), f"{path.name}, line {node.lineno}"
                found += 1
    assert found > 25


def test_every_row_has_a_card_and_a_golden_test() -> None:
    script = load_script("docs/scripts/_methods_table.py")
    names = set(script.public())
    assert names == {"FedAvg", "ClientDP", *fl.addons.__all__, *fl.methods.__all__} - {"ClippedCrossEntropy"}
    assert set(script.golden_tests()) == names
    for row in script.methods_table().cells:
        for target in (cell.partition("](")[2].rstrip(")") for cell in row[2:]):
            assert (ROOT / target).is_file(), row


def test_method_without_a_golden_test_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    script = load_script("docs/scripts/_methods_table.py")
    tests = script.golden_tests()
    monkeypatch.setattr(script, "golden_tests", lambda: {n: t for n, t in tests.items() if n != "SCAFFOLD"})
    refused(lambda: script.methods_table(), ValueError, "marked golden for SCAFFOLD")
