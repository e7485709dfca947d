"""Run the tutorial's code as one file and write its output into docs/tutorial.md, below the statements.

    python docs/scripts/tutorial.py

The page's statements, pasted one below the other into an empty file in an empty folder, are what is run; so is the test
of the page.
"""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "tutorial.md"
_BLOCK = re.compile(r"```python\n(.*?)```", re.DOTALL)
_NEXT = "\x1e"
"""Printed after each statement, so that what it printed can be told from what the next one did."""


@dataclass(frozen=True)
class Statement:
    """A statement of the page, and what it prints, which follows it there as a comment."""

    source: str
    want: str


def statements(page: str) -> list[Statement]:
    """Return the statements of a page, or of a part of it."""
    return [one for block in _BLOCK.findall(page) for one in _split(block)]


def _split(block: str) -> list[Statement]:
    lines, found = block.splitlines(), []
    nodes = ast.parse(block).body
    starts = [min(one.lineno for one in (node, *getattr(node, "decorator_list", ()))) - 1 for node in nodes]
    for node, start, end in zip(nodes, starts, [*starts[1:], len(lines)]):
        stop = int(node.end_lineno or 0)
        printed = [line.removeprefix("#").removeprefix(" ") for line in lines[stop:end] if line.startswith("#")]
        found.append(Statement("\n".join(lines[start:stop]) + "\n", "".join(f"{line}\n" for line in printed)))
    return found


def walked(folder: Path, page: str) -> tuple[list[str], str]:
    """Run all statements as `walk.py` in an empty folder; return the output of each, and stderr.

    Raises:
        RuntimeError: the file ended with an error, which is the message.
    """
    source = "".join(f"{one.source}print({_NEXT!r})\n" for one in statements(page))
    (folder / "walk.py").write_text(source, encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PYTHONIOENCODING": "utf-8"}
    ran = subprocess.run(
        [sys.executable, "walk.py"], cwd=folder, env=environment, capture_output=True, encoding="utf-8"
    )
    if ran.returncode:
        raise RuntimeError(ran.stderr)
    return [printed.lstrip("\n") for printed in ran.stdout.split(_NEXT)[:-1]], ran.stderr


def filled(page: str, printed: list[str]) -> str:
    """Return the page with the output below each statement."""
    outputs = iter(printed)

    def block(found: re.Match[str]) -> str:
        lines, parts, last = found[1].splitlines(), list[str](), 0
        for one in _split(found[1]):
            source = one.source.rstrip("\n").splitlines()
            start = next(i for i in range(last, len(lines)) if lines[i : i + len(source)] == source)
            parts += [line for line in lines[last:start] if not line.startswith("#")] + source
            parts += [f"# {line}".rstrip() for line in next(outputs).rstrip("\n").splitlines()]
            last = start + len(source)
        return "```python\n" + "\n".join(parts) + "\n```"

    return _BLOCK.sub(block, page)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as empty:
        said, _ = walked(Path(empty), PAGE.read_text(encoding="utf-8"))
    PAGE.write_text(filled(PAGE.read_text(encoding="utf-8"), said), encoding="utf-8")
