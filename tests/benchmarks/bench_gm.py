"""CPU seconds of a gradient-matching step (DC) against the straightforward one; share of the convolution limit.

    OMP_WAIT_POLICY=PASSIVE python -m tests.benchmarks gm [--classes 10] [--real 64] [--rounds 3] [--threads 1]

Both compute loss and gradient of the same step: ConvNet-3 of width 128, `--real` real and 10 synthetic images of
3x32x32 per class. The straightforward implementation takes each class's whole real batch, adds up the distances of all
classes, and calls `backward` once. Its network has PyTorch's own layers. Floating-point operations are counted while
the step runs (convolutions and matrix products, the double backward included); the peak is the best rate of a 128 ->
128 convolution of 64 maps of 16x16 in the same run. CPU time of the process, medians of alternating rounds.
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
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from distillkit.condense._parameter_gradient import distance_to_target, parameter_gradient
from distillkit.networks import ConvNet, build
from distillkit.rng import derive
from tests.benchmarks.plain import gm_gradient, plain_classifier

IPC, SHAPE = 10, (3, 32, 32)
Way = Callable[[list[Tensor], Tensor], Tensor]


class Operations(TorchDispatchMode):
    """Counter of floating-point operations that also covers a double backward pass, where PyTorch's counter stops."""

    total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if formula := flop_registry.get(func._overloadpacket):
            self.total += formula(*args, **(kwargs or {}), out_val=out)
        return out


def ours(network: nn.Module, real: list[Tensor], synthetic: Tensor) -> Tensor:
    parameters, parts = list(network.parameters()), []
    for c, (own, fake) in enumerate(zip(real, synthetic.split(IPC), strict=True)):
        target = parameter_gradient(network, parameters, own, torch.full((len(own),), c))
        parts.append(distance_to_target(network, parameters, fake, torch.full((IPC,), c), target)[1])
    return torch.cat(parts)


def peak() -> float:
    """Return the best convolution rate, GFLOP per CPU second: forward in both layouts, and forward with backward."""
    conv, x = nn.Conv2d(128, 128, 3, padding=1), torch.randn(64, 128, 16, 16, generator=derive(0))
    flops, best = 2 * 128 * 128 * 9 * 64 * 256 / 1e9, 0.0
    for layout in (torch.contiguous_format, torch.channels_last):
        images = x.contiguous(memory_format=layout).requires_grad_()
        for backward in (False, True):
            for _ in range(7):
                begun = time.process_time()
                with torch.set_grad_enabled(backward):
                    out = conv(images)
                if backward:
                    out.backward(out.detach())
                best = max(best, flops * (3 if backward else 1) / (time.process_time() - begun))
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--classes", type=int, default=10)
    parser.add_argument("--real", type=int, default=64, help="real images per class")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    network = build(lambda: ConvNet(SHAPE, options.classes), 0)
    real = [torch.randn(options.real, *SHAPE, generator=derive(0, c)) for c in range(options.classes)]
    synthetic = torch.randn(options.classes * IPC, *SHAPE, generator=derive(1))
    straight = partial(gm_gradient, plain_classifier(network))
    ways: dict[str, Way] = {"ours": partial(ours, network), "straightforward": straight}
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    memory: dict[str, float] = {}
    gradients: dict[str, Tensor] = {}
    with Operations() as counted:
        ours(network, real, synthetic)
    gflop, limit = counted.total / 1e9, peak()
    for _ in range(options.rounds):
        for name, way in ways.items():
            begun = time.process_time()
            gradients[name] = way(real, synthetic)
            seconds[name].append(time.process_time() - begun)
            memory.setdefault(name, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
    print(f"one step has {gflop:.0f} GFLOP; convolution peak {limit:.0f} GFLOP per CPU second")
    for name, times in seconds.items():
        median = statistics.median(times)
        share = 100 * gflop / median / limit
        print(f"{name:<16} {median:7.3f} CPU s a step, {share:3.0f} % of the peak, peak memory {memory[name]:.0f} MiB")
    print(f"ratio            {statistics.median(seconds['ours']) / statistics.median(seconds['straightforward']):7.3f}")
    gap = (gradients["ours"] - gradients["straightforward"]).norm() / gradients["straightforward"].norm()
    print(f"gradient         {float(gap):.1e} relative difference")


if __name__ == "__main__":
    main()
