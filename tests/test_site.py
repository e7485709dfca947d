"""The site builds without warnings, works from its folder, and shows formulas and whole lines of code."""

from __future__ import annotations

import ast
import html
import os
import re
from doctest import DocTestParser
from pathlib import Path

import pytest
from filelock import FileLock

from tests.scripts import load_script

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]
PAGES = sorted((ROOT / "docs").rglob("*.md"))


@pytest.fixture(scope="session")  # of the module alone it is built anew when a process comes back to it
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the site once for all processes of a run."""
    from mkdocs.commands.build import build
    from mkdocs.config import load_config

    own = tmp_path_factory.getbasetemp()
    out = (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "site"
    with FileLock(f"{out}.lock"):
        if not (done := out.with_suffix(".done")).exists():
            build(load_config(str(ROOT / "mkdocs.yml"), strict=True, site_dir=str(out)))
            done.touch()
    return out


def html_of(site: Path, page: Path) -> str:
    return (site / page.relative_to(ROOT / "docs").with_suffix(".html")).read_text(encoding="utf-8")


def formulas(text: str) -> int:
    """Return displayed and inline formulas of a Markdown page, outside code."""
    text = re.sub(r"```.*?```|`[^`]*`", "", text, flags=re.DOTALL)
    text, displayed = re.subn(r"\$\$.+?\$\$", "", text, flags=re.DOTALL)
    return displayed + len(re.findall(r"\$[^$]+?\$", text))


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_every_formula_is_rendered(site: Path, page: Path) -> None:
    html = html_of(site, page)
    assert html.count("<math") == formulas(page.read_text(encoding="utf-8"))
    shown = re.sub(r"<(script|pre|code)\b.*?</\1>", "", html, flags=re.DOTALL)
    assert not re.search(r"arithmatex|\$\$|\\[(\[]", shown)


def test_nothing_is_loaded_from_other_hosts(site: Path) -> None:
    for page in site.rglob("*.html"):
        assert not re.search(
            r"<(script|link|img|iframe)[^>]+(src|href)=.?(https?:)?//", page.read_text(encoding="utf-8")
        ), page
    for style in site.rglob("*.css"):
        assert not re.search(r"(url\(|@import)\s*.?(https?:)?//", style.read_text(encoding="utf-8")), style


def test_search_works_from_the_folder(site: Path) -> None:
    """Browsers load scripts from a folder, but no JSON, and start no worker."""
    assert (site / "search" / "search_index.js").read_text(encoding="utf-8").startswith("var __index = {")
    assert '<script src="../iframe-worker.js">' in html_of(site, ROOT / "docs" / "components" / "sets.md")


def copied(page: str) -> str:
    """Return what the copy buttons of a page's snippets copy."""
    return "\n".join(html.unescape(code) for code in re.findall(r'data-copy="([^"]*)"', page))


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_snippets_are_shown_and_copied_without_prompts(site: Path, page: Path) -> None:
    tested = DocTestParser().get_examples(page.read_text(encoding="utf-8"))
    found = html_of(site, page)
    assert "content.code.copy" in found
    assert ast.dump(ast.parse(copied(found))) == ast.dump(ast.parse("".join(e.source for e in tested)))
    shown = re.sub(r"<[^>]+>", "", found)
    assert "&gt;&gt;&gt; " not in shown
    assert "# doctest" not in shown
    assert "BLANKLINE" not in shown
    outputs = sum(1 for e in tested if e.want)
    assert len(re.findall(r'<span class="output( error)?">', found)) == outputs


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_every_fence_is_closed(page: Path) -> None:
    """Opening fences have one word or nothing and closing ones nothing; a misplaced one shows in its neighbours."""
    opened = False
    for line in page.read_text(encoding="utf-8").splitlines():
        if line.startswith("```"):
            assert not opened or line == "```", line
            opened = not opened
        assert opened or not line.startswith(">>> "), f"outside of code: {line}"
        assert not (opened and line.startswith("#") and line.split()[0] in ("##", "###")), f"inside of code: {line}"
    assert not opened


def test_reference_is_in_the_navigation_with_an_anchor_for_every_name(site: Path) -> None:
    api = load_script("docs/scripts/api.py")
    start = (site / "index.html").read_text(encoding="utf-8")
    for package in (p for group in api.PACKAGES.values() for p in group):
        assert f'href="api/{package}.html"' in start
        ids = set(re.findall(r' id="([^"]+)"', (site / "api" / f"{package}.html").read_text(encoding="utf-8")))
        assert {api.path(package, n) for n in api.own(package)} <= ids


def test_numbers_do_not_break_and_markers_leave_no_paragraph() -> None:
    hook = load_script("docs/scripts/typography.py")
    assert hook.on_page_markdown("found\n<!-- found: a b c -->1.2 %<!-- end of found -->.") == "found\n1.2 %."
    text = (
        '<td title="3 % a">5.0 ± 0.1 (4.9 to 5.1) % of 3 MB, 1 to 2</td><code>7 % 3</code><pre><code>8 % 3</code></pre>'
    )
    expected = text.replace(">5.0 ± 0.1 (4.9 to 5.1) % of 3 MB", ">5.0~±~0.1 (4.9~to~5.1)~% of 3~MB").replace(
        "~", "\u00a0"
    )
    assert hook.on_page_content(text) == expected
    assert hook.on_page_content("<td>-0.8</td><td>[-10.9, +9.3]</td> ten-5, 3 s <code>[-1, 2]</code>") == (
        "<td>\u22120.8</td><td>[\u221210.9,\u00a0+9.3]</td> ten-5, 3\u00a0s <code>[-1, 2]</code>"
    )
    assert hook.on_page_content(f"<code>{'a' * 33}</code>") == f'<code class="long">{"a" * 33}</code>'
