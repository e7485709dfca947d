"""Record of the duration and outcome of a Makefile target, with `FLOWER_RECORD`."""

from __future__ import annotations

import os
import time
from typing import Any

from tests.flower_real.record import keep

BEGAN = time.monotonic()


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Record the numbers of passed, failed and skipped tests."""
    target = os.environ.get("FLOWER_TARGET")
    if target:
        counts = {word: len(terminalreporter.stats.get(word, ())) for word in ("passed", "failed", "error", "skipped")}
        said = ", ".join(f"{count} {word}" for word, count in counts.items() if count)
        keep(target, f"make {target}", time.monotonic() - BEGAN, tests=said)
