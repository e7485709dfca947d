"""Progress bars for long work, shown one at a time on terminals and in notebooks."""

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
"""Number of seconds before a bar appears, so that quick calls show none."""

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


@contextmanager
def bar(total: int, description: str, *, unit: str = "step", progress: bool = True, done: int = 0) -> Iterator[Bar]:
    """Show a progress bar during a `with` block around a long loop.

    The bar appears after two seconds, on a terminal or in a notebook, and disappears at the end. If calls are nested,
    only the outermost bar is shown. No bar is shown outside the main thread, in worker processes, and if the output
    goes to a file.
    """
    if not check.boolean(progress, "progress") or not _watched() or not _turn.acquire(blocking=False):
        yield _Silent()
        return
    try:
        with warnings.catch_warnings():  # without ipywidgets, tqdm warns and draws a text bar
            warnings.filterwarnings("ignore", "IProgress not found")
            from tqdm.auto import tqdm

        with tqdm(
            total=total, desc=description, unit=unit, initial=done, delay=DELAY, mininterval=0.5, leave=False
        ) as shown:
            yield shown
    finally:
        _turn.release()


def _watched() -> bool:
    """Return whether a progress bar can be shown: in the main thread and process, on a terminal or in a notebook."""
    if multiprocessing.parent_process() is not None or threading.current_thread() is not threading.main_thread():
        return False
    return "ipykernel" in sys.modules or bool(getattr(sys.stderr, "isatty", bool)())
