"""Run the tutorial's code as one file and write its output into docs/tutorial.md, below the statements.

    python docs/scripts/tutorial.py

The page's statements, pasted one below the other into an empty file in an empty folder, are what is run; so is the test
of the page.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from doctest import DocTestParser, Example
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "tutorial.md"
_NEXT = "\x1e"
"""Printed after each statement, so that what it printed can be told from what the next one did."""


def statements(page: Path = PAGE) -> list[Example]:
    """Return the statements of the page with the output that follows each."""
    return DocTestParser().get_examples(page.read_text(encoding="utf-8"))


def walked(folder: Path, page: Path = PAGE) -> tuple[list[str], str]:
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
    """Return the page with the output below each statement; empty lines as doctest writes them."""
    parser, parts, outputs = DocTestParser(), [], iter(printed)
    for block in re.split(r"(```python\n.*?```)", page, flags=re.DOTALL):
        examples = parser.get_examples(block) if block.startswith("```python\n>>> ") else []
        if not examples:
            parts.append(block)
            continue
        lines = []
        for one in examples:
            first, *rest = one.source.rstrip("\n").split("\n")
            lines += [f">>> {first}", *(f"... {line}".rstrip() for line in rest)]
            lines += [line or "<BLANKLINE>" for line in next(outputs).rstrip("\n").splitlines()]
        parts.append("```python\n" + "\n".join(lines) + "\n\n```")
    return "".join(parts)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as empty:
        said, _ = walked(Path(empty))
    PAGE.write_text(filled(PAGE.read_text(encoding="utf-8"), said), encoding="utf-8")
