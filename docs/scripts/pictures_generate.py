"""Draw the pictures of the pages on inversion, noise and patches into docs/pictures.

Run it as `python docs/scripts/pictures_generate.py`; it takes about a minute and needs no files.
"""

from __future__ import annotations

from pathlib import Path

import torch
from matplotlib.figure import Figure
from PIL import Image
from sklearn.datasets import load_sample_image
from torch import Tensor
from torch.nn.functional import cross_entropy

from distillkit import LabeledImages
from distillkit.data import load
from distillkit.generate import Patches, cnn_noise, invert, stylegan_noise, upsampled_gaussian
from distillkit.networks import ConvNet, build
from distillkit.rng import derive

OUT = Path(__file__).parents[1] / "pictures"


def save(picture: Tensor, name: str, scale: int = 1) -> None:
    """Write an image float [C, H, W] in [0, 1]; each pixel becomes a square of `scale` pixels."""
    pixels = (picture * 255).round().to(torch.uint8).repeat_interleave(scale, 1).repeat_interleave(scale, 2)
    Image.fromarray(pixels.expand(3, -1, -1).permute(1, 2, 0).numpy()).save(OUT / f"{name}.png")


def labelled(pictures: dict[str, Tensor], name: str, rows: list[str], label: str, width: float, height: float) -> None:
    """Write images float [C, H, W] side by side with titles, and row labels at the left."""
    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.subplots(1, len(pictures), squeeze=False)[0]
    for ax, (title, picture) in zip(axes, pictures.items(), strict=True):
        ax.imshow(picture.expand(3, -1, -1).permute(1, 2, 0).numpy(), interpolation="nearest")
        ax.set_title(title, fontsize=9)
        ax.set(xticks=[], yticks=[])
        ax.spines[:].set_visible(False)
    side = picture.shape[1] / len(rows)
    axes[0].set_yticks([(i + 0.5) * side for i in range(len(rows))], rows, fontsize=8)
    axes[0].tick_params(length=0)
    axes[0].set_ylabel(label)
    figure.savefig(OUT / f"{name}.png", dpi=200)


def patches() -> None:
    """Draw crops of scikit-learn's photograph `china.jpg` (CC BY 2.0)."""
    photo = torch.from_numpy(load_sample_image("china.jpg").copy()).permute(2, 0, 1)
    crops = Patches(photo).set(range(160), torch.zeros(160, dtype=torch.long))
    save(crops.grid(columns=20), "patches")


def noise() -> None:
    """Draw a block for each kind of noise: six classes, one row per class."""
    kinds = {
        "StyleGAN2": stylegan_noise(6, 40, width=64),
        "StyleGAN2, noise_gain=0.5": stylegan_noise(6, 40, width=64, noise_gain=0.5),
        "StyleGAN2, clamp=True": stylegan_noise(6, 40, width=64, clamp=True),
        "upsampled Gaussian": upsampled_gaussian(6, 40),
        "small CNNs": cnn_noise(6, 40),
    }
    some = torch.arange(6).repeat_interleave(6) * 40 + torch.arange(6).repeat(6)
    pictures = {title: kind[some].grid(columns=6, padding=2) for title, kind in kinds.items()}
    labelled(pictures, "noise", [str(k) for k in range(6)], "class", 10, 2.4)


def inverted() -> None:
    """Draw images of digits above images inverted from a network with batch norm trained on them."""
    digits = load("digits", size=16).train
    network = build(lambda: ConvNet(digits.shape, 10, width=32, norm="batch"), 0)
    adam, draws = torch.optim.Adam(network.parameters(), lr=2e-3), derive(0, "batches")
    for _ in range(200):
        some = digits[torch.randint(len(digits), (64,), generator=draws)]
        adam.zero_grad()
        cross_entropy(network(some.images), some.labels).backward()
        adam.step()
    made = invert(
        network,
        torch.arange(10).repeat(10),
        shape=digits.shape,
        steps=300,
        lr=0.05,
        batch_norm=1.0,
        total_variation=0.01,
        normalization=digits.normalization,
    )
    real = torch.stack([(digits.labels == k).nonzero()[0, 0] for k in range(10)])
    rows = LabeledImages.concatenate([plain(digits[real]), plain(made[:30])])
    names = ["real", *["inverted"] * 3]
    labelled({"classes 0 to 9": rows.grid(columns=10)}, "inverted", names, "", 5, 2.4)


def plain(images: LabeledImages) -> LabeledImages:
    """Return the set without columns."""
    return images.replace(columns={})


def main() -> None:
    """Draw all pictures."""
    OUT.mkdir(exist_ok=True)
    patches()
    noise()
    inverted()


if __name__ == "__main__":
    main()
