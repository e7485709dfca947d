"""The page on the threat model names tests that exist, and no file of data is unpickled."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
BETWEEN_OWN_PROCESSES = {"attacks/membership/_workers.py"}
"""Modules that pickle arguments for processes that they have started themselves."""


def test_named_tests_exist() -> None:
    page = (ROOT / "docs/threat_model.md").read_text(encoding="utf-8")
    rows = [line.split("|")[1:3] for line in page.splitlines() if line.startswith("| ") and "| tests |" not in line]
    assert len(rows) > 20
    for promise, tests in rows:
        named = re.findall(r"`(tests/[^`]+)`", tests)
        assert named, f"no test is named for: {promise}"
        assert [name for name in named if not (ROOT / name).is_file()] == [], promise


def test_no_file_of_data_is_unpickled() -> None:
    found, loads = set(), 0
    for package in ("distillkit", "fl", "attacks"):
        for path in (ROOT / package).rglob("*.py"):
            tree = ast.parse(path.read_bytes())
            for node in ast.walk(tree):
                names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
                names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
                if {"pickle", "cloudpickle", "dill", "joblib", "shelve"} & {n.split(".")[0] for n in names}:
                    found.add(str(path.relative_to(ROOT)))
                called = node.func if isinstance(node, ast.Call) else None
                if not isinstance(called, ast.Attribute) or called.attr != "load":
                    continue
                if ast.unparse(called) in ("torch.load", "np.load", "numpy.load"):
                    options = {k.arg: getattr(k.value, "value", None) for k in node.keywords}
                    assert options.get("weights_only") is True or options.get("allow_pickle") is False, path
                    loads += 1
    assert found == BETWEEN_OWN_PROCESSES
    assert loads >= 3
