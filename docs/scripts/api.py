"""MkDocs hook: a page for every public package, whose names mkdocstrings describes from their docstrings.

A name is described on one page, that of the package its code lies in, and is a link on others that offer it too. Each
says which page of the documentation shows it in use.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from griffe import Extension, Object
from markdown.extensions.toc import slugify
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

DOCS = Path(__file__).parents[1]
sys.path.insert(0, str(DOCS.parent))

from distillkit.study import markdown_table  # noqa: E402

PACKAGES = {
    "distillkit": [
        "distillkit", "distillkit.sets", "distillkit.normalization", "distillkit.data", "distillkit.data.partition",
        "distillkit.augment", "distillkit.select", "distillkit.condense", "distillkit.generate", "distillkit.networks",
        "distillkit.losses", "distillkit.labels", "distillkit.training", "distillkit.protocols", "distillkit.evaluate",
        "distillkit.scores", "distillkit.robustness", "distillkit.distributed",
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


def path(package: str, name: str) -> str:
    """Return the path, and so the anchor, of a description: for a function of its module's name, the module's."""
    module = getattr(getattr(importlib.import_module(package), name), "__module__", "")
    return f"{module if module.endswith(f'.{name}') else homes()[package, name]}.{name}"


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


@functools.cache
def _anchors() -> dict[str, str]:
    """Map each package and public name to the anchor of its description."""
    described = {name: path(package, name) for package, name in reversed(homes())}
    return described | {package: package for group in PACKAGES.values() for package in group}


def linked(text: str) -> str:
    """Turn each public name quoted as code into a link to its description."""

    def replaced(found: re.Match[str]) -> str:
        anchor = _anchors().get(found[1].rstrip("()"))
        telling = re.search(r"[A-Z_(.]", found[1])  # a word such as `match` may be an argument
        return f"[`{found[1]}`][{anchor}]" if anchor and telling else found[0]

    return re.sub(r"(?<![`\[])`([\w.()]+)`(?!`)", replaced, text)


class LinkedNames(Extension):
    """Extension of griffe, which reads the docstrings: public names that they quote become links."""

    def on_object(self, *, obj: Object, **_: Any) -> None:
        """Change a docstring (called by griffe once per object)."""
        if obj.docstring:
            obj.docstring.value = linked(obj.docstring.value)


def own(package: str) -> list[str]:
    """Return the names that the package's page describes; a module may have a page of its own."""
    pages = [p for group in PACKAGES.values() for p in group]
    return [n for n in names(package) if homes()[package, n] == package and f"{package}.{n}" not in pages]


@functools.cache
def page(package: str) -> str:
    """Return the page of a package, in which mkdocstrings replaces each line that begins with `:::`."""
    options = "options: {heading_level: 1, members: false, show_root_full_path: true}"
    lines = [f"::: {package}\n    {options}\n", f"```python\nimport {package}\n```\n"]
    for name in own(package):
        lines.append(f"::: {path(package, name)}\n")
        if place := in_use(package, name):
            lines.append(f"{place}\n")
    if others := [n for n in names(package) if n not in own(package)]:
        lines.append("## From here too { #also }\n")
        lines += [f"- [`{n}`][{path(package, n)}]" for n in others]
    return "\n".join(lines)


def index() -> str:
    """Return the first page, which lists the packages and their purpose."""
    lines = ["# API\n", "Every public name with its arguments, from its docstring; what is not here is not public.\n"]
    for top, packages in PACKAGES.items():
        first = {p: (inspect.getdoc(importlib.import_module(p)) or "").split("\n\n")[0] for p in packages}
        rows = [(f"[`{package}`]({package}.md)", words, str(len(names(package)))) for package, words in first.items()]
        lines += [f"## {top} {{ #{top}-packages }}\n", markdown_table(("package", "for", "names"), rows, left=2), ""]
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


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Let the search show guides and components before methods, results and names."""
    if page.file.src_uri.startswith(("api/", "methods/", "results/")):
        page.meta["search"] = {"boost": 0.5}
    return markdown
