"""The engine's overhead: a round of ten clients on LeNet against the bare training loops of the same clients.

Both sides train the same clients for one epoch on the same thread pool, interleaved; printed are the medians of CPU and
wall seconds and their ratios (the aim is at most 1.15).
"""

from __future__ import annotations

import copy
import statistics
import time
from concurrent.futures import ThreadPoolExecutor

import torch
from torch.nn import functional as F

from distillkit import LabeledImages
from distillkit.networks import LeNet
from fl import FedAvg, simulate

CLIENTS, IMAGES, BATCH, WORKERS, REPEATS = 10, 500, 32, 2, 9


def bare(model: torch.nn.Module, clients: list[LabeledImages], pool: ThreadPoolExecutor) -> None:
    """What a researcher would write: copy, loop, SGD, average the weights."""

    def train(number: int) -> dict[str, torch.Tensor]:
        net, data = copy.deepcopy(model), clients[number]
        optimizer = torch.optim.SGD(net.parameters(), lr=0.01, foreach=False)
        generator = torch.Generator().manual_seed(number)
        for index in torch.randperm(len(data), generator=generator).split(BATCH):
            loss = F.cross_entropy(net(data.images.index_select(0, index)), data.labels.index_select(0, index))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        return net.state_dict()

    states = list(pool.map(train, range(len(clients))))
    mean = {n: torch.stack([s[n] for s in states]).mean(0) for n in states[0]}
    model.load_state_dict(mean)


def main() -> None:
    """Print the table."""
    generator = torch.Generator().manual_seed(0)
    clients = [
        LabeledImages(
            torch.randn(IMAGES, 1, 28, 28, generator=generator),
            torch.randint(10, (IMAGES,), generator=generator),
            num_classes=10,
        )
        for _ in range(CLIENTS)
    ]
    torch.set_num_threads(torch.get_num_threads())
    pool = ThreadPoolExecutor(WORKERS, initializer=torch.set_num_threads, initargs=(1,))
    model = LeNet((1, 28, 28), 10)
    method = FedAvg(factory=lambda k: LeNet((1, 28, 28), k), lr=0.01, batch=BATCH)
    rows: list[tuple[float, float, float, float]] = []
    rounds: list[tuple[float, float]] = []

    def bare_round() -> tuple[float, float]:
        cpu, wall = time.process_time(), time.perf_counter()
        bare(model, clients, pool)
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
