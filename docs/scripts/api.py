"""MkDocs hook: a reference page for every public package, made from its docstrings.

A name is described on one page, that of the package its code lies in, and is a link on others that offer it too. Each
says which page of the documentation shows it in use.
"""

from __future__ import annotations

import functools
import importlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from markdown.extensions.toc import slugify
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

DOCS = Path(__file__).parents[1]
sys.path[:0] = [str(DOCS.parent), str(DOCS / "scripts")]

from _entries import constant, described, kind_of, members, signature, summary  # noqa: E402

from distillkit.study import markdown_table  # noqa: E402

PACKAGES = {
    "distillkit": [
        "distillkit", "distillkit.sets", "distillkit.normalization", "distillkit.data", "distillkit.data.partition",
        "distillkit.augment", "distillkit.select", "distillkit.condense", "distillkit.generate", "distillkit.networks",
        "distillkit.losses", "distillkit.labels", "distillkit.training", "distillkit.protocols", "distillkit.evaluate",
        "distillkit.scores", "distillkit.robustness",
        "distillkit.study", "distillkit.plot", "distillkit.serialization", "distillkit.rng", "distillkit.privacy",
    ],
    "fl": ["fl", "fl.addons", "fl.filters", "fl.methods", "fl.study", "fl.secure", "fl.deploy.flower"],
    "attacks": [
        "attacks", "attacks.membership", "attacks.inversion", "attacks.audit", "attacks.transcript",
        "attacks.reporting", "attacks.metrics", "attacks.matching", "attacks.statistics",
    ],
}  # fmt: skip
"""The public packages; tests compare them with what there is."""


def names(package: str) -> list[str]:
    """Return the names that a package exports, sorted case-insensitively."""
    return sorted((n for n in importlib.import_module(package).__all__ if not n.startswith("__")), key=str.lower)


@functools.cache
def homes() -> dict[tuple[str, str], str]:
    """Map (package, name) to the package whose page describes the name: its own, or the first that exports it."""
    packages = [p for group in PACKAGES.values() for p in group]
    found: dict[tuple[str, str], str] = {}
    by_object: dict[tuple[int, str], str] = {}
    for package in packages:
        for name in names(package):
            thing = getattr(importlib.import_module(package), name)
            own = getattr(thing, "__module__", "") if not isinstance(thing, ModuleType) else thing.__name__
            fitting = [p for p in packages if name in names(p) and f"{own}.".startswith(f"{p}.")]
            home = max(fitting, key=len) if fitting else by_object.get((id(thing), name), package)
            found[package, name] = by_object.setdefault((id(thing), name), home)
    return found


def target(package: str, name: str) -> str:
    """Return the link to the description of a name, from another reference page."""
    home = homes()[package, name]
    return f"{home}.md#{home}.{name}"


@functools.cache
def _sections() -> list[tuple[str, str, str, str]]:
    """Return (page, page title, heading, text) of every section with a snippet."""
    found = []
    pages = [p for room in ("", "components", "methods") for p in sorted((DOCS / room).glob("*.md"))]
    for page in pages:
        title, heading, lines, fenced = "", "", [""], False
        for line in [*page.read_text(encoding="utf-8").splitlines(), "# "]:
            fenced ^= line.startswith("```")
            if line.startswith("#") and not fenced:
                if ">>> " in (text := "\n".join(lines)):
                    found.append((str(page.relative_to(DOCS)), title, heading, text))
                heading, lines = line.lstrip("# "), []
                title = title or heading
            lines.append(line)
    return found


def in_use(package: str, name: str) -> str:
    """Return a link to the section of the documentation that shows a name, under its own heading or in a snippet."""
    near = ("user_methods", "federation", "methods/") if package.startswith("fl") else ("components/",)
    sections = sorted(_sections(), key=lambda s: not s[0].startswith(near))
    alone, anywhere = (re.compile(rf"(?<!{before}){re.escape(name)}\b") for before in (r"[\w.]", r"\w"))
    tries = ((alone, 2), (alone, 3), (anywhere, 3))
    places = next((f for word, i in tries if (f := [s for s in sections if word.search(s[i])])), [])
    if not places:
        return ""
    page, title, heading, _ = places[0]
    anchor = "" if heading == title else f"#{slugify(re.sub('`', '', heading), '-')}"
    return f"In use: [{title}](../{page}{anchor})."


def linked(text: str) -> str:
    """Turn each public name quoted as code into a link to its description."""
    known = {package: f"{package}.md" for group in PACKAGES.values() for package in group}
    known |= {name: target(package, name) for package, name in reversed(homes()) if name not in known}

    def replaced(found: re.Match[str]) -> str:
        place = known.get(found[1].rstrip("()"))
        telling = re.search(r"[A-Z_(.]", found[1])  # a word such as `match` may be an argument
        return f"[`{found[1]}`]({place})" if place and telling else found[0]

    parts = re.split(r"(^#[^\n]*|```.*?```|^ {4,}[^\n]*|\[[^\]]*\]\([^)]*\))", text, flags=re.MULTILINE | re.DOTALL)
    return "".join(re.sub(r"(?<!`)`([\w.()]+)`(?!`)", replaced, p) if i % 2 == 0 else p for i, p in enumerate(parts))


def entry(package: str, name: str, thing: Any, level: str = "##", owner: str = "") -> Iterator[str]:
    """Return the description of one object in Markdown."""
    label = f"{owner}.{name}" if owner else name
    yield f"{level} `{label}` {{ #{package}.{label} }}\n"
    if isinstance(thing, ModuleType):
        yield described(thing)
        for inner in sorted(thing.__all__, key=str.lower):
            yield from entry(package, inner, getattr(thing, inner), f"{level}#", label)
        return
    documented = callable(thing) or isinstance(thing, (property, functools.cached_property))
    said = signature(label, thing) if documented else constant(package, name)
    if said:
        yield f"```python\n{said}\n```\n"
    yield described(thing) if documented else summary(package, name, thing)
    if not owner and (place := in_use(package, name)):
        yield f"{place}\n"
    if isinstance(thing, type):
        own, overridden = members(thing)
        for method, function in own:
            yield from entry(package, method, function, f"{level}#", label)
        if overridden:
            yield f"Overrides {', '.join(f'`{m}`' for m in overridden)}.\n"


@functools.cache
def page(package: str) -> str:
    """Return the page of a package."""
    module = importlib.import_module(package)
    own = [n for n in names(package) if homes()[package, n] == package]
    lines = [f"# {package}\n", f"{described(module)}\n", f"```python\nimport {package}\n```\n"]
    for name in own:
        lines += entry(package, name, getattr(module, name))
    if others := [n for n in names(package) if n not in own]:
        lines.append("## From here too { #also }\n")
        lines += [f"- [`{n}`]({target(package, n)}), {kind_of(getattr(module, n))}" for n in others]
    return linked("\n".join(lines))


def index() -> str:
    """Return the first page, which lists the packages and their purpose."""
    lines = ["# API\n", "Every public name with its arguments, from its docstring; what is not here is not public.\n"]
    for top, packages in PACKAGES.items():
        first = {package: described(importlib.import_module(package)).split("\n\n")[0] for package in packages}
        rows = [(f"[`{package}`]({package}.md)", words, str(len(names(package)))) for package, words in first.items()]
        lines += [f"## {top} {{ #{top} }}\n", markdown_table(("package", "for", "names"), rows, left=2), ""]
    return "\n".join(lines)


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Add the pages to the navigation under `API` (called once by mkdocs)."""
    groups = [{top: [{p: f"api/{p}.md"} for p in packages]} for top, packages in PACKAGES.items()]
    nav = config.nav or []
    config.nav = [{"API": [{"Packages": "api/index.md"}, *groups]} if item == {"API": "api/"} else item for item in nav]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages to the files of the site (called once by mkdocs)."""
    files.append(File.generated(config, "api/index.md", content=index()))
    for package in (p for group in PACKAGES.values() for p in group):
        files.append(File.generated(config, f"api/{package}.md", content=page(package)))
    return files
