"""Atomic writing of the examples' files."""

from __future__ import annotations

import os
from pathlib import Path


def write_file(path: Path, text: str) -> None:
    """Write a file atomically: completely or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.write_text(text, encoding="utf-8")
    os.replace(partial, path)
