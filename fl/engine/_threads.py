"""Clients as threads of this process."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Self

from distillkit._utils.threads import pool_of
from fl.engine._client_runtime import Site, respond
from fl.engine._transport import Answer, Head, Letter, Riding, Tell

__all__ = ["Threads"]


class Threads:
    """A cohort of persistent threads with one intra-op thread each, which share the server's method and ledger.

    Args:
        site: what is at hand.
        workers: how many.
    """

    def __init__(self, site: Site, workers: int) -> None:
        self.site, self._window = site, 2 * workers
        self._pool = pool_of(workers, "client")

    def ask(self, head: Head, numbers: Sequence[int], tell: Tell, riding: Riding | None = None) -> Iterator[Answer]:
        """Ask the clients `numbers`, each told `head` and what `tell` writes; see `Cohort.ask`.

        At most two for each worker are under way ahead of the next yield. What is `riding` goes ahead.
        """
        if riding is not None:
            riding.go_ahead(self)
        waiting: deque[Future[Answer]] = deque()
        rest = iter(numbers)

        def fill() -> None:
            while len(waiting) < self._window and (number := next(rest, None)) is not None:
                waiting.append(self._pool.submit(self._one, head, number, tell))

        fill()
        while waiting:
            answer = waiting.popleft().result()
            fill()
            yield answer

    def _one(self, head: Head, number: int, tell: Tell) -> Answer:
        def letter() -> Letter:
            return tell(number)

        return respond(self.site, head, number, letter)

    def settle(self, versions: Mapping[int, str]) -> None:
        """Keep these `versions` of the memories; see `Cohort.settle`."""
        self.site.memories.settle(versions)

    def drop(self) -> None:
        """Delete what the failed round left in memories; see `Cohort.drop`."""
        self.site.memories.drop()

    def facts(self) -> dict[str, str]:
        """Nothing: the memories' files lie in the run's folder."""
        return {}

    def restore(self, facts: Mapping[str, str], versions: Mapping[int, str]) -> None:
        """Delete all memories but these `versions`; there are no `facts`. See `Cohort.restore`."""
        self.site.memories.cut(versions)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: Any) -> None:
        """Ask what is running to stop, wait for it, and end the threads."""
        self.site.stop.set()
        self._pool.shutdown(wait=True, cancel_futures=True)
