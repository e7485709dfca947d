"""Groups of classes side by side: as many at once as there are intra-op threads, each on one of them."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from typing import TypeVar

import torch
from torch import Tensor

from distillkit._utils.threads import thread_pool
from distillkit.networks._base import Network

__all__ = ["Abreast", "abreast"]

T = TypeVar("T")
Part = TypeVar("Part")


class Abreast:
    """Does the same for many parts, several at once; what comes out does not depend on how many.

    Args:
        pool: threads of one intra-op thread each, or None for one part after the other.
        workers: how many threads.
    """

    def __init__(self, pool: ThreadPoolExecutor | None, workers: int) -> None:
        self._pool, self._workers = pool, workers
        self._networks: list[Network] = []

    def see(self, network: Network) -> None:
        """From now on parts go through this network, as it is now. A draw may overwrite the one before it.

        Args:
            network: the step's.
        """
        self._networks = [network]

    def __call__(self, work: Callable[[Network, Part], T], parts: Sequence[Part]) -> list[T]:
        """`work(network, part)` of each part, in their order. No two at once have the same network, but copies of it.

        Args:
            work: called in the threads.
            parts: of any kind.
        """
        if self._pool is None or len(parts) == 1:
            return [work(self._networks[0], part) for part in parts]
        free: SimpleQueue[Network] = SimpleQueue()
        with contextlib.suppress(RuntimeError, TypeError):  # one that keeps a graph, or a lock, has no copy: take turns
            while len(self._networks) < min(self._workers, len(parts)):
                self._networks.append(copy.deepcopy(self._networks[0]))
        for network in self._networks:  # a forward pass may write on its network, as that of `networks.split` does
            free.put(network)

        def one(part: Part) -> T:
            own = free.get()
            try:
                return work(own, part)
            finally:
                free.put(own)

        futures = [self._pool.submit(one, part) for part in parts]
        return [future.result() for future in futures]


@contextlib.contextmanager
def abreast(images: Tensor) -> Iterator[Abreast]:
    """What does parts of a step side by side: on a CPU with several intra-op threads, else one after the other.

    Two threads that work on a class each are faster than one class at a time on two threads, whose every operation
    waits for both. On a GPU there is nothing to gain, and autocast is not inherited by threads: one after the other.

    Args:
        images: what is worked on.
    """
    workers = torch.get_num_threads()
    if images.device.type != "cpu" or workers == 1 or torch.is_autocast_enabled("cpu"):
        yield Abreast(None, 1)
        return
    with thread_pool(workers, "class") as pool:
        yield Abreast(pool, workers)
