"""CPU seconds of a private step by each method for per-example gradients, and of the check before the first step.

    OMP_WAIT_POLICY=PASSIVE python tests/benchmarks/bench_per_example.py [--batch 64] [--rounds 3]

A step is 64 records of 3x32x32, clipped, summed and noised. `plain` is an ordinary backward pass of the same batch;
`trial` is what `train_private` does once, before it charges. One intra-op thread, CPU time of the process, medians.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from distillkit.networks import ConvNet, build
from distillkit.privacy import PrivateGradient, Secret, per_example_gradients
from distillkit.privacy.validation._gradient_check import choose_batch_sizes
from distillkit.rng import derive

SHAPE, CLASSES = (3, 32, 32), 10


def convnet() -> nn.Module:
    return build(lambda: ConvNet(SHAPE, CLASSES, width=64), 0)


def vit() -> nn.Module:
    from torchvision.models import VisionTransformer

    return VisionTransformer(
        image_size=32, patch_size=4, num_layers=4, num_heads=4, hidden_dim=64, mlp_dim=128, num_classes=CLASSES
    )


def resnet18() -> nn.Module:
    from torchvision.models import resnet18

    return resnet18(num_classes=CLASSES, norm_layer=lambda channels: nn.GroupNorm(8, channels))


def seconds(call: Callable[[], object], rounds: int) -> float:
    call()
    taken = []
    for _ in range(rounds):
        begun = time.process_time()
        call()
        taken.append(time.process_time() - begun)
    return statistics.median(taken)


def measure(name: str, model: nn.Module, ways: tuple[str, ...], batch: int, rounds: int) -> None:
    images, labels = torch.randn(batch, *SHAPE, generator=derive(0)), torch.arange(batch) % CLASSES
    public = torch.randn(6, *SHAPE, generator=derive(1)), torch.arange(6)
    chunk, sizes = choose_batch_sizes(images, batch, None)
    private = PrivateGradient(list(model.parameters()), sigma=1.0, clip=1.0, denominator=batch, secret=Secret())

    def losses(x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(model(x), y, reduction="none")

    def plain() -> None:
        for x, y in zip(images.split(chunk), labels.split(chunk)):
            torch.autograd.grad(losses(x, y).sum(), list(model.parameters()))

    def trial() -> str:
        with per_example_gradients(model, losses, public=public, chunk=chunk, sizes=sizes) as gradients:
            return gradients.engine

    model.train()
    usual = seconds(plain, rounds)
    print(f"{name:<10} plain {usual:7.3f} s", flush=True)
    steps = {}
    for way in ways:
        with per_example_gradients(model, losses, public=public, chunk=chunk, engine=way) as gradients:

            def step(gradients: Callable[..., list[Tensor]] = gradients) -> None:
                for x, y in zip(images.split(chunk), labels.split(chunk)):
                    private.add(gradients(x, y))
                private.take()

            steps[way] = seconds(step, rounds)
        print(f"{'':<10} {way:<5} {steps[way]:7.3f} s, {steps[way] / usual:5.2f} plain steps", flush=True)
    engine, taken = trial(), seconds(trial, 1)
    print(f"{'':<10} trial {taken:7.3f} s, {taken / steps[engine]:5.2f} steps by {engine}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(f"torch {torch.__version__}, batch {options.batch}, one thread")
    torch.manual_seed(0)
    for name, factory, ways in (
        ("ConvNet-3", convnet, ("hooks", "vmap", "loop")),
        ("ViT", vit, ("vmap", "loop")),
        ("ResNet-18", resnet18, ("vmap", "loop")),
    ):
        measure(name, factory(), ways, options.batch, options.rounds)


if __name__ == "__main__":
    main()
