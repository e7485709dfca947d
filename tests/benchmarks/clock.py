"""Cost of a piece of work: CPU and wall seconds, minor page faults and peak memory."""

from __future__ import annotations

import ctypes
import gc
import resource
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")
Cost = dict[str, float]
"""cpu and wall, in seconds; faults, a number."""

PROCESS = Path("/proc/self")


def now() -> Cost:
    """Return the clocks of this process, all threads together."""
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    return {"cpu": time.process_time(), "wall": time.perf_counter(), "faults": float(faults)}


def since(begun: Cost) -> Cost:
    """Return what was spent since then."""
    return {name: value - begun[name] for name, value in now().items()}


def cost_of(work: Callable[[], object]) -> Cost:
    """Return the cost of a call."""
    begun = now()
    work()
    return since(begun)


def with_peak(work: Callable[[], T]) -> tuple[T, float | None]:
    """Return the result of a call and the growth of peak memory in MB; None where the system does not report it.

    Memory that was freed, but that the allocator kept, is given back first, so that what ran before does not count.
    """
    gc.collect()
    try:
        ctypes.CDLL(None).malloc_trim(0)
        (PROCESS / "clear_refs").write_text("5", encoding="utf-8")  # the peak is now what the process has
        before = _megabytes("VmRSS")
    except (OSError, AttributeError):
        return work(), None
    found = work()
    return found, _megabytes("VmHWM") - before


def _megabytes(name: str) -> float:
    lines = (PROCESS / "status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:")) / 1024
