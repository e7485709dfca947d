"""CPU seconds and peak memory of a private step, against the step without privacy and against Opacus.

    OMP_WAIT_POLICY=PASSIVE python tests/benchmarks/bench_privacy.py [--width 64] [--batch 32] [--rounds 3]

One step: ConvNet-3, 10 classes of 3x32x32, 10 synthetic images each, embeddings matched.

* dm step: distribution matching without privacy, `--batch` real images per class. dm fit: its synthetic half alone.
* class_means: the same half on released class means (unit vectors about a public centre).
* image_sgd: `--batch` real images in all, each one's gradient of the synthetic images, clipped, summed and noised.
* functorch: the same by Opacus' GradSampleModule on a module whose parameter is the synthetic set, in functorch mode.

Every way runs in a process of its own, so that its peak memory is its own; CPU time of the process, medians.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn

from distillkit.condense import distance_to_means, embedding_means
from distillkit.networks import ConvNet, RandomNetworks, build
from distillkit.privacy import (
    PrivateGradient,
    PublicEmbedder,
    PublicEmbedders,
    Secret,
    class_means_gradient,
    image_gradients,
)
from distillkit.rng import derive
from distillkit.sets import LabeledImages

CLASSES, IPC, SHAPE = 10, 10, (3, 32, 32)
Step = Callable[[], object]


def data(count: int) -> tuple[Tensor, Tensor]:
    return torch.rand(count, *SHAPE, generator=derive(0, count)), torch.arange(count) % CLASSES


def dm_fit(width: int, batch: int) -> Step:
    network = RandomNetworks(lambda: ConvNet(SHAPE, CLASSES, width=width)).draw(derive(0))
    synthetic, targets = data(CLASSES * IPC)[0], embedding_means(network, data(CLASSES)[0], [1] * CLASSES)
    return lambda: distance_to_means(network, targets, synthetic, [IPC] * CLASSES)


def dm_step(width: int, batch: int) -> Step:
    network = RandomNetworks(lambda: ConvNet(SHAPE, CLASSES, width=width)).draw(derive(0))
    synthetic, real = data(CLASSES * IPC)[0], data(CLASSES * batch)[0]

    def step() -> None:
        targets = embedding_means(network, real, [batch] * CLASSES)
        distance_to_means(network, targets, synthetic, [IPC] * CLASSES)

    return step


def class_means(width: int, batch: int) -> Step:
    like = LabeledImages(*data(CLASSES), num_classes=CLASSES)
    embedders = PublicEmbedders(RandomNetworks(lambda: ConvNet(SHAPE, CLASSES, width=width)), 1, like=like)
    synthetic, target = data(CLASSES * IPC)[0].unflatten(0, (CLASSES, IPC)), embedders[0](like.images).detach()
    return lambda: class_means_gradient(synthetic, embedders, 0, target)


def image_sgd(width: int, batch: int) -> Step:
    network = build(lambda: ConvNet(SHAPE, CLASSES, width=width), 0).requires_grad_(False)
    synthetic = data(CLASSES * IPC)[0].unflatten(0, (CLASSES, IPC)).requires_grad_()
    real, labels = data(batch)
    private = PrivateGradient([synthetic], sigma=1.0, clip=1.0, denominator=batch, secret=Secret())

    def step() -> None:
        with torch.no_grad():
            embedding = network.features(real)
        for grads in image_gradients(synthetic, PublicEmbedder(network, None), embedding, labels):
            private.add([grads])
        private.take()

    return step


class Images(nn.Module):
    def __init__(self, network: nn.Module, synthetic: Tensor) -> None:
        super().__init__()
        self.network, self.synthetic = network, nn.Parameter(synthetic)

    def forward(self, packed: Tensor) -> Tensor:
        means = self.network.features(self.synthetic).view(CLASSES, IPC, -1).mean(1)
        embedding, one_hot = packed[:, :-CLASSES], packed[:, -CLASSES:]
        return (embedding - one_hot @ means).square().sum(1)


def functorch(width: int, batch: int) -> Step:
    from opacus.grad_sample import GradSampleModule

    network = build(lambda: ConvNet(SHAPE, CLASSES, width=width), 0).requires_grad_(False)
    module = Images(network, data(CLASSES * IPC)[0])
    images = GradSampleModule(module, loss_reduction="sum", force_functorch=True)
    real, labels = data(batch)
    private = PrivateGradient([module.synthetic], sigma=1.0, clip=1.0, denominator=batch, secret=Secret())

    def step() -> None:
        with torch.no_grad():
            embedding = network.features(real)
        packed = torch.cat([embedding, torch.nn.functional.one_hot(labels, CLASSES)], 1).requires_grad_()
        images(packed).sum().backward()
        private.add([module.synthetic.grad_sample])
        private.take()

    return step


WAYS = {f.__name__: f for f in (dm_step, dm_fit, class_means, image_sgd, functorch)}


def measure(way: str, width: int, batch: int, rounds: int) -> None:
    torch.set_num_threads(1)
    step, seconds = WAYS[way](width, batch), []
    step()
    for _ in range(rounds):
        begun = time.process_time()
        step()
        seconds.append(time.process_time() - begun)
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f"{way:<12} {statistics.median(seconds):8.3f} CPU s a step   peak {memory:6.0f} MiB", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--way", choices=list(WAYS), help="only this one, in this process")
    options = parser.parse_args()
    if options.way:
        measure(options.way, options.width, options.batch, options.rounds)
        return
    for way in WAYS:
        own = ["--way", way, "--width", str(options.width), "--batch", str(options.batch)]
        subprocess.run([sys.executable, __file__, *own, "--rounds", str(options.rounds)], check=True)


if __name__ == "__main__":
    main()
