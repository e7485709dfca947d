"""Progress bars for long work, shown one at a time on terminals and in notebooks."""

from __future__ import annotations

import datetime
import multiprocessing
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from distillkit._utils import check

DELAY = 2.0
"""Number of seconds before a bar appears, so that quick calls show none."""

FIRST_LINE, LONGEST = 10.0, 600.0
"""Seconds before the first line of progress in a log, and the longest time between two lines. The time doubles."""

_turn = threading.Lock()


class Bar(Protocol):
    """Interface of a progress bar, with the methods of `tqdm` that this project calls."""

    def update(self, n: float = 1) -> object:
        """Advance the bar by `n` units."""
        ...

    def set_postfix_str(self, s: str, refresh: bool = True) -> object:
        """Show a text after the bar, such as the loss."""
        ...

    def clear(self) -> object:
        """Remove the bar from the terminal until its next update, so that text can be printed."""
        ...


class _Silent:
    def update(self, n: float = 1) -> None:
        pass

    def set_postfix_str(self, s: str, refresh: bool = True) -> None:
        pass

    def clear(self) -> None:
        pass


class _Lines:
    """Progress as lines on stderr, for output that goes to a file."""

    def __init__(self, total: int, description: str, unit: str, done: int) -> None:
        self.total, self.description, self.unit, self.done, self.start = total, description, unit, done, done
        self.begun, self.due, self.postfix = time.monotonic(), FIRST_LINE, ""

    def update(self, n: float = 1) -> None:
        self.done += int(n)
        passed = time.monotonic() - self.begun
        if passed >= self.due:
            self.due = passed + min(passed, LONGEST)
            print(self._line(passed), file=sys.stderr, flush=True)

    def _line(self, passed: float) -> str:
        said, worked = f"{self.description}: {self.done} {self.unit}s", self.done - self.start
        if self.total:
            said = f"{self.description}: {self.done} of {self.total} {self.unit}s ({self.done / self.total:.0%})"
        left = f", about {_clock(passed / worked * (self.total - self.done))} left" if worked and self.total else ""
        return f"{said}, {_clock(passed)} passed{left}" + (f", {self.postfix}" if self.postfix else "")

    def set_postfix_str(self, s: str, refresh: bool = True) -> None:
        self.postfix = s

    def clear(self) -> None:
        pass


def _clock(seconds: float) -> str:
    return str(datetime.timedelta(seconds=round(seconds)))


@contextmanager
def bar(total: int, description: str, *, unit: str = "step", progress: bool = True, done: int = 0) -> Iterator[Bar]:
    """Show a progress bar during a `with` block around a long loop.

    The bar appears after two seconds, on a terminal or in a notebook, and disappears at the end. If the output goes to
    a file, lines are printed instead: after 10 seconds, then at intervals that double up to 10 minutes. If calls are
    nested, only the outermost one shows progress. Other threads and worker processes show none.
    """
    if not check.boolean(progress, "progress") or not _first() or not _turn.acquire(blocking=False):
        yield _Silent()
        return
    try:
        if not _watched():
            yield _Lines(total, description, unit, done)
            return
        with warnings.catch_warnings():  # without ipywidgets, tqdm warns and draws a text bar
            warnings.filterwarnings("ignore", "IProgress not found")
            from tqdm.auto import tqdm

        with tqdm(
            total=total, desc=description, unit=unit, initial=done, delay=DELAY, mininterval=0.5, leave=False
        ) as shown:
            yield shown
    finally:
        _turn.release()


def _first() -> bool:
    """Return whether this is the main thread of the main process."""
    return multiprocessing.parent_process() is None and threading.current_thread() is threading.main_thread()


def _watched() -> bool:
    """Return whether somebody can see a bar: on a terminal or in a notebook."""
    return "ipykernel" in sys.modules or bool(getattr(sys.stderr, "isatty", bool)())
