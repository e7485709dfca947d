"""Record of test results on Flower in the file `FLOWER_RECORD`, from which `docs/scripts/tables.py` fills the page."""

from __future__ import annotations

import datetime
import json
import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from distillkit._utils.provenance import git_commit

ROOT = Path(__file__).parents[2]


def version_of(name: str) -> str | None:
    """Return the version of a package, or None if it is missing."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def commit() -> str | None:
    """Return the commit, with `+` if files other than the records of results were changed."""
    words = ["git", "status", "--porcelain", "--untracked-files=no"]
    lines = subprocess.run(
        words, cwd=ROOT, capture_output=True, text=True, check=False, encoding="utf-8"
    ).stdout.splitlines()
    found = git_commit()
    records = all(line[3:].startswith("docs/results/") for line in lines)
    return found.rstrip("+") if found and records else found


def keep(part: str, command: str, seconds: float, **found: Any) -> None:
    """Replace a part of the record; do nothing without `FLOWER_RECORD`."""
    path = os.environ.get("FLOWER_RECORD")
    if not path:
        return
    facts = {
        "command": command, "commit": commit(), "date": f"{datetime.date.today():%Y-%m-%d}",
        "flwr": version_of("flwr"), "ray": version_of("ray"), "seconds": round(seconds, 1),
    }  # fmt: skip
    record = json.loads(Path(path).read_text(encoding="utf-8")) if Path(path).exists() else {}
    Path(path).write_text(json.dumps({**record, part: {**facts, **found}}, indent=1) + "\n", encoding="utf-8")


@contextmanager
def noting(part: str) -> Iterator[dict[str, Any]]:
    """Collect the results of a test, and record them if the test passes."""
    found: dict[str, Any] = {}
    began = time.monotonic()
    yield found
    test = os.environ["PYTEST_CURRENT_TEST"].split(" ")[0]
    keep(part, f"python -m pytest {test}", time.monotonic() - began, **found)
