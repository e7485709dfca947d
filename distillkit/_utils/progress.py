"""Progress bars for long work: one at a time, only where somebody watches, silent when it is short."""

from __future__ import annotations

import multiprocessing
import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from distillkit._utils import check

__all__ = ["Bar", "bar"]

DELAY = 2.0
"""Seconds before a bar appears, so that quick calls stay silent."""

_turn = threading.Lock()


class Bar(Protocol):
    """What a `bar` block is given: the calls of a `tqdm` that components make. It may show nothing."""

    def update(self, n: float = 1) -> object:
        """Count `n` more units as done; the bar moves."""
        ...

    def set_postfix_str(self, s: str, refresh: bool = True) -> object:
        """Show a remark behind the bar, such as the loss.

        Args:
            s: the remark.
            refresh: whether it is shown at once, and not with the next `update`.
        """
        ...

    def clear(self) -> object:
        """Take the bar off the terminal until it moves again, so that something can be printed there."""
        ...


class _Silent:
    def update(self, n: float = 1) -> None:
        pass

    def set_postfix_str(self, s: str, refresh: bool = True) -> None:
        pass

    def clear(self) -> None:
        pass


@contextmanager
def bar(total: int, what: str, *, unit: str = "step", progress: bool = True, done: int = 0) -> Iterator[Bar]:
    """Show how far a loop is while the block runs; components call it around their longest loop.

    The bar appears after two seconds, on a terminal or in a notebook, and is gone when the work is done. Only the
    outermost one is shown: what a component calls inside its own bar stays silent, and so do other threads, worker
    processes, and output that goes to a file.

    Args:
        total: units of the whole loop.
        what: the words before the bar.
        unit: the name of one unit.
        progress: False for no bar, whatever the circumstances.
        done: units that an interrupted run did before.
    """
    if not check.boolean(progress, "progress") or not _watched() or not _turn.acquire(blocking=False):
        yield _Silent()
        return
    try:
        with warnings.catch_warnings():  # in a notebook without ipywidgets tqdm warns, and the bar is of letters
            warnings.filterwarnings("ignore", "IProgress not found")
            from tqdm.auto import tqdm

        with tqdm(total=total, desc=what, unit=unit, initial=done, delay=DELAY, mininterval=0.5, leave=False) as shown:
            yield shown
    finally:
        _turn.release()


def _watched() -> bool:
    """Whether this is the main thread of the main process, with a terminal or as a notebook's kernel."""
    if multiprocessing.parent_process() is not None or threading.current_thread() is not threading.main_thread():
        return False
    return "ipykernel" in sys.modules or bool(getattr(sys.stderr, "isatty", bool)())
