"""What the writers of pages share: the marks between which they write, the lines of records, and a table."""

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
    """The lines of a file of records; none if there is no such file."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def with_commits(text: str, commits: Iterable[object]) -> str:
    """The text of a page with each of the commits once, between their marks."""
    said = ", ".join(dict.fromkeys(map(str, commits)))
    return COMMITS.sub(lambda found: f"{found[1]}{said}{found[2]}", text)


def with_tables(text: str, made: Callable[[str], object]) -> str:
    """The text of a page with its tables made anew of what their marks say.

    Args:
        text: of the page.
        made: gives the table that a mark asks for; None for one that another writer makes, which stays.
    """

    def anew(found: re.Match[str]) -> str:
        new = made(found[2])
        return found[0] if new is None else f"{found[1]}\n{new}\n\n{found[3]}"

    return TABLE.sub(anew, text)


def table(head: str, lines: Sequence[Sequence[str]]) -> str:
    """Markdown; the columns but the first at the right."""
    rule = "---|" + "---:|" * head.count("|")
    return "\n".join([f"| {head} |", f"|{rule}", *(f"| {' | '.join(line)} |" for line in lines)])
