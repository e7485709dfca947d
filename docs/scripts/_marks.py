"""Markers between which scripts write pages, readers of record lines, and Markdown tables."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

__all__ = ["COMMITS", "TABLE", "read", "table", "with_commits", "with_tables"]

COMMITS = re.compile(r"(<!-- commits -->).*?(<!-- end of commits -->)", re.DOTALL)
TABLE = re.compile(r"(<!-- table: (.*?) -->\n).*?(<!-- end of table -->)", re.DOTALL)


def read(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a record file; none if the file does not exist."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []


def with_commits(text: str, commits: Iterable[object]) -> str:
    """Insert each commit once between the commit markers of a page."""
    said = ", ".join(dict.fromkeys(map(str, commits)))
    return COMMITS.sub(lambda found: f"{found[1]}{said}{found[2]}", text)


def with_tables(text: str, made: Callable[[str], object]) -> str:
    """Return the page with its tables rebuilt from their markers.

    Args:
        text: of the page.
        made: gives the table that a mark asks for; None for one that another writer makes, which stays.
    """

    def anew(found: re.Match[str]) -> str:
        new = made(found[2])
        return found[0] if new is None else f"{found[1]}\n{new}\n\n{found[3]}"

    return TABLE.sub(anew, text)


def table(head: str, lines: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table with all columns but the first aligned right."""
    rule = "---|" + "---:|" * head.count("|")
    return "\n".join([f"| {head} |", f"|{rule}", *(f"| {' | '.join(line)} |" for line in lines)])
