"""The tool that plants mistakes: every kind is planted, and those that tests miss are reported."""

from __future__ import annotations

import pytest

from tests import mutants

KINDS = {
    "x = 1 < y": ["x = (1 <= y)", "x = (2) < y", "x = (0) < y"],
    "x = not y": ["x = (y)"],
    "x = a and b - c": ["x = (a or b - c)", "x = a and (b + c)"],
    "x = f(a, b, k=None)": ["x = (f(b, a, k=None))", "x = (f(a, a, k=None))", "x = (f(a, b))"],
    "x = t.max(True)": ["x = (t.min(True))", "x = t.max((False))"],
    "x: 'list[1]' = .5 if y else z": ["x: 'list[1]' = (z if y else 0.5)", "x: 'list[1]' = (1.0) if y else z"],
    "def f():\n    g()\n    return -x": ["def f():\n    pass\n    return -x", "def f():\n    g()\n    return (x)"],
    "def f(x):\n    x = g(x)": ["def f(x):\n    x = x"],
    "def f():\n    for i in x:\n        i": ["def f():\n    for i in x:\n        i\n        break"],
    "def f():\n    if a:\n        b": ["def f():\n    pass"],
    "__all__ = ['a', 1]": [],
    "raise ValueError(f'{1 + 1}')": [],
}


@pytest.mark.parametrize("source", KINDS)
def test_each_kind_of_mistake_is_planted(source: str) -> None:
    assert mutants.mutants(source) == KINDS[source]
