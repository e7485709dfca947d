"""Time, memory and share of the convolution limit of the generators: an inversion step, noise images, patches.

    OMP_WAIT_POLICY=PASSIVE python tests/benchmarks/bench_generate.py [--threads 1] [--crops 2000]

CPU time of the process, so a busy machine disturbs it little. The convolution peak is measured beside it: the best rate
of a 3x3 convolution of 128 to 128 maps on 16 images of 32x32. An inversion step is one Adam step on a batch of 256
images of 3x32x32 with a student to disagree with (FedCOG), forward and backward through both networks.
"""

from __future__ import annotations

import argparse
import resource
import time
from collections.abc import Callable
from functools import partial

import torch
from sklearn.datasets import load_sample_image
from torch import Tensor, nn
from torch.nn.functional import conv2d
from torch.utils.flop_counter import FlopCounterMode

from distillkit.generate import Patches, cnn_noise, invert, stylegan_noise
from distillkit.networks import ConvNet, SimpleCNN, build
from distillkit.rng import derive

SHAPE, IMAGES = (3, 32, 32), 256


def cpu_seconds(run: Callable[[], object]) -> float:
    begun = time.process_time()
    run()
    return time.process_time() - begun


def peak_memory() -> str:
    return f"{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:.0f} MiB peak so far"


def convolution_peak() -> float:
    """Return the best convolution rate, FLOP per CPU second."""
    images, kernel = torch.randn(16, 128, 32, 32, generator=derive(0)), torch.randn(128, 128, 3, 3, generator=derive(1))
    images = images.to(memory_format=torch.channels_last)
    flop = 2 * 16 * 32 * 32 * 128 * 128 * 9
    return flop / min(cpu_seconds(lambda: conv2d(images, kernel, padding=1)) for _ in range(20))


def flop_of_a_step(teacher: nn.Module, student: nn.Module) -> int:
    images = torch.randn(4, *SHAPE, generator=derive(0)).requires_grad_()
    with FlopCounterMode(display=False) as counter:
        logits: Tensor = teacher(images) - student(images)
        logits.sum().backward()
    return counter.get_total_flops() * IMAGES // 4


def inversion(name: str, factory: Callable[[], nn.Module], steps: int, batch: int | None, peak: float) -> None:
    teacher, student = (build(factory, seed).requires_grad_(False) for seed in (0, 1))
    targets = torch.arange(IMAGES) % 10

    def run(count: int) -> float:
        options = {"shape": SHAPE, "student": student, "steps": count, "batch": batch}
        return cpu_seconds(lambda: invert(teacher, targets, **options))

    run(1)
    seconds = (run(steps + 1) - run(1)) / steps
    share = flop_of_a_step(teacher, student) / seconds / peak
    label = f"invert, {name}, batch {batch or 'default'}"
    print(f"{label:<40} {1000 * seconds:8.1f} CPU ms a step   {share:5.1%} of the peak   {peak_memory()}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--crops", type=int, default=2000)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    peak = convolution_peak()
    print(f"{'convolution peak':<40} {peak / 1e9:8.1f} GFLOP a CPU second   {peak_memory()}")

    photo = torch.from_numpy(load_sample_image("china.jpg").copy()).permute(2, 0, 1)
    patches = Patches(photo)
    patches.batch(range(10))
    seconds = cpu_seconds(lambda: [None for _ in patches.chunks(indices=range(options.crops))])
    rate = options.crops / seconds
    speed = f"{rate:8.0f} crops a CPU s ({50_000 / rate:.0f} s for 50,000)"
    print(f"{'patches, 427x640 to 32x32':<40} {speed}   {peak_memory()}")

    inversion("SimpleCNN", lambda: SimpleCNN(SHAPE, 10), 10, None, peak)
    inversion("SimpleCNN", lambda: SimpleCNN(SHAPE, 10), 10, IMAGES, peak)
    inversion("ConvNet-3 w128", lambda: ConvNet(SHAPE, 10), 2, None, peak)
    inversion("ConvNet-3 w128", lambda: ConvNet(SHAPE, 10), 2, IMAGES, peak)
    for width in (64, 512):
        half = 4096 // width
        seconds = cpu_seconds(partial(stylegan_noise, 2, half, width=width))
        print(f"{f'stylegan_noise, width {width}':<40} {2 * half / seconds:8.0f} images a CPU s")
    print(f"{'cnn_noise':<40} {80 / cpu_seconds(lambda: cnn_noise(2, 40)):8.0f} images a CPU s")
    print(peak_memory())


if __name__ == "__main__":
    main()
