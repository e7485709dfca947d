"""What inversion finds, and in how many CPU seconds: medians over single private images, one start each.

    OMP_WAIT_POLICY=PASSIVE python tests/benchmarks/bench_inversion.py [--images 20] [--threads 1] [--cifar cifar10.npz]

* DLG on 16x16 digits: behind ConvNet-2 of width 16 with tanh and no norm, and behind ConvNet-3 of width 128 as it is by
  default (instance norm, ReLU); behind that Geiping's attack too, 200 steps and a weight of 0.01 on total variation
  (the better of 0.01 and 0.001 for two other digits). PSNR plain and after the affine alignment of brightness and
  contrast, beside that of a guess that knows nothing: the test split's mean image.
* Labels read off 200 gradients of one digit each, and the input of a first linear layer by a formula.
* Geiping's attack on CIFAR-10 behind ConvNet-3 of width 32, 300 steps and a weight of 0.03 on total variation
  (the best of 0.1, 0.03, 0.01 for four other images of the split), if the data is given: an .npz with test_images
  (uint8 [N, 32, 32, 3]) and test_labels.

Images are the first of the test split in an order drawn from seed 0; networks are untrained, their labels unknown.
"""

from __future__ import annotations

import argparse
import time
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn

from attacks import align, psnr
from attacks.inversion import Gradient, invert_message, label_of_one, linear_input
from distillkit.data import load
from distillkit.networks import ConvNet, build
from distillkit.normalization import Normalization
from distillkit.rng import derive
from distillkit.sets import LabeledImages


def attack(
    name: str, network: nn.Module, data: LabeledImages, mean: Tensor, method: str, steps: int, variation: float = 0.0
) -> None:
    plain, aligned, seconds, right = [], [], [], 0
    for row in range(len(data)):
        own = data[row : row + 1]
        sent = Gradient.of(network, own.images, own.labels)
        begun = time.process_time()
        found = invert_message(sent, data.shape, method=method, steps=steps, normalization=data.normalization, seed=row)
        seconds.append(time.process_time() - begun)
        right += int(found.labels == own.labels)
        plain.append(psnr(found.images, own.pixels()))
        aligned.append(psnr(align(found.images, own.pixels()), own.pixels()))
    guess = mean.expand(len(data), *data.shape)
    guesses = [psnr(guess, data.pixels()), psnr(align(guess, data.pixels()), data.pixels())]
    rows = {"PSNR": torch.cat(plain), "aligned": torch.cat(aligned), "CPU s": torch.tensor(seconds)}
    print(f"{name}, {method}, {steps} steps: {right} of {len(data)} labels")
    for what, values in rows.items():
        low, middle, high = (float(values.quantile(q)) for q in (0.0, 0.5, 1.0))
        print(f"    {what:<8} median {middle:6.1f}   ({low:.1f} to {high:.1f})")
    print(
        f"    a guess  median {float(guesses[0].median()):6.1f}, aligned {float(guesses[1].median()):.1f}", flush=True
    )


def formulas(digits: LabeledImages, network: nn.Module) -> None:
    right = 0
    for row in range(len(digits)):
        own = digits[row : row + 1]
        last = [g for g in Gradient.of(network, own.images, own.labels).seen if g.ndim == 2][-1]
        right += label_of_one(last) == int(own.labels)
    print(f"labels of one image: {right} of {len(digits)}")
    pixels = digits.shape[1] * digits.shape[2]
    layers = nn.Sequential(nn.Flatten(), nn.Linear(pixels, 64), nn.ReLU(), nn.Linear(64, 10))
    with torch.no_grad():
        for p in layers.parameters():
            p.copy_(torch.randn(p.shape, generator=derive(0, *p.shape)) / p.shape[-1] ** 0.5)
    errors = []
    for row in range(len(digits)):
        own = digits[row : row + 1]
        weight, bias = Gradient.of(layers, own.images, own.labels).seen[:2]
        errors.append(float((linear_input(weight, bias).input - own.images.flatten()).abs().max()))
    print(f"input of a linear layer: largest error of {len(digits)} images {max(errors):.1e}", flush=True)


def cifar(path: str, count: int) -> tuple[LabeledImages, Tensor]:
    with np.load(path) as arrays:
        images, labels = torch.as_tensor(arrays["test_images"]), torch.as_tensor(arrays["test_labels"])
    pixels = images.permute(0, 3, 1, 2).float() / 255
    rows = torch.randperm(len(pixels), generator=derive(0))[:count]
    space = Normalization((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616))
    found = LabeledImages.from_pixels(pixels[rows], labels[rows], num_classes=10, normalization=space)
    return found, pixels.mean(0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=20)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--cifar", help=".npz of CIFAR-10")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    split = load("digits", size=16)
    digits = split.test[torch.randperm(len(split.test), generator=derive(0))]
    mean, few = digits.pixels().mean(0), digits[: options.images]
    small = build(partial(ConvNet, (1, 16, 16), 10, width=16, depth=2, norm="none", activation="tanh"), 0)
    default = build(partial(ConvNet, (1, 16, 16), 10), 0)
    formulas(digits[:200], default)
    attack("digits, tanh, no norm", small, few, mean, "dlg", 50)
    attack("digits, the default ConvNet", default, few, mean, "dlg", 40)
    attack("digits, the default ConvNet", default, few, mean, "geiping", 200, 0.01)
    if options.cifar is None:
        print("CIFAR-10: not tried; give --cifar cifar10.npz")
        return
    data, mean = cifar(options.cifar, options.images)
    network = build(partial(ConvNet, (3, 32, 32), 10, width=32), 0)
    attack("CIFAR-10, w32", network, data, mean, "geiping", 300, 0.03)


if __name__ == "__main__":
    main()
