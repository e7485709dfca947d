"""Notebooks: executed cells equal their source, the page shows the outputs, and the source runs."""

from __future__ import annotations

import json
import re
import runpy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import matplotlib
import pytest

from tests.scripts import load_script

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "docs" / "notebooks"
SCRIPT = load_script("docs/scripts/notebooks.py")
LARGEST = 300_000


def notebook(name: str) -> Any:
    return json.loads((FOLDER / f"{name}.ipynb").read_text(encoding="utf-8"))


def test_all_notebooks_have_a_source_and_a_navigation_entry() -> None:
    for suffix in ("py", "ipynb", "md"):
        assert sorted(path.stem for path in FOLDER.glob(f"*.{suffix}")) == sorted(SCRIPT.NAMES)
    navigation = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    assert all(f": notebooks/{name}.md\n" in navigation for name in SCRIPT.NAMES)


@pytest.mark.parametrize("name", SCRIPT.NAMES)
def test_notebook_is_its_source_executed_in_order(name: str) -> None:
    found = notebook(name)
    for cell in found["cells"]:
        for output in cell.pop("outputs", ()):
            assert output["output_type"] != "error"
            assert output.get("name", "stdout") == "stdout", output
        if cell["cell_type"] == "code":
            cell["outputs"] = []
    counts = [cell["execution_count"] for cell in found["cells"] if cell["cell_type"] == "code"]
    assert counts == list(range(1, len(counts) + 1))
    for cell in found["cells"]:
        cell.update({"execution_count": None} if cell["cell_type"] == "code" else {})
    assert found["cells"] == SCRIPT.unexecuted(name)["cells"], f"run python docs/scripts/notebooks.py {name}"
    made = found["metadata"]["distillkit"]
    assert made["command"].endswith(name)
    assert re.fullmatch(r"[0-9a-f]{40}", made["commit"])
    assert made["cpu_seconds"] > 0
    assert (FOLDER / f"{name}.ipynb").stat().st_size < LARGEST


@pytest.mark.parametrize("name", SCRIPT.NAMES)
def test_page_shows_the_notebook(name: str) -> None:
    text, pictures = SCRIPT.page(name, notebook(name))
    assert (FOLDER / f"{name}.md").read_text(encoding="utf-8") == text
    assert len(pictures) == len(list(FOLDER.glob(f"{name}_*.png"))) > 0
    assert [(FOLDER / f"{name}_{k}.png").read_bytes() for k in range(1, len(pictures) + 1)] == pictures


@pytest.mark.slow
@pytest.mark.parametrize("name", SCRIPT.NAMES)
def test_source_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = (FOLDER / f"{name}.py").read_text(encoding="utf-8")
    assert len(SCRIPT.quick(source)) != len(source)
    monkeypatch.chdir(tmp_path)
    matplotlib.use("agg")
    Path("source.py").write_text(SCRIPT.quick(source), encoding="utf-8")
    runpy.run_path("source.py", run_name="__main__")


def test_cells_are_text_or_code_without_test_only_lines() -> None:
    source = "# %% [markdown]\n# # Title\n#\n# Words.\n\n# %%\nsteps = 300  # quick: 2\nf(\n    x,\n)  # fmt: skip\n"
    assert SCRIPT.cells(source) == [("markdown", "# Title\n\nWords."), ("code", "steps = 300\nf(\n    x,\n)")]
    assert "steps = 2\n" in SCRIPT.quick(source)


def test_page_links_to_colab_if_the_repository_is_on_github() -> None:
    text = "[Download it](own_images.ipynb)."
    page = SimpleNamespace(file=SimpleNamespace(src_uri="notebooks/own_images.md"))

    def shown(address: str | None, markdown: str = text) -> str:
        return SCRIPT.on_page_markdown(markdown, page=page, config=SimpleNamespace(repo_url=address), files=[])

    assert [shown(address) for address in (None, "", "https://example.org/a/b")] == [text] * 3
    assert shown("https://github.com/a/b/", "[Other](gpu.md)") == "[Other](gpu.md)"
    assert shown("https://github.com/a/b/") == (
        "[Download it](own_images.ipynb) or [open it in Colab](https://colab.research.google.com/github/a/b/blob/main/"
        "docs/notebooks/own_images.ipynb), after `%pip install git+https://github.com/a/b`."
    )
