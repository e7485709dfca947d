"""Blocks of generated images on the pages are labelled and large enough."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import matplotlib.text
import pytest
import torch
from matplotlib.figure import Figure
from PIL import Image

from distillkit.rng import derive

DOCS = Path(__file__).parents[1] / "docs"
BLOCKS = ["inverted", "noise"]


def test_blocks_of_images_have_titles_and_named_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: dict[str, list[str]] = {}

    def keep(figure: Figure, path: Path, dpi: int) -> None:
        assert dpi >= 200
        shown[path.stem] = [t.get_text() for t in figure.findobj(matplotlib.text.Text) if t.get_text()]

    monkeypatch.setattr(Figure, "savefig", keep)
    place = runpy.run_path(str(DOCS / "scripts" / "pictures_generate.py"))
    block = torch.rand(3, 8, 8, generator=derive(0))
    place["labelled"]({"one": block, "other": block}, "noise", ["0", "1"], "class", 4, 2)
    assert {"one", "other", "class", "0", "1"} <= set(shown["noise"])
    source = (DOCS / "scripts" / "pictures_generate.py").read_text(encoding="utf-8")
    assert set(re.findall(r'^    labelled\((?:\w+|{.*?}), "(\w+)"', source, re.MULTILINE)) == set(BLOCKS)


COMPONENTS = re.findall(
    r'^    "(\w+)": ', (DOCS / "scripts" / "pictures_components.py").read_text(encoding="utf-8"), re.MULTILINE
)
WITHOUT = {
    "attack_statistics", "evaluate", "metrics", "privacy", "privacy_report", "randomness", "secure_sums",
    "serialization", "sets", "soft_labels", "study", "transcript",
}  # fmt: skip
"""Pages on components that are tables and snippets alone."""


def test_pages_on_components_have_an_image() -> None:
    pages = {page.stem: page.read_text(encoding="utf-8") for page in (DOCS / "components").glob("*.md")}
    shown = {name: re.findall(r"!\[.+?\]\(\.\./pictures/(\w+)\.png\)", text) for name, text in pages.items()}
    assert {name for name, found in shown.items() if not found} == WITHOUT
    assert all(name in shown[name] for name in COMPONENTS)


MADE = re.findall(
    r'save\(.*, "(\w+)"\)$', (DOCS / "scripts" / "pictures_plot.py").read_text(encoding="utf-8"), re.MULTILINE
)


def test_all_images_of_the_page_of_plots_are_checked() -> None:
    assert len(MADE) == 9


@pytest.mark.parametrize("name", [*BLOCKS, *MADE, *COMPONENTS, "inversion_clients"])
def test_images_are_large_enough(name: str) -> None:
    width, height = Image.open(DOCS / "pictures" / f"{name}.png").size
    assert width >= 1000
    assert height >= 400
