"""Draw the pictures of the pages on inversion, noise and patches into docs/pictures.

Run it as `python docs/make_generate_pictures.py`; it takes about a minute and needs no files.
"""

from __future__ import annotations

from pathlib import Path

import torch
from PIL import Image
from sklearn.datasets import load_sample_image
from torch import Tensor
from torch.nn.functional import cross_entropy

from distillkit import LabeledImages
from distillkit.data import load
from distillkit.generate import Patches, cnn_noise, invert, stylegan_noise, upsampled_gaussian
from distillkit.networks import ConvNet, build
from distillkit.rng import derive

OUT = Path(__file__).parent / "pictures"


def save(picture: Tensor, name: str, scale: int = 1) -> None:
    """Write a picture float [C, H, W] in [0, 1]; a pixel becomes a square of `scale` pixels."""
    pixels = (picture * 255).round().to(torch.uint8).repeat_interleave(scale, 1).repeat_interleave(scale, 2)
    Image.fromarray(pixels.expand(3, -1, -1).permute(1, 2, 0).numpy()).save(OUT / f"{name}.png")


def patches() -> None:
    """Crops of scikit-learn's photograph `china.jpg` (CC BY 2.0)."""
    photo = torch.from_numpy(load_sample_image("china.jpg").copy()).permute(2, 0, 1)
    crops = Patches(photo).set(range(160), torch.zeros(160, dtype=torch.long))
    save(crops.grid(columns=20), "patches")


def noise() -> None:
    """A block for each kind of noise, six classes a block, one class a row."""
    kinds = (
        stylegan_noise(6, 40, width=64),
        stylegan_noise(6, 40, width=64, noise_gain=0.5),
        stylegan_noise(6, 40, width=64, clamp=True),
        upsampled_gaussian(6, 40),
        cnn_noise(6, 40),
    )
    some = torch.arange(6).repeat_interleave(6) * 40 + torch.arange(6).repeat(6)
    save(torch.cat([kind[some].grid(columns=6, padding=2) for kind in kinds], 2), "noise")


def inverted() -> None:
    """Above images of digits, below images inverted from a network with batch norm that was trained on them."""
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
    save(rows.grid(columns=10), "inverted", scale=3)


def plain(images: LabeledImages) -> LabeledImages:
    """Without columns."""
    return images.replace(columns={})


def main() -> None:
    """Draw all pictures."""
    OUT.mkdir(exist_ok=True)
    patches()
    noise()
    inverted()


if __name__ == "__main__":
    main()
