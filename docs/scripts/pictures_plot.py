"""Draw the example pictures of `distillkit.plot` into docs/pictures, from real digits and one photograph.

Run it as `python docs/scripts/pictures_plot.py`; it takes about a minute on two cores and needs no files.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.functional import avg_pool2d, cross_entropy, interpolate

from distillkit import LabeledImages, plot
from distillkit.condense import distribution_matching
from distillkit.data import clients, load, partition
from distillkit.generate import Patches
from distillkit.networks import ConvNet, RandomNetworks, build
from distillkit.rng import derive
from distillkit.select import select
from fl import FedAvg, simulate

OUT = Path(__file__).parents[1] / "pictures"


def save(figure: Any, name: str) -> None:
    """Write one picture."""
    figure.savefig(OUT / f"{name}.png", dpi=200)


def trained(data: LabeledImages, steps: int = 150) -> ConvNet:
    """Train a small ConvNet on the set with some steps of Adam."""
    network = build(lambda: ConvNet(data.shape, data.num_classes, width=32, depth=3), 0)
    optimizer, draws = torch.optim.Adam(network.parameters(), lr=2e-3), derive(0, "batches")
    for _ in range(steps):
        batch = data[torch.randint(len(data), (64,), generator=draws)]
        optimizer.zero_grad()
        cross_entropy(network(batch.images), batch.labels).backward()
        optimizer.step()
    assert isinstance(network, ConvNet)
    return network.eval()


def domains(data: LabeledImages) -> dict[str, LabeledImages]:
    """Return three clients that see the same digits in three styles."""
    thirds = torch.randperm(len(data), generator=derive(0, "thirds")).chunk(3)
    plain, blurred, inverted = (data[third] for third in thirds)
    soft = avg_pool2d(blurred.pixels(), 5, 1, 2)
    return {
        "plain": plain,
        "blurred": blurred.replace(images=data.normalization.encode(soft)),
        "inverted": inverted.replace(images=data.normalization.encode(1 - inverted.pixels())),
    }


def condensed(data: LabeledImages, steps: int = 150) -> LabeledImages:
    """Condense ten images per class by distribution matching."""
    networks = RandomNetworks(lambda: ConvNet(data.shape, data.num_classes, width=32, depth=3))
    return distribution_matching(data, networks=networks, ipc=10, steps=steps, batch_real=64)


@torch.no_grad()
def draw_sets(train: LabeledImages) -> None:
    """Draw all pictures that need client sets and a network."""
    real = domains(train)
    with torch.enable_grad():
        network, synthetic = trained(train), {name: condensed(one) for name, one in real.items()}
    save(plot.grid(synthetic["plain"]), "grid")
    save(plot.real_and_synthetic(real["plain"], synthetic["plain"], per_class=6), "real_and_synthetic")
    save(plot.pixel_histogram(real | {f"{n}, distilled": s for n, s in synthetic.items()}), "pixel_histogram")

    before = {name: network.features(one.images) for name, one in real.items()}
    after = {name: network.features(one.images) for name, one in synthetic.items()}
    save(plot.mmd_table(before, after), "mmd_table")
    few = {name: one[:150] for name, one in real.items()}
    shown = {name: network.features(one.images) for name, one in few.items()}
    save(plot.tsne(shown, {name: one.labels for name, one in few.items()}), "tsne")


@torch.no_grad()
def draw_selection(train: LabeledImages) -> None:
    """Draw crops of scikit-learn's photograph `china.jpg` (CC BY 2.0), selected by a network trained on digits."""
    from sklearn.datasets import load_sample_image

    photo = torch.tensor(load_sample_image("china.jpg")).permute(2, 0, 1)
    pixels = torch.stack([*Patches(photo, seed=0, count=400)])
    with torch.enable_grad():
        network = trained(train)
    grey = train.normalization.encode(interpolate(pixels.mean(1, keepdim=True), size=16, mode="area"))
    embeddings = network.features(grey)
    kept = select(embeddings, network.classifier(embeddings), keep=40, clusters=50)
    save(plot.selection(pixels, kept, rows=4, columns=6), "selection")


def federated(owned: list[LabeledImages], test: LabeledImages, epochs: int, seed: int) -> list[dict[str, Any]]:
    """Return the history of ten rounds of FedAvg with a linear model."""
    method = FedAvg(factory=lambda outputs: nn.Sequential(nn.Flatten(), nn.Linear(64, outputs)), lr=0.02, epochs=epochs)
    return simulate(method, owned, rounds=10, test=test, seed=seed, progress=False).rows


def main() -> None:
    """Draw all pictures."""
    OUT.mkdir(exist_ok=True)
    small, digits = load("digits"), load("digits", size=16)
    parts = partition.dirichlet(small.train.labels, 10, 0.3)
    save(plot.partition(small.train.labels, parts), "partition")
    owned = clients(small.train, parts)
    federated(owned, small.test, 1, 0)  # the first call is slower, and the curves count seconds
    runs = {
        f"{epochs} local epoch{'s' if epochs > 1 else ''}": [
            federated(owned, small.test, epochs, seed) for seed in range(3)
        ]
        for epochs in (1, 5)
    }
    save(plot.curves(runs), "curves")
    save(plot.curves(runs, x="client_seconds"), "curves_client_seconds")
    draw_sets(digits.train)
    draw_selection(digits.train)


if __name__ == "__main__":
    main()
