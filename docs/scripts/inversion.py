"""Measure gradient inversion: records in `docs/results/inversion.jsonl`.

    python docs/scripts/inversion.py [--cifar cifar10.npz] [--only classes clients defences images]

Every measurement is a line, written as soon as it is made; lines that are there are not measured again. The .npz holds
CIFAR-10's test_images (uint8 [N, 32, 32, 3]) and test_labels.

Networks are untrained, drawn from seed 0; labels are unknown to the attacker, who starts once, from the image's number
as seed. Images are the first of the test split in an order drawn from seed 0; options were tried on the 21st and later.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from attacks import align, psnr
from attacks.inversion import (
    Clip,
    DefendedMessage,
    FedAvgUpdate,
    Gradient,
    Noise,
    ObservedMessage,
    Sparsify,
    class_bounds,
    class_counts,
    invert_message,
)
from distillkit import LabeledImages, Normalization
from distillkit._utils.provenance import git_commit
from distillkit.condense import distribution_matching
from distillkit.data import load
from distillkit.data.partition import dirichlet
from distillkit.networks import ConvNet, RandomNetworks, build
from distillkit.privacy import compose
from distillkit.rng import derive

RECORDS = Path(__file__).parents[1] / "results" / "inversion.jsonl"
Record = dict[str, Any]

SMALL: dict[str, Any] = {"width": 32, "depth": 2}
ATTACK: dict[str, Any] = {"method": "geiping", "steps": 100, "total_variation": 0.01}


def shuffled(split: LabeledImages) -> LabeledImages:
    """In the order drawn from seed 0."""
    return split[torch.randperm(len(split), generator=derive(0))]


def convnet(data: LabeledImages, **given: Any) -> nn.Module:
    """The network whose gradients are sent."""
    return build(partial(ConvNet, data.shape, 10, **given), 0)


def scored(message: ObservedMessage, own: LabeledImages, row: int, given: Mapping[str, Any]) -> tuple[Record, Tensor]:
    """What an attack finds of one image, and the image that it found."""
    begun = time.process_time()
    found = invert_message(message, own.shape, normalization=own.normalization, seed=row, **given)
    seconds, truth = time.process_time() - begun, own.pixels()
    record = {
        "label": bool(found.labels == own.labels),
        "psnr": float(psnr(found.images, truth)),
        "aligned": float(psnr(align(found.images, truth), truth)),
        "loss": found.losses[0],
        "seconds": seconds,
    }
    return record, found.images


def defences(done: set[str]) -> Iterator[Record]:
    """One message about one image, defended in several ways."""
    digits = shuffled(load("digits", size=16).test)
    network = convnet(digits, **SMALL)
    for row in range(5):
        own = digits[row : row + 1]
        sent = Gradient.of(network, own.images, own.labels)
        size = float(torch.cat([g.flatten() for g in sent.observed]).square().mean().sqrt())
        messages: dict[str, ObservedMessage] = {
            "as it is": sent,
            "clipped to a norm of 0.1": DefendedMessage(sent, Clip(0.1)),
            "noise of 0.1 times its RMS": DefendedMessage(sent, Noise(0.1 * size, seed=row)),
            "noise of its RMS": DefendedMessage(sent, Noise(size, seed=row)),
            "clipped to 1, noise of 1 (one record's DP-SGD)": DefendedMessage(sent, Clip(1.0), Noise(1.0, seed=row)),
            "its largest 10 %": DefendedMessage(sent, Sparsify(0.1)),
            "its largest 1 %": DefendedMessage(sent, Sparsify(0.01)),
            "5 local steps of 0.01": FedAvgUpdate.of(network, own.images, own.labels, lr=0.01, epochs=5),
        }
        for case, message in messages.items():
            if f"{case} {row}" not in done:
                yield {"case": case, "seed": row, **scored(message, own, row, ATTACK)[0], **ATTACK}


def classes(done: set[str]) -> Iterator[Record]:
    """What the messages of twenty unequal clients say for certain of their classes."""
    digits = load("digits", size=16).train
    clients = [digits[rows] for rows in dirichlet(digits.labels, 20, 0.3, generator=0)]
    network, noise = convnet(digits, **SMALL), torch.randn(64, *digits.shape, generator=derive(0, "noise"))
    predictions = network(noise).softmax(1).detach()
    found: dict[str, list[tuple[Any, Tensor, Tensor | None]]] = {}
    begun = time.process_time()
    for number, own in enumerate(clients):
        counts, size = own.labels.bincount(minlength=10), len(own)
        gradient = Gradient.of(network, own.images, own.labels).observed[-1]
        order = torch.randperm(size, generator=derive(0, "order", number)).split(16)
        change = FedAvgUpdate.of(network, own.images, own.labels, lr=0.01, batch=16, order=order).observed[-1]
        embedded = network.features(own.images).detach()  # type: ignore[operator]
        means = torch.zeros(10, embedded.shape[1]).index_add_(0, own.labels, embedded) / counts.clamp(min=1)[:, None]
        noised = means + torch.randn(means.shape, generator=derive(0, "means", number)) * (counts > 0)[:, None]
        ipc = torch.repeat_interleave(torch.arange(10), counts.clamp(max=10))
        estimate = class_counts(gradient, size, predictions)
        for case, held, guess in (
            ("gradient of the last bias, all records", class_bounds(10, bias_gradient=gradient, size=size), estimate),
            ("change of the last bias, an epoch of batches of 16", class_bounds(10, bias_change=change), None),
            ("class means", class_bounds(10, class_rows=means), None),
            ("class means, noise where there are records", class_bounds(10, class_rows=noised, noised=True), None),
            ("a set's labels, ten images a class", class_bounds(10, labels=ipc, ipc=10), None),
        ):
            found.setdefault(case, []).append((held, counts, guess))
    seconds = (time.process_time() - begun) / len(found)
    for case, rows in found.items():
        present = torch.cat([counts > 0 for _, counts, _ in rows])
        certain = [torch.cat([getattr(held, name) for held, _, _ in rows]) for name in ("present", "absent", "exact")]
        wrong = sum(int((guess - counts).abs().sum()) // 2 for _, counts, guess in rows if guess is not None)
        record = {
            "held": int(present.sum()),
            "held_certain": int((certain[0] & present).sum()),
            "lacking": int((~present).sum()),
            "lacking_certain": int((certain[1] & ~present).sum()),
            "counts_certain": int((certain[2] & present).sum()),
            "false": int((certain[0] & ~present).sum() + (certain[1] & present).sum()),
            "misplaced": wrong / len(digits) if rows[0][2] is not None else None,
        }
        if f"{case} 0" not in done:
            yield {"case": case, "seed": 0, "clients": len(clients), **record, "seconds": seconds}


def clients(done: set[str]) -> Iterator[Record]:
    """Six clients, thirty records of one class each, and what is found of what they send."""
    digits, count = load("digits", size=16), 6
    if len(done) == 4 * count:
        return
    own = [digits.train[(digits.train.labels == k).nonzero().flatten()[:30]] for k in range(count)]
    other = torch.cat([digits.test[digits.test.labels == k].pixels()[:1] for k in range(count)])
    network = convnet(own[0], **SMALL)
    condense = partial(
        distribution_matching,
        LabeledImages.concatenate(own),
        networks=RandomNetworks(partial(ConvNet, own[0].shape, 10, **SMALL)),
        ipc=10, steps=100, classes=range(count), progress=False,
    )  # fmt: skip
    raw = LabeledImages.concatenate([one[:1] for one in own])
    epsilon = compose([(1.0, 1.0, 1)], 1e-5).epsilon
    sets = {
        "a record": raw,
        "a distilled image, from a record": condense(init="real")[::10],
        "a distilled image, from noise": condense(init="noise")[::10],
        f"a record, DP-SGD (ε {epsilon:.1f})": raw,
    }
    for case, data in sets.items():
        for k in range(count):
            one = LabeledImages(data.images[k : k + 1], data.labels[k : k + 1], 10, raw.normalization)
            sent: ObservedMessage = Gradient.of(network, one.images, one.labels)
            message = DefendedMessage(sent, Clip(1.0), Noise(1.0, seed=k)) if "DP" in case else sent
            record, image = scored(message, one, k, ATTACK)
            near = {
                "nearest": nearest(image, own[k]),
                "sent_nearest": None if data is raw else nearest(one.pixels(), own[k]),
            }
            blind = {"held_out": nearest(other[k : k + 1], own[k])}
            if f"{case} {k}" not in done:
                yield {"case": case, "seed": k, **record, **near, **blind, **ATTACK}


def nearest(image: Tensor, records: LabeledImages) -> float:
    """The greatest aligned PSNR of an image to any record."""
    truth = records.pixels()
    return float(psnr(align(image.expand_as(truth), truth), truth).max())


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


PARTS: dict[str, Callable[[set[str]], Iterator[Record]]] = {
    "classes": classes, "clients": clients, "defences": defences, "images": partial(images, path=None),
}  # fmt: skip
"""The cheapest first."""


def main() -> None:
    """Measure all missing lines."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cifar", help=".npz of CIFAR-10")
    parser.add_argument("--only", nargs="*", choices=PARTS, default=list(PARTS), help="parts to measure")
    options = parser.parse_args()
    torch.set_num_threads(1)
    facts = {"command": shlex.join(["python", "docs/scripts/inversion.py", *sys.argv[1:]]), "commit": git_commit()}
    parts = {**PARTS, "images": partial(images, path=options.cifar)}
    text = RECORDS.read_text(encoding="utf-8") if RECORDS.exists() else ""
    lines: list[Record] = [json.loads(line) for line in text.splitlines()]
    for part in options.only:
        done = {f"{r['case']} {r['seed']}" for r in lines if r["part"] == part}
        for record in parts[part](done):
            with RECORDS.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"part": part, **record, **facts}) + "\n")
            print(part, record["case"], record["seed"], f"{record['seconds']:.1f} CPU s", flush=True)


if __name__ == "__main__":
    main()
