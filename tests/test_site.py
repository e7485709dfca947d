"""The site builds without a warning, and shows formulas as formulas and code whole."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = sorted((ROOT / "docs").rglob("*.md"))


@pytest.fixture(scope="session")  # of the module alone it is built anew when a process comes back to it
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from mkdocs.commands.build import build
    from mkdocs.config import load_config

    out = tmp_path_factory.mktemp("site")
    build(load_config(str(ROOT / "mkdocs.yml"), strict=True, site_dir=str(out)))
    return out


def html_of(site: Path, page: Path) -> str:
    place = page.relative_to(ROOT / "docs").with_suffix("")
    return (site / (place if place.name != "index" else place.parent) / "index.html").read_text()


def formulas(text: str) -> int:
    """Displayed and inline formulas of a Markdown page, outside code."""
    text = re.sub(r"```.*?```|`[^`]*`", "", text, flags=re.DOTALL)
    text, displayed = re.subn(r"\$\$.+?\$\$", "", text, flags=re.DOTALL)
    return displayed + len(re.findall(r"\$[^$]+?\$", text))


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_every_formula_is_drawn(site: Path, page: Path) -> None:
    html = html_of(site, page)
    assert html.count("<math") == formulas(page.read_text())
    shown = re.sub(r"<(script|pre|code)\b.*?</\1>", "", html, flags=re.DOTALL)
    assert not re.search(r"arithmatex|\$\$|\\[(\[]", shown)


def test_there_are_formulas_to_draw() -> None:
    assert sum(formulas(p.read_text()) for p in PAGES) > 100


def test_nothing_is_loaded_from_elsewhere(site: Path) -> None:
    for page in PAGES:
        assert not re.search(r"<(script|link|img)[^>]+(src|href)=.?https?://", html_of(site, page)), page


def test_code_can_be_copied(site: Path) -> None:
    assert "content.code.copy" in html_of(site, ROOT / "docs" / "components" / "sets.md")


def test_lines_of_120_characters_are_shown_whole() -> None:
    """In the theme's measures: side bars of 12.1 rem, margins of 1.2 rem, a padding of 1.18 em, a glyph of 0.6 em."""
    css = (ROOT / "docs" / "site.css").read_text()
    assert "site.css" in (ROOT / "mkdocs.yml").read_text()
    (page,) = re.findall(r"\.md-grid \{ max-width: ([\d.]+)rem", css)
    (size,) = re.findall(r"pre > code \{ font-size: ([\d.]+)rem", css)
    assert float(size) * (120 * 0.6 + 2 * 1.18) <= float(page) - 2 * 12.1 - 2 * 1.2
