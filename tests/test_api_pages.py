"""The site's reference has every public name of every public package, each described once."""

from __future__ import annotations

import importlib
import pkgutil
import re
from types import ModuleType

import griffe
import pytest

from tests.scripts import load_script
from tests.test_docs import PACKAGES as IN_USE

API = load_script("docs/scripts/api.py")
PACKAGES = [package for group in API.PACKAGES.values() for package in group]


def test_every_public_package_has_a_page() -> None:
    assert set(IN_USE) <= set(PACKAGES)
    offered = {id(getattr(importlib.import_module(p), n)) for p in PACKAGES for n in API.names(p)}
    for top in API.PACKAGES:
        module = importlib.import_module(top)
        rooms = [f.name for f in pkgutil.iter_modules(module.__path__, f"{top}.") if f.ispkg]
        for room in (r for r in rooms if r not in PACKAGES and "._" not in r and r != "distillkit.commands"):
            own = importlib.import_module(room)
            assert [n for n in own.__all__ if id(getattr(own, n)) not in offered] == [], f"{room} has no page"


@pytest.fixture(scope="module")
def sources() -> griffe.ModulesCollection:
    """Return what griffe, which mkdocstrings uses, finds in the sources."""
    loader = griffe.GriffeLoader(search_paths=[API.DOCS.parent])
    for top in API.PACKAGES:
        loader.load(top)
    loader.resolve_aliases()
    return loader.modules_collection


@pytest.mark.parametrize("package", PACKAGES)
def test_every_name_is_described_once_and_shown_in_use(package: str, sources: griffe.ModulesCollection) -> None:
    text = API.page(package)
    described = re.findall(r"^::: ([\w.]+)$", text, re.MULTILINE)
    assert described == [package, *(API.path(package, n) for n in API.own(package))]
    for name in set(API.names(package)) - set(API.own(package)):
        assert f"- [`{name}`][{API.path(package, name)}]" in text
        assert API.path(package, name) in PACKAGES or f"::: {API.path(package, name)}\n" in API.page(
            API.homes()[package, name]
        )
    for name in API.own(package):
        found = sources[API.path(package, name)]
        assert found.docstring, f"{name} has no docstring"
        assert found.is_module == isinstance(getattr(importlib.import_module(package), name), ModuleType), name
    shown = len(re.findall(r"^In use: \[", text, re.MULTILINE))
    assert shown == len(API.own(package)) or package not in IN_USE


def test_quoted_names_are_links_unless_they_are_arguments_or_links() -> None:
    place = "distillkit.condense.embedding_means"
    assert API.linked("see `embedding_means`, `match`") == f"see [`embedding_means`][{place}], `match`"
    for kept in ("[`embedding_means`](page.md)", "```\n`match`\n```"):
        assert API.linked(kept) == kept
