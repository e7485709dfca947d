"""The README's table of methods: every public add-on and method of `fl` with paper, card and golden test."""

from __future__ import annotations

import ast
import inspect
import re
from pathlib import Path
from typing import Any

import fl.addons
import fl.methods
from distillkit._utils.tables import Table
from fl import AddOn, ClientDP, FedAvg, Filter, Method

ROOT = Path(__file__).parents[2]
KNOWN_AS = {
    "Anchors": "FedLGD's global half", "ClientDP": "DP-FedAvg", "Condensed": "FedLGD's local half", "DPSGD": "DP-SGD",
    "FineTune": "fine-tuned FedAvg", "NaiveVHL": "naive VHL",
    "RobustMean": "median, trimmed mean and Krum",
    "PrivateFedDM": "FedDM with differential privacy", "Real": "FedDM's control",
    "SharedImage": "single shared image", "SummedFedDM": "FedDM by noised class sums",
    "SingleImage": "single shared image, as published",
}  # fmt: skip
"""What the field calls it, where that is not our name."""

CITATION = re.compile(
    r"(?P<authors>[A-Z][A-Za-z\- ]+(?: et al\.|, [A-Z][a-z]+ and [A-Z][a-z]+| and [A-Z][a-z]+)),"
    r'(?: "[^"]+",?)? \(?(?P<where>(?:[A-Z][A-Za-z]+ )?20\d\d)'
)


def public() -> dict[str, Any]:
    """Return add-ons, methods and filters by name."""
    found: dict[str, Any] = {"FedAvg": FedAvg, "ClientDP": ClientDP}
    for module in (fl.addons, fl.methods):
        found |= {name: getattr(module, name) for name in module.__all__}

    def runs(thing: Any) -> bool:
        return inspect.isclass(thing) and issubclass(thing, AddOn | Filter | Method)

    return {name: thing for name, thing in found.items() if runs(thing)}


def paper(thing: Any) -> str:
    """Return the first citation in the docstring of a class or of its base."""
    for place in inspect.getmro(thing):
        cited = CITATION.search(" ".join((place.__doc__ or "").split()))
        if cited:
            return f"{cited['authors']}, {cited['where']}"
    raise ValueError(f"the docstring of {thing.__name__} cites no paper")


def card(name: str) -> str:
    """Return the page that introduces a name: the first that names it as code."""
    word = re.compile(rf"`(?:[^`]*\W)?{name}\b[^`]*`")
    places = {
        p: word.search(p.read_text(encoding="utf-8").split("```")[0])
        for p in sorted((ROOT / "docs" / "methods").glob("*.md"))
    }
    found = [(place.start(), path) for path, place in places.items() if place]
    if not found:
        raise ValueError(f"no page of docs/methods introduces {name}")
    path = min(found)[1]
    return f"[{path.stem}](docs/methods/{path.name})"


def golden_tests() -> dict[str, Path]:
    """Map each name to the test file with a test marked `@pytest.mark.golden(name, ...)`."""
    found: dict[str, Path] = {}
    for path in sorted((ROOT / "tests" / "fl").glob("test_*.py")):
        functions = [
            node for node in ast.parse(path.read_text(encoding="utf-8")).body if isinstance(node, ast.FunctionDef)
        ]
        for mark in (m for f in functions if f.name.startswith("test_") for m in f.decorator_list):
            if isinstance(mark, ast.Call) and ast.unparse(mark.func) == "pytest.mark.golden":
                found = {ast.literal_eval(name): path for name in mark.args} | found
    return found


def composed(name: str, thing: Any) -> str:
    """Return the expression that builds a method."""
    if issubclass(thing, Filter):
        return f"`Filtered(FedAvg(), {name}())`"
    return f"`FedAvg({name}())`" if issubclass(thing, AddOn) else f"`{name}()`"


def methods_table() -> Table:
    """Return the table, one row per name. A name without citation, card or golden test is an error."""
    tests = golden_tests()
    rows = []
    for name, thing in public().items():
        if name not in tests:
            raise ValueError(f"no test of tests/fl is marked golden for {name}")
        said = f"{KNOWN_AS.get(name, name)}: {composed(name, thing)}" if name != "FedAvg" else composed(name, thing)
        test = f"[{tests[name].stem}](tests/fl/{tests[name].name})"
        rows.append((said, paper(thing), card(name), test))
    return Table(("method", "paper", "card", "golden test"), sorted(rows, key=lambda row: row[0].lower()), left=4)
