"""Parallel processing of groups of classes on a CPU, with one thread for each group."""

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

T = TypeVar("T")
Part = TypeVar("Part")


class ParallelMap:
    """Callable that applies a function to each part of a computation, such as a group of classes, in parallel threads.

    Create a new map whenever a `NetworkSampler` has drawn a network. The map copies the network for its threads, and
    these copies are outdated if a draw overwrites `network` in place.

    Args:
        network: the network that is passed to the applied function.
        pool: pool of threads from `class_threads`. With None, the parts are processed one after the other, with the
            same result.
    """

    def __init__(self, network: Network, pool: ThreadPoolExecutor | None = None) -> None:
        self.network, self._pool, self._networks = network, pool, [network]

    def __call__(self, function: Callable[[Network, Part], T], parts: Sequence[Part]) -> list[T]:
        """Return `function(network, part)` for each part, in order.

        Calls of `function` that run at the same time get separate copies of the network.

        Args:
            function: function of a network and a part, which is called in the pool's threads.
            parts: second arguments of the function, of any type.
        """
        if self._pool is None or len(parts) == 1:
            return [function(self.network, part) for part in parts]
        free: SimpleQueue[Network] = SimpleQueue()
        with contextlib.suppress(RuntimeError, TypeError):  # without a copy, one network serves all threads in turn
            while len(self._networks) < min(torch.get_num_threads(), len(parts)):
                self._networks.append(copy.deepcopy(self.network))
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
def class_threads(images: Tensor) -> Iterator[ThreadPoolExecutor | None]:
    """Provide threads for a `ParallelMap`, if the images are on a CPU and PyTorch has several intra-op threads.

    Processing two classes at once, with one thread each, is faster than one class at a time with two threads, because
    an operation with two threads must wait for both of them. No threads are used on a GPU, which does not benefit from
    them, and under autocast, which new threads do not inherit.

    Args:
        images: the images to process. Only their device is used.
    """
    workers = torch.get_num_threads()
    if images.device.type != "cpu" or workers == 1 or torch.is_autocast_enabled("cpu"):
        yield None
        return
    with thread_pool(workers, "class") as pool:
        yield pool
