"""CPU seconds of a distribution-matching step against the straightforward implementation, with equal gradients.

    OMP_WAIT_POLICY=PASSIVE python -m tests.benchmarks dm [--real 256] [--rounds 5] [--threads 1]

Both compute loss and gradient of the same step: ConvNet-3 of width 128, 10 classes, `--real` real and 10 synthetic
images of 3x32x32 per class. The straightforward implementation runs each class's whole real batch and its synthetic
images through the network in NCHW, adds up the losses, and calls `backward` once. Its network has PyTorch's own layers.
Rounds alternate. Results are medians of the process's CPU time.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from distillkit.condense import distance_to_means, embedding_means
from distillkit.networks import ConvNet, RandomNetworks
from distillkit.rng import derive
from tests.benchmarks.plain import dm_gradient, plain

CLASSES, IPC, SHAPE = 10, 10, (3, 32, 32)


def ours(network: Any, real: list[Tensor], synthetic: Tensor) -> Tensor:
    targets = torch.cat([embedding_means(network, own, [len(own)]) for own in real])
    return distance_to_means(network, targets, synthetic, [IPC] * CLASSES)[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--real", type=int, default=256, help="real images per class")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    network = RandomNetworks(lambda: ConvNet(SHAPE, CLASSES)).draw(derive(0))
    real = [torch.randn(options.real, *SHAPE, generator=derive(0, c)) for c in range(CLASSES)]
    synthetic = torch.randn(CLASSES * IPC, *SHAPE, generator=derive(1))
    ways: dict[str, Callable[..., Tensor]] = {
        "straightforward": partial(dm_gradient, plain(network)),
        "ours": partial(ours, network),
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    gradients: dict[str, Tensor] = {}
    for _ in range(options.rounds):
        for name, way in ways.items():
            begun = time.process_time()
            gradients[name] = way(real, synthetic)
            seconds[name].append(time.process_time() - begun)
    median = {name: statistics.median(times) for name, times in seconds.items()}
    difference = (gradients["ours"] - gradients["straightforward"]).norm() / gradients["straightforward"].norm()
    for name, value in median.items():
        shown = ", ".join(f"{s:.2f}" for s in seconds[name])
        print(f"{name:<16} {value:7.3f} CPU s a step   ({shown})")
    print(f"ratio            {median['ours'] / median['straightforward']:7.3f}")
    print(f"gradient         {float(difference):.1e} relative difference")
    print(f"peak memory      {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:.0f} MiB (of both)")


if __name__ == "__main__":
    main()
