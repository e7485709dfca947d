"""Folder of 20,000 images of 224 pixels over 100 clients: ten drawn clients train for a round, followed by a test.

`python tests/benchmarks/bench_folder.py`, or with the number of pictures. They are JPEGs of 256x256, noise on
gradients, few of them distinct; what is made lies in a temporary folder (4 GB) that is removed. Every line says the
seconds of a stage and the peak memory of the process so far.

The aim: 3 GiB at most. As floats the pictures would take 12 GB; the largest client bounds what is read at a time.
"""

from __future__ import annotations

import io
import resource
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import numpy as np
import torch

from distillkit.data import clients, open_folder, partition
from distillkit.networks import ConvNet
from fl import FedAvg, simulate

CLASSES, CLIENTS, DRAWN, SIZE = 10, 100, 10, 224


@contextmanager
def stage(name: str) -> Iterator[None]:
    """Print the time of the block, and the peak memory of the process at its end."""
    began, worked = time.perf_counter(), time.process_time()
    yield
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    seconds, worked = time.perf_counter() - began, time.process_time() - worked
    print(f"{name:<42} {seconds:7.1f} s {worked:7.1f} s CPU   peak {peak:5.2f} GiB", flush=True)


def write(folder: Path, count: int, distinct: int = 50) -> None:
    """Write `count` JPEG images of 256x256 pixels, evenly over the classes."""
    from PIL import Image

    rng = np.random.default_rng(0)
    ramp = np.linspace(0, 200, 256)
    for k in range(CLASSES):
        (folder / f"class{k}").mkdir(parents=True)
        encoded = []
        for _ in range(distinct // CLASSES):
            picture = np.add.outer(ramp * rng.random(), ramp * rng.random())[..., None] * rng.random(3)
            picture = picture + rng.normal(20 + 5 * k, 12, (256, 256, 3))
            file = io.BytesIO()
            Image.fromarray(picture.clip(0, 255).astype(np.uint8)).save(file, "JPEG", quality=85)
            encoded.append(file.getvalue())
        for i in range(k, count, CLASSES):
            (folder / f"class{k}" / f"{i:06}.jpg").write_bytes(encoded[i // CLASSES % len(encoded)])


def main(count: int) -> None:
    """Run all stages in this process."""
    with tempfile.TemporaryDirectory() as root:
        with stage(f"write {count:,} JPEGs of 256x256"):
            write(Path(root) / "pictures", count)
        with stage("open_folder: decode, resize, cache"):
            train, test = open_folder(f"{root}/pictures", size=SIZE, cache=f"{root}/cache")
        with stage("open_folder again"):
            train, test = open_folder(f"{root}/pictures", size=SIZE, cache=f"{root}/cache")
        with stage(f"partition over {CLIENTS} clients, Dirichlet(0.5)"):
            held = clients(train, partition.dirichlet(train.labels, CLIENTS, alpha=0.5, min_size=count // 2000))
        sizes = [len(data) for data in held]
        print(f"  {len(train):,} pictures, {min(sizes)} to {max(sizes)} a client; {len(test):,} to test", flush=True)
        method = FedAvg(factory=partial(ConvNet, train.shape, width=16, depth=5), epochs=1, batch=16, lr=0.01)
        with stage(f"a round of FedAvg: {DRAWN} clients, the test"):
            run = simulate(method, held, rounds=1, participation=DRAWN, test=test, out=f"{root}/run")
        [row] = run.rows
        drawn = [sizes[k] for k in row["drawn"]]
        print(f"  trained on {sum(drawn):,} pictures, {max(drawn)} of one client; failed: {row['failed']}", flush=True)
        print(f"  clients {row['client_seconds']:.1f} s CPU; accuracy {row['accuracy']:.3f}", flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 20_000)
