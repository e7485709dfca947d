"""Parts of a reference page: signatures and docstrings of Python objects in Markdown."""

from __future__ import annotations

import ast
import dataclasses
import functools
import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

__all__ = ["constant", "described", "kind_of", "members", "signature", "summary"]

SECTION = re.compile(r"^(Args|Returns|Raises|Yields|Attributes):$", re.MULTILINE)
ITEM = re.compile(r"^ {4}(?! )(\*{0,2}[\w.]+(?:, \*{0,2}[\w.]+)*): ", re.MULTILINE)
TITLES = {"Args": "Arguments", "Returns": "Returns", "Raises": "Raises", "Yields": "Yields", "Attributes": "Attributes"}
WIDTH = 100


def plain(text: str) -> str:
    """Escape docstring prose for Markdown, so that comparisons are not tags and products not emphasis."""
    parts = re.split(r"(`[^`]*`|^ {4,}.*$)", text, flags=re.MULTILINE)
    return "".join(p if i % 2 else re.sub(r"(?<=\w)\*(?=\w)", r"\\*", re.sub(r"<(?=[\w/])", "&lt;", p))
                   for i, p in enumerate(parts))  # fmt: skip


def items(text: str) -> str:
    """Format the entries `name: words` of a section as a list."""
    parts = ITEM.split(f"\n{text}")
    if len(parts) == 1:
        return plain(inspect.cleandoc(text))
    lines = [plain(inspect.cleandoc(parts[0]))] if parts[0].strip() else []
    for name, words in zip(parts[1::2], parts[2::2]):
        said = plain(" ".join(words.split())) if "\n\n" not in words.strip() else plain(inspect.cleandoc(words))
        quoted = ", ".join(f"`{n}`" for n in name.split(", "))
        lines.append(f"- {quoted}: {said}")
    return "\n".join(lines)


def described(thing: Any) -> str:
    """Return the docstring of an object in Markdown: prose, then arguments, results and errors."""
    text = inspect.getdoc(thing) or ""
    first, *sections = SECTION.split(text)
    blocks = [plain(first.strip())]
    for title, body in zip(sections[::2], sections[1::2]):
        inside = re.match(r"(?:\n(?: {4}.*)?)*(?=\n\S|\Z)", body)
        cut = inside.end() if inside else len(body)
        blocks += [f"**{TITLES[title]}**", items(body[:cut].strip("\n")), plain(body[cut:].strip())]
    return "\n\n".join(b for b in blocks if b) + "\n"


def _default(value: Any) -> str:
    """Format a default value; an object without a name is an ellipsis."""
    if inspect.isfunction(value) or inspect.isclass(value):
        return str(value.__name__)
    said = repr(value)
    return "..." if "<" in said or " at 0x" in said else said


def _note(annotation: Any) -> str:
    return annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)


def _parameters(found: inspect.Signature) -> Iterator[str]:
    kinds, starred = inspect.Parameter, False
    for name, one in found.parameters.items():
        if name in ("self", "cls") or name.startswith("_"):
            continue
        if one.kind is kinds.KEYWORD_ONLY and not starred:
            starred = True
            yield "*"
        starred |= one.kind is kinds.VAR_POSITIONAL
        mark = {kinds.VAR_POSITIONAL: "*", kinds.VAR_KEYWORD: "**"}.get(one.kind, "")
        said = f"{mark}{name}" + (f": {_note(one.annotation)}" if one.annotation is not one.empty else "")
        if one.default is not one.empty:
            said += f" = {_default(one.default)}" if ":" in said else f"={_default(one.default)}"
        yield said


def signature(label: str, thing: Any) -> str:
    """Format a signature on one line or one line per argument, or a property's type; "" for other objects."""
    if isinstance(thing, (property, functools.cached_property)):
        getter = thing.fget if isinstance(thing, property) else thing.func
        return f"{label}: {_note(inspect.signature(getter).return_annotation)}  # property"
    if getattr(thing, "_is_protocol", False):
        return ""
    try:
        found = inspect.signature(thing)
    except (TypeError, ValueError):
        return ""
    known = not isinstance(thing, type) and found.return_annotation is not found.empty
    after = f" -> {_note(found.return_annotation)}" if known else ""
    parameters = list(_parameters(found))
    if isinstance(thing, type) and parameters == ["*args: Any", "**options: Any"]:
        return ""  # of a base that users write subclasses of
    line = f"{label}({', '.join(parameters)}){after}"
    if len(line) <= WIDTH:
        return line
    return f"{label}(\n" + "".join(f"    {p},\n" for p in parameters) + f"){after}"


def members(cls: type) -> tuple[list[tuple[str, Any]], list[str]]:
    """Return the public methods and properties that a class adds, and the names of those it overrides."""
    own, overridden = [], []
    fields = {f.name for f in dataclasses.fields(cls)} if dataclasses.is_dataclass(cls) else set()
    for name, member in vars(cls).items():
        function = getattr(member, "__func__", member)
        if (name.startswith("_") and name != "__call__") or name in fields:
            continue
        if not (inspect.isfunction(function) or isinstance(function, (property, functools.cached_property))):
            continue
        if any(name in vars(base) for base in cls.__mro__[1:]):
            overridden.append(name)
        else:
            own.append((name, function))
    return own, overridden


def _assigned(module: str, name: str) -> tuple[str, str]:
    """Return source and docstring of a name that a module assigns or imports from a module that does."""
    path = importlib.import_module(module).__file__
    body = ast.parse(Path(path or "").read_text(encoding="utf-8")).body
    for node, after in zip(body, [*body[1:], None]):
        if isinstance(node, ast.ImportFrom) and node.module and name in [a.asname or a.name for a in node.names]:
            return _assigned(node.module, next(a.name for a in node.names if name == (a.asname or a.name)))
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        if any(isinstance(t, ast.Name) and t.id == name for t in targets):
            said = after.value.value if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant) else ""
            return ast.unparse(node), inspect.cleandoc(said) if isinstance(said, str) else ""
    return "", ""


def constant(package: str, name: str) -> str:
    """Format a value if it is short."""
    source = _assigned(package, name)[0]
    return source if len(source) <= 2 * WIDTH else ""


def summary(package: str, name: str, thing: Any) -> str:
    """Return the docstring below a value."""
    said = _assigned(package, name)[1] or described(thing)
    return f"{plain(said)}\n"


def kind_of(thing: Any) -> str:
    """Return the kind of an object in one word."""
    if isinstance(thing, ModuleType):
        return "a module"
    if isinstance(thing, type):
        return "an error" if issubclass(thing, Exception) else "a class"
    return "a function" if inspect.isfunction(thing) else "a value"
