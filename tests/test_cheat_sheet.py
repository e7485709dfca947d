"""The cheat sheet lists every public name once; what all public names have in common."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import re
from pathlib import Path

import fl
from tests.scripts import load_script

ROOT = Path(__file__).parents[1]
API = load_script("docs/scripts/api.py")


def listed() -> list[tuple[str, str]]:
    """Return (package, name) of every entry of the page."""
    found: list[tuple[str, str]] = []
    package = ""
    for line in (ROOT / "docs" / "cheat_sheet.md").read_text(encoding="utf-8").splitlines():
        if heading := re.fullmatch(r"### `([\w.]+)`", line):
            package = heading[1]
        elif line.startswith("- "):
            found += [(package, name) for name in re.findall(r"`(\w+)`", line.partition(":")[0])]
    return found


def test_cheat_sheet_lists_all_public_names_and_nothing_else() -> None:
    assert len(set(listed())) == len(listed())
    assert sorted(set(listed())) == sorted({(home, name) for (_, name), home in API.homes().items()})


PUBLIC = [getattr(importlib.import_module(home), name) for (_, name), home in API.homes().items()]


def test_public_options_and_results_cannot_be_changed() -> None:
    """The methods and participants of federated runs have states."""
    kinds = [k for k in PUBLIC if isinstance(k, type) and dataclasses.is_dataclass(k)]
    mutable = [k for k in kinds if not k.__dataclass_params__.frozen]  # type: ignore[attr-defined]
    assert len(kinds) > 100
    assert not [k for k in mutable if not issubclass(k, (fl.Method, fl.Client, fl.Server))]


def test_long_work_shows_its_progress_by_default() -> None:
    functions = [f for f in PUBLIC if inspect.isfunction(f) and "progress" in inspect.signature(f).parameters]
    assert len(functions) > 20
    assert not [f for f in functions if inspect.signature(f).parameters["progress"].default is not True]


def test_repeated_calls_give_equal_results_by_default() -> None:
    """Every default seed is 0; only a secret and a repetition draw a new one or use the run's."""
    seeds = [
        (f.__name__, p.default)
        for f in PUBLIC
        if inspect.isfunction(f) or (isinstance(f, type) and not issubclass(f, BaseException))
        for name, p in inspect.signature(f).parameters.items()
        if name in ("generator", "seed") and p.default is not p.empty
    ]
    assert len(seeds) > 40
    assert {seed for seed in seeds if seed[1] != 0} <= {("Secret", None), ("repeat", None)}
