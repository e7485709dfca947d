"""CPU seconds of a private step beside an ordinary one, and of the capture before the first step.

    OMP_WAIT_POLICY=PASSIVE python tests/benchmarks/bench_per_example.py [--batch 64] [--rounds 5]

A step is 64 records of 3x32x32: gradients, clipping and sum, without and with noise. The ordinary step is a backward
pass of the same batch, in chunks of 16 or at once, whichever is faster. One intra-op thread, CPU time of the process,
medians of interleaved rounds.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from distillkit._utils.tables import markdown_table
from distillkit.networks import CifarResNet, ConvNet, build
from distillkit.privacy import PrivateGradient, Secret, per_example_gradients
from distillkit.rng import derive

SHAPE, CLASSES = (3, 32, 32), 10


def convnet() -> nn.Module:
    return build(lambda: ConvNet(SHAPE, CLASSES, width=64), 0)


def cifar_resnet() -> nn.Module:
    return build(lambda: CifarResNet(SHAPE, CLASSES, depth=20, norm="group"), 0)


def vit() -> nn.Module:
    from torchvision.models import VisionTransformer

    return VisionTransformer(
        image_size=32, patch_size=4, num_layers=4, num_heads=4, hidden_dim=64, mlp_dim=128, num_classes=CLASSES
    )


def resnet18() -> nn.Module:
    from torchvision.models import resnet18

    return resnet18(num_classes=CLASSES, norm_layer=lambda channels: nn.GroupNorm(8, channels))


def measure(name: str, model: nn.Module, batch: int, rounds: int) -> Sequence[str]:
    images, labels = torch.randn(batch, *SHAPE, generator=derive(0)), torch.arange(batch) % CLASSES
    parameters = list(model.train().parameters())

    def losses(x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(model(x), y, reduction="none")

    begun = time.process_time()
    gradients = per_example_gradients(model, losses, like=(images, labels))
    capture, chunk = time.process_time() - begun, gradients.chunk_size(batch)
    sums = [PrivateGradient(parameters, sigma=s, clip=1.0, denominator=batch, secret=Secret()) for s in (0.0, 1.0)]

    def plain(size: int) -> None:
        for x, y in zip(images.split(size), labels.split(size)):
            torch.autograd.grad(losses(x, y).sum(), parameters)

    def step(noise: int) -> None:
        private = sums[noise]
        for x, y in zip(images.split(chunk), labels.split(chunk)):
            private.add(gradients(x, y))
        private.take()

    steps: dict[str, Callable[[], None]] = {"16": lambda: plain(16), "all": lambda: plain(batch)}
    steps |= {"clipped": lambda: step(0), "noised": lambda: step(1)}
    taken: dict[str, list[float]] = {way: [] for way in steps}
    for number in range(rounds + 1):
        for way, call in steps.items():
            begun = time.process_time()
            call()
            if number:
                taken[way].append(time.process_time() - begun)
    medians = {way: statistics.median(times) for way, times in taken.items()}
    usual = min(medians["16"], medians["all"])
    clipped, noised = medians["clipped"], medians["noised"]
    ratios = f"{clipped:.3f}", f"{clipped / usual:.2f}", f"{noised:.3f}", f"{noised / usual:.2f}"
    return (name, f"{usual:.3f}", *ratios, f"{capture:.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(f"torch {torch.__version__}, batch {options.batch}, one thread")
    torch.manual_seed(0)
    networks = {
        "ConvNet-3, width 64": convnet, "CifarResNet-20, group norm": cifar_resnet, "ViT, 4 layers of width 64": vit,
        "torchvision's ResNet-18, group norm": resnet18,
    }  # fmt: skip
    cells = [measure(name, factory(), options.batch, options.rounds) for name, factory in networks.items()]
    header = ("network", "ordinary step", "clipped and summed", "ratio", "with noise", "ratio", "capture")
    print(markdown_table(header, cells))


if __name__ == "__main__":
    main()
