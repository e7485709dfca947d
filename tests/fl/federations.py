"""Small federations for the tests of `fl`."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import torch
from torch import nn

from distillkit import LabeledImages
from distillkit.networks import ConvNet
from distillkit.normalization import IDENTITY


class Tiny(nn.Module):
    """A network of a few weights with the features/classifier split, on 1x4x4 images."""

    def __init__(self, outputs: int, norm: bool = False) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(1, 3, 3, padding=1), nn.BatchNorm2d(3) if norm else nn.Identity(), nn.ReLU()
        )
        self.classifier = nn.Linear(48, outputs)

    def features(self, images: torch.Tensor) -> torch.Tensor:
        return self.body(images).flatten(1)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.classifier(self.features(images))


def small(outputs: int, side: int = 4) -> ConvNet:
    """Return a network of distillkit, which private methods run without tracing it first: tests are faster.

    Average pooling has constants on the CPU, which an emulated device would take for a mistake.
    """
    return ConvNet((1, side, side), outputs, width=3, depth=1, pooling="max")


def images(count: int, seed: int, classes: int = 3) -> LabeledImages:
    """Return noise images with a bright row that shows the class."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(classes, (count,), generator=generator)
    x = 0.3 * torch.randn(count, 1, 4, 4, generator=generator)
    for i, y in enumerate(labels.tolist()):
        x[i, 0, y] += 1.5
    return LabeledImages(x, labels, num_classes=classes, normalization=IDENTITY)


def with_label_rows(data: LabeledImages) -> LabeledImages:
    """Return the same images with labels as rows of 0 and 1."""
    return data.replace(labels=torch.eye(data.num_classes)[data.labels])


def federation() -> list[LabeledImages]:
    """Return five clients of 12 to 24 images."""
    return [images(12 + 3 * k, seed=k) for k in range(5)]


def sum_history_again(folder: Path) -> None:
    """Write the checksum of a changed history into the run's manifest."""
    path = folder / "checkpoint" / "manifest.json"
    manifest = json.loads(path.read_bytes())
    manifest["sums"]["history.jsonl"] = hashlib.sha256((folder / "history.jsonl").read_bytes()).hexdigest()
    path.write_text(json.dumps(manifest), encoding="utf-8")
