"""Provenance of sets and runs: seed, software versions and commit."""

from __future__ import annotations

import platform
import subprocess
from pathlib import Path
from typing import Any

import torch

VERSION = "0.1.0"
"""Version of this distribution."""

RUN_FORMAT = "distillkit.run/2"
"""Name of the format of a run's `config.json`. Files without a name do not describe the run's method."""


def provenance(generator: int | torch.Generator | None = None, **facts: Any) -> dict[str, Any]:
    """Return the provenance to store in the `info` of a new set: the seed, software versions and further facts."""
    given = {} if generator is None or isinstance(generator, torch.Generator) else {"generator": int(generator)}
    return {**given, **facts, "distillkit": VERSION, "torch": str(torch.__version__)}


def versions() -> dict[str, str]:
    """Return the versions of distillkit, PyTorch and Python, on which results may depend."""
    return {"distillkit": VERSION, "torch": str(torch.__version__), "python": platform.python_version()}


def git_commit(folder: Path | None = None) -> str | None:
    """Return the git commit of a folder, with `+` if files were changed, or None outside a repository.

    Args:
        folder: a folder in the repository. Default: the folder of this file.
    """
    where = folder or Path(__file__).parent
    try:
        commit = _git(where, "rev-parse", "--short=12", "HEAD")
        changed = _git(where, "status", "--porcelain", "--untracked-files=no")
    except (OSError, subprocess.CalledProcessError):
        return None
    return commit + ("+" if changed else "")


def _git(folder: Path, *words: str) -> str:
    return subprocess.run(
        ["git", *words], cwd=folder, capture_output=True, text=True, check=True, encoding="utf-8"
    ).stdout.strip()
