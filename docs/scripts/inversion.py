"""Measure gradient inversion: records in `docs/results/inversion.jsonl`, their page, and the picture of clients.

    python docs/scripts/inversion.py [--cifar cifar10.npz] [--only formulas classes clients defences images]

Every measurement is a line, written as soon as it is made; lines that are there are not measured again, so that an
interrupted run goes on. The .npz holds CIFAR-10's test_images (uint8 [N, 32, 32, 3]) and test_labels.

Networks are untrained, drawn from seed 0; labels are unknown to the attacker, who starts once, from the image's number
as seed. Images are the first of the test split in an order drawn from seed 0: what an option should be was tried on the
21st and later ones, which no table has.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from inversion_clients import Record, classes, clients, convnet, defences, scored, shuffled
from inversion_page import RECORDS, read, write_page
from torch import nn

from attacks import align, psnr
from attacks.inversion import Gradient, infer_label, invert_linear
from distillkit import LabeledImages, Normalization
from distillkit._utils.provenance import git_commit
from distillkit.data import load
from distillkit.rng import derive

IMAGES = 20

CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "digits, ConvNet-2 of width 16, tanh, no norm": (
        "digits",
        {"width": 16, "depth": 2, "norm": "none", "activation": "tanh"},
        {"method": "dlg", "steps": 20},
    ),
    "digits, the default ConvNet": ("digits", {}, {"method": "dlg", "steps": 12}),
    "CIFAR-10, ConvNet-3 of width 32": (
        "CIFAR-10",
        {"width": 32},
        {"method": "geiping", "steps": 300, "total_variation": 0.03, "lr": 0.3},
    ),
    "digits, the default ConvNet again": ("digits", {}, {"method": "geiping", "steps": 100, "total_variation": 0.01}),
}
"""Name: data, what the ConvNet is given, what the attack is given."""


def cifar(path: str) -> LabeledImages:
    """Load the test split from an .npz file."""
    with np.load(path) as arrays:
        images, labels = torch.as_tensor(arrays["test_images"]), torch.as_tensor(arrays["test_labels"])
    space = Normalization((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616))
    pixels = images.permute(0, 3, 1, 2).float() / 255
    return LabeledImages.from_pixels(pixels, labels, num_classes=10, normalization=space)


def images(done: set[str], path: str | None) -> Iterator[Record]:
    """Attack single images with each method; the baseline is the mean image of the test split."""
    splits = {"digits": load("digits", size=16).test} | ({"CIFAR-10": cifar(path)} if path else {})
    for case, (name, network_given, given) in CASES.items():
        if name not in splits:
            print(f"{case}: not measured; give --cifar cifar10.npz")
            continue
        data, mean = shuffled(splits[name])[:IMAGES], splits[name].pixels().mean(0, keepdim=True)
        network = convnet(data, **network_given)
        for row in range(IMAGES):
            own = data[row : row + 1]
            if f"{case} {row}" in done:
                continue
            record, _ = scored(Gradient.of(network, own.images, own.labels), own, row, given)
            guesses = [float(psnr(guess, own.pixels())) for guess in (mean, align(mean, own.pixels()))]
            yield {"case": case, "seed": row, **record, "guess": guesses[0], "guess_aligned": guesses[1], **given}


def formulas(done: set[str]) -> Iterator[Record]:
    """Recover labels of single images from the default ConvNet's gradient, and the input of a first linear layer."""
    if done:
        return
    digits, begun = shuffled(load("digits", size=16).test)[:200], time.process_time()
    default, layers = convnet(digits), nn.Sequential(nn.Flatten(), nn.Linear(256, 64), nn.ReLU(), nn.Linear(64, 10))
    with torch.no_grad():
        for p in layers.parameters():
            p.copy_(torch.randn(p.shape, generator=derive(0, *p.shape)) / p.shape[-1] ** 0.5)
    right, errors = 0, []
    for row in range(len(digits)):
        own = digits[row : row + 1]
        last = [g for g in Gradient.of(default, own.images, own.labels).observed if g.ndim == 2][-1]
        right += infer_label(last) == int(own.labels)
        found = invert_linear(*Gradient.of(layers, own.images, own.labels).observed[:2])
        errors.append(float((found.input - own.images.flatten()).abs().max()))
    seconds = time.process_time() - begun
    yield {"case": "both", "seed": 0, "images": 200, "labels": right, "error": max(errors), "seconds": seconds}


PARTS: dict[str, Callable[[set[str]], Iterator[Record]]] = {
    "formulas": formulas, "classes": classes, "clients": clients, "defences": defences,
    "images": partial(images, path=None),
}  # fmt: skip
"""The cheapest first."""


def main() -> None:
    """Measure all missing lines, then write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cifar", help=".npz of CIFAR-10")
    parser.add_argument("--only", nargs="*", choices=PARTS, default=list(PARTS), help="parts to measure")
    options = parser.parse_args()
    torch.set_num_threads(1)
    facts = {"command": shlex.join(["python", "docs/scripts/inversion.py", *sys.argv[1:]]), "commit": git_commit()}
    parts = {**PARTS, "images": partial(images, path=options.cifar)}
    for part in options.only:
        done = {f"{r['case']} {r['seed']}" for r in read(RECORDS) if r["part"] == part}
        for record in parts[part](done):
            with RECORDS.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"part": part, **record, **facts}) + "\n")
            print(part, record["case"], record["seed"], f"{record['seconds']:.1f} CPU s", flush=True)
    write_page()


if __name__ == "__main__":
    main()
