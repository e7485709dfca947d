"""Files of the examples: atomic writing, and the current commit."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path


def write_file(path: Path, text: str) -> None:
    """Write a file atomically: completely or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.write_text(text, encoding="utf-8")
    os.replace(partial, path)


def current_commit() -> str | None:
    """Return the commit of the working tree, followed by `+` if files were changed; None outside a repository."""
    command = ["git", "describe", "--always", "--abbrev=12", "--dirty=+", "--exclude=*"]  # --exclude: without tags
    try:
        ran = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, check=True, encoding="utf-8")
    except (OSError, subprocess.CalledProcessError):
        return None
    return ran.stdout.strip()
