"""Distribution matching at 32 px: two processes of one thread, compared with one process of two threads.

    python -m tests.benchmarks distributed [--steps 20] [--repeats 5]

Prints the wall seconds of each repetition, in turn, and the ratio of the medians: above 1, two processes are faster.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

import torch

from distillkit import LabeledImages, Normalization
from distillkit.condense import distribution_matching
from distillkit.distributed import over_classes
from distillkit.networks import ConvNet
from distillkit.networks.samplers import RandomNetworks


def work(rank: int, size: int, store: str, steps: int) -> None:
    """Condense ten classes of 256 images as one of `size` processes, and print the seconds of the second call."""
    torch.set_num_threads(2 // size)
    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
    images = torch.randn(2560, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    real = LabeledImages(images, torch.arange(2560) % 10, num_classes=10, normalization=Normalization((0.5,), (0.25,)))
    networks = RandomNetworks(partial(ConvNet, (3, 32, 32), 10))
    condense = partial(distribution_matching, real, networks=networks, ipc=10, lr=1.0, progress=False)
    over_classes(partial(condense, steps=1), range(10))
    began = time.perf_counter()
    over_classes(partial(condense, steps=steps), range(10))
    print(time.perf_counter() - began)


def measured(size: int, steps: int) -> float:
    """Return the wall seconds of the slowest of `size` processes."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "tests.benchmarks.bench_distributed", "--steps", str(steps), "--place"]
        places = [f"{rank},{size},{Path(folder) / 'store'}" for rank in range(size)]
        started = [subprocess.Popen([*command, place], stdout=subprocess.PIPE, text=True) for place in places]
        return max(float(process.communicate()[0]) for process in started)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--place", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.place:
        rank, size, store = options.place.split(",")
        work(int(rank), int(size), store, options.steps)
    else:
        found: dict[int, list[float]] = {1: [], 2: []}
        for _ in range(options.repeats):
            for size, seconds in found.items():
                seconds.append(measured(size, options.steps))
                print(f"{size} processes: {seconds[-1]:.2f} s (load {os.getloadavg()[0]:.1f})", flush=True)
        print(f"ratio {statistics.median(found[1]) / statistics.median(found[2]):.3f}")
