"""Consistent names of arguments: a network, a factory, a sampler, and the number of networks."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
PACKAGES = ("distillkit", "attacks", "fl", "examples")
MEANS = {
    "network": r"nn\.Module|Network|ConvNet|object|Any",
    "factory": r"(Network)?Factory|Callable|Any",
    "networks": r"NetworkSampler|Networks|object",
    "num_networks": r"int",
}
"""Names of arguments and fields, with the annotations that they may have."""
ROLES = ("teacher", "student", "observer")
"""Names of networks by their role."""
PARTS = ("module", "modules", "layer", "body", "main", "_")
"""Names of modules that are parts of a network."""


class Named(NamedTuple):
    """An argument or a field: its place, name and annotation."""

    where: str
    name: str
    annotation: str


@cache
def named() -> tuple[Named, ...]:
    """Return every annotated argument and field."""
    return tuple(arguments_and_fields())


def arguments_and_fields() -> Iterator[Named]:
    """Yield every annotated argument and field."""
    for path in (path for top in PACKAGES for path in sorted((ROOT / top).rglob("*.py"))):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            where = f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 0)}"
            if isinstance(node, ast.arg) and node.annotation is not None:
                yield Named(where, node.arg, ast.unparse(node.annotation))
            elif isinstance(node, ast.ClassDef):
                for field in node.body:
                    if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
                        yield Named(where, field.target.id, ast.unparse(field.annotation))


def allowed_names(annotation: str) -> tuple[str, ...]:
    """Return the names allowed for an argument with this annotation; empty for other annotations."""
    if re.search(r"\b(Network)?Factory\b", annotation):
        return ("factory", "decoder")  # an inversion creates a new decoder for every batch
    if re.search(r"\bNetworkSampler\b", annotation):
        return ("networks",)
    if re.fullmatch(r"(nn\.Module|Network|ImageNetwork)( \| (None|nn\.Module|Network))*", annotation):
        return ("network", *ROLES, *PARTS)
    return ()


def test_each_name_has_one_meaning() -> None:
    found = named()
    assert {n.name for n in found} >= set(MEANS)
    odd = [n for n in found if n.name in MEANS and not re.search(rf"\b({MEANS[n.name]})\b", n.annotation)]
    assert odd == []


def test_each_kind_of_argument_has_one_name() -> None:
    found = [n for n in named() if allowed_names(n.annotation)]
    assert len(found) > 50
    assert [n for n in found if n.name not in allowed_names(n.annotation)] == []
