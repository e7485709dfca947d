"""Files of the examples: atomic writing, and the current commit."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

__all__ = ["current_commit", "write_file"]


def write_file(path: Path, text: str) -> None:
    """Write a file atomically: completely or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.write_text(text, encoding="utf-8")
    os.replace(partial, path)


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
