"""Lower bound set by convolutions: those of a pass, recorded while it runs and then run alone."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from distillkit._utils.threads import thread_pool
from tests.benchmarks.clock import Cost, now, since

ATEN = torch.ops.aten
MOST = 16
"""How often a convolution is done to be timed; one that a pass does more often counts so many times more."""

Said = tuple[Any, ...]


class Convolutions(TorchDispatchMode):
    """Recorder of every convolution in its `with` block, forward and backward: sizes, strides and counts.

    It sees the thread that it is entered in, so work on several threads is to be done on one meanwhile. While
    `counting` is false it counts nothing.
    """

    def __init__(self) -> None:
        super().__init__()
        self.counts: dict[Said, int] = {}
        self.counting = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.counting and func in (ATEN.convolution.default, ATEN.convolution_backward.default):
            call = (func, *map(_said, args), *(map(_said, (kwargs or {}).values())))
            self.counts[call] = self.counts.get(call, 0) + 1
        return func(*args, **(kwargs or {}))

    def alone(self, workers: int) -> Callable[[], Cost]:
        """Prepare the recorded convolutions alone on tensors of these sizes; return a function that measures a pass.

        Args:
            workers: threads of one intra-op thread each, side by side; 1 for this thread as it is.
        """
        calls = [(call[0], [_made(said) for said in call[1:]], count) for call, count in self.counts.items()]
        for func, args, _ in calls:
            func(*args)

        def cost() -> Cost:
            total = {"cpu": 0.0, "wall": 0.0, "faults": 0.0}
            with thread_pool(workers, "limit") as pool:
                for func, args, count in calls:
                    times = min(MOST, -(-count // workers))
                    spent = _together(pool, workers, lambda f=func, a=args, n=times: _repeat(f, a, n))
                    for name, value in spent.items():
                        total[name] += value * count / (times * workers)
            return total

        return cost


def _repeat(func: Any, args: list[Any], times: int) -> None:
    for _ in range(times):
        func(*args)


def _together(pool: ThreadPoolExecutor, workers: int, work: Callable[[], None]) -> Cost:
    """Measure the work run by all workers at the same time."""
    if workers == 1:
        begun = now()
        work()
        return since(begun)
    ready = threading.Barrier(workers + 1)

    def one() -> None:
        ready.wait()
        work()

    futures = [pool.submit(one) for _ in range(workers)]
    ready.wait()
    begun = now()
    for future in futures:
        future.result()
    return since(begun)


def _said(value: Any) -> Any:
    if isinstance(value, Tensor):
        return "tensor", tuple(value.shape), value.stride(), value.dtype
    return tuple(value) if isinstance(value, list) else value


def _made(said: Any) -> Any:
    if isinstance(said, tuple) and said and said[0] == "tensor":
        _, shape, stride, dtype = said
        room = 1 + sum((n - 1) * s for n, s in zip(shape, stride))
        return torch.randn(room, dtype=dtype, generator=torch.Generator().manual_seed(0)).as_strided(shape, stride)
    return list(said) if isinstance(said, tuple) else said
