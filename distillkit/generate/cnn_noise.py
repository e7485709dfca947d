"""Noise images of several classes, from small untrained CNNs. A network can learn to distinguish the classes."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from distillkit._utils import check
from distillkit._utils.progress import Bar, bar
from distillkit._utils.provenance import provenance
from distillkit.generate._latents import require_latents
from distillkit.generate._noise_set import class_latents, map_chunks, to_noise_set
from distillkit.networks._factory import build
from distillkit.normalization import Normalization
from distillkit.rng import as_generator
from distillkit.sets import LabeledImages


class NoiseDecoder(nn.Module):
    """Simple CNN generator of VHL, which maps latents [B, latent] to images [B, C, size, size] in (-1, 1).

    The network consists of, in this order:

    - a linear layer to 8 feature maps with a quarter of the final side (rounded up), batch norm and ReLU;
    - four transposed 3x3 convolutions with `width` feature maps, each followed by batch norm and ReLU. The first two
      are also followed by an upsampling that doubles the side;
    - three 5x5 convolutions with ReLU between them, and tanh.

    Args:
        size: height and width of the images.
        channels: number of channels C of the images.
        latent: length of a latent vector.
        width: number of feature maps of each convolution.

    Raises:
        TypeError, ValueError: an argument is not a positive integer.

    Paper: Tang et al., "Virtual homogeneity learning" (VHL, ICML 2022), appendix C.3, with three final convolutions.
    The authors' code has four.
    """

    def __init__(self, size: int = 32, channels: int = 3, *, latent: int = 64, width: int = 64) -> None:
        super().__init__()
        self.size = check.positive_int(size, "size")
        channels = check.positive_int(channels, "channels")
        latent = check.positive_int(latent, "latent")
        width = check.positive_int(width, "width")
        base = -(-size // 4)
        self.latent = latent
        layers: list[nn.Module] = [
            nn.Linear(latent, 8 * base * base),
            nn.Unflatten(1, (8, base, base)),
            nn.BatchNorm2d(8),
            nn.ReLU(),
        ]
        for k in range(4):
            layers += [
                nn.ConvTranspose2d(width if k else 8, width, 3, padding=1),
                nn.BatchNorm2d(width),
                nn.ReLU(),
                nn.Upsample(scale_factor=2) if k < 2 else nn.Identity(),
            ]
        for outputs in (width, width, channels):
            layers += [nn.Conv2d(width, outputs, 5, padding=2), nn.ReLU()]
        layers[-1] = nn.Tanh()
        self.layers = nn.Sequential(*layers)

    def forward(self, latents: Tensor) -> Tensor:
        """Generate images [B, C, size, size] in (-1, 1) from `latents` [B, latent]."""
        return self.layers(require_latents(latents, self.latent, "latents"))[..., : self.size, : self.size]


def decorrelation(images: Tensor) -> Tensor:
    """Return VHL's decorrelation loss, which is small if the pixels of a batch are uncorrelated.

    VHL's authors minimize this loss on the generators of `cnn_noise`. `images` are float [B, C, H, W]. Each channel of
    each image is resized to 8 x 8 (bilinear) and scaled to norm 1, but not centered. Let X [B, 64] be the result for
    one channel. The loss of the channel is the sum of the squared off-diagonal entries of X^T X, divided by 64^2 (B -
    1), or by 64^2 if B is 1. The function returns the sum over the channels.

    Paper: VHL (ICML 2022), appendix C.3; implemented like `cov_non_diag_norm` in the authors' code (wizard1203/VHL,
    loss_fn/cov_loss.py).
    """
    check.batch_of_images(images, values=False)
    check.has_values(images, "images")
    small = F.interpolate(images, size=(8, 8), mode="bilinear").flatten(2)
    rows = F.normalize(small, dim=2).transpose(0, 1)
    products = (rows.transpose(1, 2) @ rows).square()
    off_diagonal = products.sum() - products.diagonal(dim1=1, dim2=2).sum()
    return off_diagonal / (64 * 64 * max(1, len(images) - 1))


def cnn_noise(
    num_classes: int,
    per_class: int,
    size: int = 32,
    channels: int = 3,
    *,
    latent: int = 64,
    mean_std: float = 0.0,
    sample_std: float = 1.0,
    shared: bool = False,
    decorrelation_steps: int = 0,
    width: int = 64,
    clamp: bool = False,
    normalization: Normalization | None = None,
    chunk: int = 16,
    device: torch.device | str = "cpu",
    generator: int | torch.Generator = 0,
    progress: bool = True,
) -> LabeledImages:
    """Generate labeled noise images with small untrained CNNs: one CNN per class, or a single CNN for all classes.

    VHL (virtual homogeneity learning) uses such images as virtual data that all clients share. Latents are sampled as
    in `stylegan_noise`. The batch norm statistics of each network are computed once, from up to 256 latents.

    Args:
        latent: length of a latent vector. VHL's paper uses 64, its code 8.
        mean_std: standard deviation of the latent means of the classes. It is 0 in the authors' code, where only the
            networks of the classes differ.
        shared: whether all classes share one network. Only the latent means then differ between classes, so `mean_std`
            must be above 0.
        decorrelation_steps: number of SGD steps that train each network to generate images with uncorrelated pixels
            (loss function `decorrelation`, learning rate 0.01, weight decay 1e-4, 64 latents per step). The authors'
            code uses 50.
        width: number of feature maps of each convolution.
        num_classes, per_class, size, channels, sample_std, clamp, normalization, chunk, device, generator, progress: as
            in `stylegan_noise`.

    Returns:
        The set, sorted by class.

    Raises:
        TypeError, ValueError: an argument is invalid.

    Paper: VHL (ICML 2022), appendix C.3, and `train_generator_diversity` in the authors' code. The momentum of 0.9 in
    their code has no effect, because the code creates a new optimizer for each step. Deviations: the authors' code
    clamps pixels to [0, 1] and saves JPEG files. Here, pixels are scaled by default (see `clamp` in `stylegan_noise`),
    and no JPEG compression is used. The authors' code draws new latents in each SGD step. This function instead samples
    64 of the latents from which the images are generated.
    """
    decorrelation_steps = check.positive_int(decorrelation_steps, "decorrelation_steps", least=0)
    chunk = check.positive_int(chunk, "chunk")
    if check.boolean(shared, "shared") and not mean_std:
        raise ValueError("mean_std must be greater than 0 with shared=True: nothing else distinguishes the classes")
    device, latent = check.device(device), check.positive_int(latent, "latent")
    given, generator = generator, as_generator(generator)
    latents = class_latents(num_classes, per_class, (latent,), mean_std, sample_std, generator).to(device)
    raw, groups = [], [latents] if shared else latents.split(per_class)
    total = len(groups) * decorrelation_steps + len(latents)
    with bar(total, "cnn_noise", progress=progress) as shown:
        for own in groups:
            network = build(lambda: NoiseDecoder(size, channels, latent=latent, width=width), generator).to(device)
            _decorrelate(network, own, decorrelation_steps, generator, shown)
            _calibrate(network, own, generator)
            raw.append(map_chunks(network.eval(), chunk, device, shown, own))
    info = {"mean_std": mean_std, "sample_std": sample_std, "shared": shared, "width": width, **provenance(given)}
    return to_noise_set(
        torch.cat(raw), num_classes, clamp=clamp, normalization=normalization, method="cnn_noise", **info
    )


def _decorrelate(network: nn.Module, latents: Tensor, steps: int, generator: torch.Generator, shown: Bar) -> None:
    sgd = torch.optim.SGD(network.parameters(), lr=0.01, weight_decay=1e-4, foreach=False)
    for _ in range(steps):
        some = torch.randint(len(latents), (64,), generator=generator).to(latents.device)
        sgd.zero_grad()
        decorrelation(network(latents[some])).backward()
        sgd.step()
        shown.update()


@torch.no_grad()
def _calibrate(network: nn.Module, latents: Tensor, generator: torch.Generator) -> None:
    """Set the running statistics of batch norm from up to 256 latents.

    The generated images then do not depend on how many latents are processed in one forward pass.
    """
    for module in network.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.momentum = 1.0
    network(latents[torch.randperm(len(latents), generator=generator)[:256].to(latents.device)])
