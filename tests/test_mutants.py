"""The tool that plants mistakes: every kind is planted, and those that tests miss are reported."""

from __future__ import annotations

from pathlib import Path

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


@pytest.mark.slow
def test_survivors_are_reported_and_a_run_continues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, text in {
        "fl/__init__.py": "",
        "fl/half.py": "__all__ = ['half']\ndef half(x):\n    return x / 2 if x > 0 else 0\n",
        "tests/fl/test_half.py": "from fl.half import half\ndef test(): assert half(4) == 2 and half(-1) == 0\n",
        "tests/test_other.py": "def test(): assert False\n",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    monkeypatch.setattr(mutants, "ROOT", tmp_path)
    words = ["fl/half.py", "--count", "99", "--log", str(tmp_path / "log")]
    assert mutants.main(words) == 1
    said = capsys.readouterr().out
    assert "tests/fl/test_half.py\n" in said
    assert "  -    return x / 2 if x > 0 else 0\n  +    return x / 2 if (x >= 0) else 0" in said
    assert "6 of 9 mistakes caught" in said
    monkeypatch.setattr(mutants, "outcome", lambda *_: "survived")
    assert mutants.main(words) == 1
    assert capsys.readouterr().out == said
