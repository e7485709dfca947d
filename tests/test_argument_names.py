"""Consistent names of arguments: a network, a factory, a sampler, and the number of networks."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[1]
PACKAGES = ("distillkit", "attacks", "fl", "examples")
MEANS = {
    "network": r"nn\.Module|Network|ConvNet|object|Any",
    "factory": r"(Network)?Factory|Callable|Any",
    "networks": r"NetworkSampler|Networks|object",
    "num_networks": r"int",
}
"""Names of arguments and fields, with the annotations that they may have."""
DEFAULTS = {"progress": {"True"}, "callback": {"None"}, "resume": {"None"}, "generator": {"0", "None"}}
"""Defaults of arguments of public functions."""
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
    for path, found in nodes().items():
        for node in found:
            where = f"{path}:{getattr(node, 'lineno', 0)}"
            if isinstance(node, ast.arg) and node.annotation is not None:
                yield Named(where, node.arg, ast.unparse(node.annotation))
            elif isinstance(node, ast.ClassDef):
                for field in node.body:
                    if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
                        yield Named(where, field.target.id, ast.unparse(field.annotation))


@cache
def nodes() -> dict[str, list[Any]]:
    """Return the arguments and definitions of each file."""
    paths = [path for top in PACKAGES for path in sorted((ROOT / top).rglob("*.py"))]
    trees = {str(path.relative_to(ROOT)): ast.parse(path.read_text(encoding="utf-8")) for path in paths}
    kinds = ast.arg | ast.FunctionDef | ast.ClassDef
    return {path: [node for node in ast.walk(tree) if isinstance(node, kinds)] for path, tree in trees.items()}


def test_optional_arguments_have_one_default() -> None:
    found: dict[str, set[str]] = {name: set() for name in DEFAULTS}
    for node in (node for path, own in nodes().items() if not path.startswith("examples") for node in own):
        if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
            positional = [*node.args.posonlyargs, *node.args.args][::-1]
            defaults = [*zip(positional, node.args.defaults[::-1]), *zip(node.args.kwonlyargs, node.args.kw_defaults)]
            for argument, default in defaults:
                if argument.arg in DEFAULTS and default is not None:
                    found[argument.arg].add(ast.unparse(default))
    assert found == DEFAULTS


def test_options_and_results_are_frozen() -> None:
    """So that options stay as they were checked, and can be keys. The one exception adds up terms of a loss."""
    classes = [one for path, found in nodes().items() if path.startswith("distillkit") for one in found]
    made = {one.name: str([*map(ast.unparse, one.decorator_list)]) for one in classes if isinstance(one, ast.ClassDef)}
    made = {name: decorators for name, decorators in made.items() if "dataclass" in decorators}
    assert len(made) > 30
    assert [name for name, decorators in made.items() if "frozen=True" not in decorators] == ["InversionLoss"]


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
