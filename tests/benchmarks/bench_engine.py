"""Overhead of the engine: a round of ten clients on LeNet against the bare training loops of the same clients.

Both sides train the same clients for one epoch on the same thread pool, interleaved; printed are the medians of CPU and
wall seconds and their ratios (the aim is at most 1.05 of CPU).
"""

from __future__ import annotations

import statistics
import time
from concurrent.futures import ThreadPoolExecutor

import torch

from distillkit import LabeledImages
from distillkit.networks import LeNet
from fl import FedAvg, simulate
from tests.benchmarks.plain import fedavg

CLIENTS, IMAGES, BATCH, WORKERS, REPEATS = 10, 500, 32, 2, 9


def main() -> None:
    """Print the table."""
    generator = torch.Generator().manual_seed(0)
    clients = [
        LabeledImages(
            torch.rand(IMAGES, 1, 28, 28, generator=generator),
            torch.randint(10, (IMAGES,), generator=generator),
            num_classes=10,
        )
        for _ in range(CLIENTS)
    ]
    torch.set_num_threads(torch.get_num_threads())
    pool = ThreadPoolExecutor(WORKERS, initializer=torch.set_num_threads, initargs=(1,))
    bare = fedavg(LeNet((1, 28, 28), 10), clients, lr=0.01, batch=BATCH, pool=pool)
    method = FedAvg(factory=lambda k: LeNet((1, 28, 28), k), lr=0.01, batch=BATCH)
    rows: list[tuple[float, float, float, float]] = []
    rounds: list[tuple[float, float]] = []

    def bare_round() -> tuple[float, float]:
        cpu, wall = time.process_time(), time.perf_counter()
        bare()
        return time.process_time() - cpu, time.perf_counter() - wall

    last = [time.process_time(), time.perf_counter()]

    def between(_: object) -> None:
        rounds.append((time.process_time() - last[0], time.perf_counter() - last[1]))
        rows.append((*rounds[-1], *bare_round()))
        last[:] = [time.process_time(), time.perf_counter()]

    bare_round()
    last[:] = [time.process_time(), time.perf_counter()]
    simulate(method, clients, rounds=REPEATS + 1, workers=WORKERS, on_round=between, progress=False)
    rows = rows[1:]
    names = ("engine CPU", "engine wall", "bare CPU", "bare wall")
    for name, column in zip(names, zip(*rows, strict=True), strict=True):
        print(f"{name:12s} {1e3 * statistics.median(column):8.1f} ms a round")
    for i, name in enumerate(("CPU", "wall")):
        print(f"ratio {name:5s}  {statistics.median(r[i] / r[i + 2] for r in rows):8.3f}")


if __name__ == "__main__":
    main()
