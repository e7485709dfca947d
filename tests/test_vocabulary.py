"""Module names are no metaphors, docstring summaries no questions, and few public names are undocumented."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGES = ("distillkit", "fl", "attacks")
METAPHORS = {
    "abreast", "alike", "apart", "blame", "branch", "claims", "closeness", "deal", "delivery", "differences",
    "door", "far", "held", "judged", "known", "loaded", "memories", "modes", "opened", "owner", "perform", "places",
    "plausible", "play", "private_door", "recorded", "roster", "saying", "seam", "sources", "tally", "text",
    "twice", "where",
}  # fmt: skip
"""Module names that say nothing about the content: metaphors, adverbs, participles, questions."""
QUESTION = re.compile(r"(What|Whose|Who|Whom|How|Which|That|Where|Whether|Everything|Nothing)\b")
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
SCRIPTS = [*sorted((ROOT / "examples").rglob("*.py")), *sorted((ROOT / "docs" / "notebooks").glob("*.py"))]


@cache
def modules() -> dict[str, ast.Module]:
    """Return the syntax tree of every module by its dotted name."""
    paths = (path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py")))
    return {
        ".".join(p.relative_to(ROOT).with_suffix("").parts): ast.parse(p.read_text(encoding="utf-8")) for p in paths
    }


@cache
def documented() -> set[str]:
    """Return the words that stand as code on a page, or in an example."""
    pages = "\n".join(path.read_text(encoding="utf-8") for path in PAGES)
    code = "\n".join(re.findall(r"`[^`\n]+`|```.*?```", pages, re.DOTALL))
    return set(re.findall(r"[A-Za-z_]\w*", "\n".join([code, *(path.read_text(encoding="utf-8") for path in SCRIPTS)])))


def exported(tree: ast.Module) -> list[str]:
    """Return the names in a module's `__all__`."""
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return list(ast.literal_eval(node.value))
    return []


def test_no_module_is_named_by_a_metaphor() -> None:
    names = {name.rpartition(".")[2].strip("_") for name in modules()}
    assert not names & METAPHORS
    assert len(names) > 200


def test_at_most_two_percent_of_summaries_have_question_form() -> None:
    kinds = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    nodes = [node for tree in modules().values() for node in ast.walk(tree) if isinstance(node, kinds)]
    summaries = [text for node in nodes if (text := ast.get_docstring(node))]
    questions = [text.splitlines()[0] for text in summaries if QUESTION.match(text)]
    assert len(summaries) > 2000
    assert len(questions) <= 0.02 * len(summaries), questions


def test_at_most_forty_public_names_of_modules_are_undocumented() -> None:
    public = {m: t for m, t in modules().items() if not any(part.startswith("_") for part in m.split("."))}
    names = [f"{module}.{name}" for module, tree in public.items() for name in exported(tree)]
    undocumented = [name for name in names if name.rpartition(".")[2] not in documented()]
    assert len(names) > 300
    assert len(undocumented) <= 40, undocumented
