"""Parallel processing of groups of classes, with one intra-op thread per group."""

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

__all__ = ["ParallelMap", "parallel_map"]

T = TypeVar("T")
Part = TypeVar("Part")


class ParallelMap:
    """Callable that maps a function over parts in parallel. The result does not depend on the number of threads.

    Args:
        pool: pool of threads with one intra-op thread each, or None to process the parts one after the other.
        workers: number of threads in the pool.
    """

    def __init__(self, pool: ThreadPoolExecutor | None, workers: int) -> None:
        self._pool, self._workers = pool, workers
        self._networks: list[Network] = []

    def set_network(self, network: Network) -> None:
        """Set the network that later calls use, with its current weights.

        The sampler may overwrite `network` when it draws the next one, so call this method again after every draw.
        """
        self._networks = [network]

    def __call__(self, function: Callable[[Network, Part], T], parts: Sequence[Part]) -> list[T]:
        """Return `function(network, part)` for each part, in order. Concurrent calls use copies of the network.

        Args:
            function: function of a network and a part, which is called in the threads.
            parts: parts of any type.
        """
        if self._pool is None or len(parts) == 1:
            return [function(self._networks[0], part) for part in parts]
        free: SimpleQueue[Network] = SimpleQueue()
        with contextlib.suppress(RuntimeError, TypeError):  # a network that cannot be copied is used in turn
            while len(self._networks) < min(self._workers, len(parts)):
                self._networks.append(copy.deepcopy(self._networks[0]))
        for network in self._networks:  # a forward pass may write to its network, as in `networks.split`
            free.put(network)

        def run(part: Part) -> T:
            network = free.get()
            try:
                return function(network, part)
            finally:
                free.put(network)

        futures = [self._pool.submit(run, part) for part in parts]
        return [future.result() for future in futures]


@contextlib.contextmanager
def parallel_map(images: Tensor) -> Iterator[ParallelMap]:
    """Yield a `ParallelMap`, which uses threads only on a CPU with several intra-op threads.

    Processing two classes at once, with one thread each, is faster than one class at a time with two threads, because
    an operation with two threads must wait for both of them. Elsewhere the map is sequential: a GPU does not benefit,
    and new threads do not inherit autocast.

    Args:
        images: the images to process.
    """
    workers = torch.get_num_threads()
    if images.device.type != "cpu" or workers == 1 or torch.is_autocast_enabled("cpu"):
        yield ParallelMap(None, 1)
        return
    with thread_pool(workers, "class") as pool:
        yield ParallelMap(pool, workers)
