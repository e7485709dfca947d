"""Draw the crops of a photograph that confidence pruning keeps and prunes, for the page of the single shared image.

Run it as `python docs/scripts/pictures_crops.py DATA`, where DATA holds CIFAR-10; it takes about two minutes.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from matplotlib.figure import Figure
from sklearn.datasets import load_sample_image
from torch import Tensor

from distillkit import LabeledImages
from distillkit.data import load
from distillkit.generate import Patches
from distillkit.networks import ConvNet, build, split
from distillkit.rng import derive
from distillkit.select import select
from distillkit.training import Protocol, accuracy, train

OUT = Path(__file__).parents[1] / "pictures"
COUNT, KEEP, SHOWN = 5000, 500, 60


def main() -> None:
    """Train a network, select crops by its predictions, and draw kept and pruned crops with their confidences."""
    images = load("cifar10", root=sys.argv[1], size=16)
    data = images.train[torch.randperm(len(images.train), generator=derive(0, "images"))[:5000]]
    network = build(lambda: ConvNet(data.shape, 10, width=32, depth=2), 0)
    network = train(network, data, Protocol(epochs=8, batch=64, lr=0.02), generator=derive(0, "order"), progress=False)
    share = accuracy(network, images.test)
    photo = torch.from_numpy(load_sample_image("china.jpg").copy()).permute(2, 0, 1)
    patches = Patches(photo, 0, size=16, count=COUNT)
    labels = torch.zeros(COUNT, dtype=torch.long)
    crops = patches.set(range(COUNT), labels, normalization=data.normalization)
    with torch.no_grad():
        embeddings = split(network.eval()).features(crops.images).flatten(1)
        logits = network(crops.images)
    kept = select(embeddings, logits, keep=KEEP, kmeans_share=0.0, generator=derive(0, "selection"))
    confidence = logits.softmax(1).max(1).values
    pruned = torch.ones(COUNT, dtype=torch.bool)
    pruned[kept] = False
    draw(crops, {"kept": kept, "pruned": pruned.nonzero().flatten()}, confidence, logits.argmax(1), share)


def draw(crops: LabeledImages, groups: dict[str, Tensor], confidence: Tensor, predicted: Tensor, share: float) -> None:
    """Write the picture: random crops of each group, and histograms of the confidence.

    Args:
        crops: all crops.
        groups: indices of the crops by name of the group.
        confidence: the largest probability for each crop.
        predicted: the predicted class for each crop.
        share: test accuracy of the network.
    """
    figure = Figure(figsize=(10, 3.3), layout="constrained")
    axes = figure.subplots(1, 3, width_ratios=(4, 4, 3))
    for ax, (name, indices) in zip(axes, groups.items()):
        shown = indices[torch.randperm(len(indices), generator=derive(0, name))[:SHOWN]]
        ax.imshow(crops[shown].grid(columns=10).permute(1, 2, 0).numpy(), interpolation="nearest")
        classes = predicted[indices].bincount(minlength=10).sort(descending=True).values
        ax.set_title(
            f"{name}: {len(indices):,} crops\n{100 * classes[0] / len(indices):.0f} % in the largest class", fontsize=9
        )
        ax.set(xticks=[], yticks=[])
    bins = torch.linspace(0, 1, 21).tolist()
    for name, indices in groups.items():
        axes[2].hist(confidence[indices].tolist(), bins=bins, density=True, alpha=0.6, label=name)
    axes[2].set(xlabel="largest probability", ylabel="density", title=f"network of {100 * share:.0f} % test accuracy")
    axes[2].title.set_fontsize(9)
    axes[2].legend()
    figure.savefig(OUT / "single_image_crops.png", dpi=120)


if __name__ == "__main__":
    main()
