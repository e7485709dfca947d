"""Files of the examples: atomic writing, the accuracies of a run, and the current commit."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

__all__ = ["current_commit", "read_accuracies", "write_file"]


def write_file(path: Path, text: str) -> None:
    """Write a file atomically: completely or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.write_text(text, encoding="utf-8")
    os.replace(partial, path)


def read_accuracies(run: Path) -> list[float]:
    """Return the accuracies in a run's history, round by round; empty for a run without rounds."""
    path = run / "history.jsonl"
    rows = [json.loads(row) for row in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []
    return [row["accuracy"] for row in rows if row.get("accuracy") is not None]


def current_commit() -> str | None:
    """Return the commit of the working tree, followed by `+` if files were changed; None outside a repository."""

    def git(*words: str) -> str:
        return subprocess.check_output(
            ["git", *words], cwd=Path(__file__).parent, text=True, stderr=subprocess.DEVNULL, encoding="utf-8"
        )

    try:
        commit, changed = git("rev-parse", "--short=12", "HEAD"), git("status", "--porcelain", "--untracked-files=no")
    except (OSError, subprocess.CalledProcessError):
        return None
    return commit.strip() + ("+" if changed else "")
