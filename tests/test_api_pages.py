"""The site's reference has every public name of every public package with its docstring."""

from __future__ import annotations

import html
import importlib
import pkgutil
import re
from dataclasses import dataclass
from functools import cached_property
from types import ModuleType

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
        for room in (r for r in rooms if r not in PACKAGES and "._" not in r):
            own = importlib.import_module(room)
            assert [n for n in own.__all__ if id(getattr(own, n)) not in offered] == [], f"{room} has no page"


@pytest.mark.parametrize("package", PACKAGES)
def test_every_name_is_described_once_with_its_arguments(package: str) -> None:
    text = API.page(package)
    anchors = re.findall(r"^## `[\w.]+` \{ #([\w.]+) \}$", text, re.MULTILINE)
    own = [n for n in API.names(package) if API.homes()[package, n] == package]
    assert anchors == [f"{package}.{n}" for n in own]
    for name in set(API.names(package)) - set(own):
        home = API.homes()[package, name]
        assert f"- [`{name}`]({home}.md#{home}.{name})" in text
        assert f"## `{name}` {{ #{home}.{name} }}" in API.page(home)
    assert " at 0x" not in text
    modules = [n for n in own if isinstance(getattr(importlib.import_module(package), n), ModuleType)]
    shown = len(re.findall(r"^In use: \[", text, re.MULTILINE))
    assert shown == len(own) - len(modules) or package not in IN_USE


def test_arguments_results_and_errors_become_lists_and_prose_is_kept() -> None:
    def scaled(images: list[float], *, by: float = 2.0, how: type = dict, **rest: int) -> list[float]:
        """Scale a<b by x*y; see `a<b`.

        Args:
            images: what is scaled,
                in any order.
            by, how: the factor, and its kind.

        Returns:
            As many.

        Raises:
            ValueError: none are given.

        And a last word.
        """
        return images

    assert API.signature("scaled", scaled) == (
        "scaled(images: list[float], *, by: float = 2.0, how: type = dict, **rest: int) -> list[float]"
    )
    assert API.described(scaled) == (
        "Scale a&lt;b by x\\*y; see `a<b`.\n\n**Arguments**\n\n- `images`: what is scaled, in any order.\n"
        "- `by`, `how`: the factor, and its kind.\n\n**Returns**\n\nAs many.\n\n**Raises**\n\n"
        "- `ValueError`: none are given.\n\nAnd a last word.\n"
    )


def test_long_signatures_have_a_line_for_each_argument() -> None:
    def long(first_of_all_arguments: int, second_of_all_arguments: int = 3, third_of_all_arguments: str = "") -> None:
        """Nothing."""

    assert API.signature("long", long) == (
        "long(\n    first_of_all_arguments: int,\n    second_of_all_arguments: int = 3,\n"
        "    third_of_all_arguments: str = '',\n) -> None"
    )


class Base:
    """A base."""

    def run(self) -> None:
        """Run."""

    def stop(self) -> None:
        """Stop."""


@dataclass
class Derived(Base):
    """Derived."""

    size: int = 3

    def run(self) -> None:
        """Run otherwise."""

    @cached_property
    def area(self) -> int:
        """Its area."""
        return self.size

    @classmethod
    def made(cls, size: int) -> Derived:
        """Make one."""
        return cls(size)

    def _hidden(self) -> None: ...


def test_members_exclude_inherited_ones() -> None:
    own, overridden = API.members(Derived)
    assert [name for name, _ in own] == ["area", "made"]
    assert overridden == ["run"]
    text = "\n".join(API.entry("tests", "Derived", Derived))
    assert "Derived(size: int = 3)" in text
    assert "### `Derived.made` { #tests.Derived.made }" in text
    assert "Overrides `run`." in text
    assert "```python\nDerived.area: int  # property\n```\n\nIts area." in text


def test_constants_show_their_value_and_comment() -> None:
    assert API.constant("distillkit.rng", "STATE_BYTES").startswith("STATE_BYTES = ")
    assert html.unescape(API.summary("distillkit.rng", "STATE_BYTES", 2496)).strip()


def test_quoted_names_are_links_unless_they_are_arguments() -> None:
    place = "distillkit.condense.md#distillkit.condense.embedding_means"
    assert API.linked("see `embedding_means`, `match`") == f"see [`embedding_means`]({place}), `match`"
    assert (
        API.linked("## `embedding_means`\n`embedding_means`") == f"## `embedding_means`\n[`embedding_means`]({place})"
    )
    assert API.linked("```python\n`embedding_means`\n```") == "```python\n`embedding_means`\n```"
