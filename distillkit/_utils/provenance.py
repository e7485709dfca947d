"""What a made set or a run says about its making: the seed, the versions of the software, the commit."""

from __future__ import annotations

import platform
import subprocess
from pathlib import Path
from typing import Any

import torch

__all__ = ["RUN_FORMAT", "VERSION", "git_commit", "provenance", "versions"]

VERSION = "0.1.0"
"""Of this distribution."""

RUN_FORMAT = "distillkit.run/2"
"""Of the `config.json` of a run. The first had no format, and did not say how to build the run's method again."""


def provenance(generator: int | torch.Generator | None = None, **facts: Any) -> dict[str, Any]:
    """What a made set says in its `info` of its making, beside the method: the seed, and the versions of the software.

    Args:
        generator: the caller's; its seed is said if it is an integer.
        facts: further JSON values.

    The code's commit is not among them: it is the business of whoever runs from a checkout.
    """
    given = {} if generator is None or isinstance(generator, torch.Generator) else {"generator": int(generator)}
    return {**given, **facts, "distillkit": VERSION, "torch": str(torch.__version__)}


def versions() -> dict[str, str]:
    """The versions that a run's results may hang on, for its record: distillkit's, torch's and Python's."""
    return {"distillkit": VERSION, "torch": str(torch.__version__), "python": platform.python_version()}


def git_commit(folder: Path | None = None) -> str | None:
    """The commit of the working tree, with `+` if it was changed; None outside a repository.

    Args:
        folder: inside of the repository; default: where this file is.
    """

    def git(*words: str) -> str:
        where = folder or Path(__file__).parent
        return subprocess.run(["git", *words], cwd=where, capture_output=True, text=True, check=True).stdout.strip()

    try:
        commit, changed = git("rev-parse", "--short=12", "HEAD"), git("status", "--porcelain", "--untracked-files=no")
    except (OSError, subprocess.CalledProcessError):
        return None
    return commit + ("+" if changed else "")
