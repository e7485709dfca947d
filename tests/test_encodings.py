"""Every text file and every output of a command is read and written with a stated encoding, not with the locale's."""

from __future__ import annotations

import ast
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
COMMANDS = ("run", "Popen", "check_output")
OTHER_OPENERS = ("Image", "tarfile", "zipfile", "os", "io")
"""Modules whose function `open` does not open a text file."""


def without_encoding(tree: ast.AST) -> Iterator[int]:
    """Yield the line of every call that opens a text file, or reads a command's output, with no encoding."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        called, named = ast.unparse(node.func), {k.arg: k.value for k in node.keywords}
        owner, _, name = called.rpartition(".")
        if "encoding" in named or None in named:
            continue
        if (name == "read_text" and not node.args) or (name == "write_text" and len(node.args) == 1):
            yield node.lineno
        elif (name == "open" and owner not in OTHER_OPENERS) or name == "fdopen":
            position = 0 if owner and name == "open" else 1
            mode = named.get("mode") or (node.args[position] if len(node.args) > position else ast.Constant("r"))
            if isinstance(mode, ast.Constant) and isinstance(mode.value, str) and "b" not in mode.value:
                yield node.lineno
        elif name in COMMANDS and any(
            getattr(named.get(k), "value", False) is True for k in ("text", "universal_newlines")
        ):
            yield node.lineno


def test_every_text_file_has_a_stated_encoding() -> None:
    listed = subprocess.run(["git", "ls-files", "-z", "*.py"], cwd=ROOT, capture_output=True, check=True).stdout
    paths = [Path(name) for name in listed.decode("utf-8").split("\0") if name]
    if not paths:
        pytest.fail("no tracked file was found")
    found = {p: list(without_encoding(ast.parse((ROOT / p).read_bytes()))) for p in paths if (ROOT / p).exists()}
    assert {str(p): lines for p, lines in found.items() if lines} == {}


@pytest.mark.parametrize(
    "code",
    ["open(p)", "open(p, 'a')", "p.open()", "p.open('w')", "p.read_text()", "p.write_text(s)", "os.fdopen(n, 'w')",
     "subprocess.run(c, text=True)"],
)  # fmt: skip
def test_calls_without_an_encoding_are_found(code: str) -> None:
    assert list(without_encoding(ast.parse(code))) == [1]


@pytest.mark.parametrize(
    "code",
    ["open(p, 'rb')", "p.open('ab')", "p.read_bytes()", "p.read_text('utf-8')", "p.write_text(s, encoding='utf-8')",
     "Image.open(p)", "subprocess.run(c)", "os.fdopen(n, 'wb')"],
)  # fmt: skip
def test_other_calls_are_not_found(code: str) -> None:
    assert list(without_encoding(ast.parse(code))) == []
