"""Image similarity metrics: PSNR, SSIM and LPIPS, one value per pair, on pixels in [0, 1].

A *higher* PSNR or SSIM and a *lower* LPIPS mean that an image is closer to its reference, that is, that an attack has
revealed more. The i-th image is compared with the i-th reference. If an attack returns images in another order, pair
them with `attacks.match` first.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from distillkit._utils import check

__all__ = ["lpips", "psnr", "ssim"]

_TRUNKS = {"alex": ("alexnet", 31), "vgg": ("vgg16", 16), "squeeze": ("squeezenet1_1", 17)}
"""For each LPIPS network, torchvision's name of its trunk and the smallest image size that it accepts."""


def psnr(images: Tensor, references: Tensor) -> Tensor:
    """Return the peak signal-to-noise ratio of each pair of images in decibels, 10 log10(1 / MSE).

    PSNR is the simplest measure of a reconstruction. It compares images pixel by pixel, so a shift by one pixel lowers
    it. It is infinite for equal images. Some libraries report a single PSNR from the mean squared error of the whole
    batch, which differs from the mean of the values that this function returns.

    Args:
        images: float [N, C, H, W] in [0, 1].
        references: reference images, of the same shape, dtype and device.

    Returns:
        PSNR of each pair, float [N]; higher is closer.

    Raises:
        TypeError, ValueError: the shapes differ, or a value is outside [0, 1].
    """
    _check(images, references)
    return -10 * (images - references).square().flatten(1).mean(1).log10()


def ssim(images: Tensor, references: Tensor, *, window: int = 11) -> Tensor:
    """Return the structural similarity (SSIM) of each pair of images (Wang et al., 2004).

    The value is a mean over positions and channels. SSIM compares means, contrasts and patterns in small windows. If
    only the brightness of an image is wrong, SSIM may still be high, while `psnr` is low. Equal images give exactly 1.
    The values are computed by kornia with the paper's constants: a Gaussian window with sigma 1.5, K1 = 0.01, K2 =
    0.03, data range 1, and only positions where the window lies inside the image.

    Args:
        images: float [N, C, H, W] in [0, 1].
        references: reference images, of the same shape, dtype and device.
        window: width of the window in pixels, odd. The paper's 11 does not fit into images smaller than 11 pixels.
            Values for different windows are not comparable.

    Returns:
        SSIM of each pair, float [N] in [-1, 1]; higher is closer.

    Raises:
        TypeError, ValueError: the shapes differ, a value is outside [0, 1], or the window is even or larger than the
            images.
    """
    _check(images, references)
    check.positive_int(window, "window")
    if window % 2 == 0:
        raise ValueError(f"window must be odd, got {window}")
    if window > min(images.shape[-2:]):
        raise ValueError(f"window must fit in the images, {list(images.shape[-2:])} pixels, got {window}")
    from kornia.metrics import ssim as ssim_map

    return ssim_map(images, references, window, max_val=1.0, eps=0.0, padding="valid").flatten(1).mean(1)


def lpips(
    images: Tensor,
    references: Tensor,
    *,
    net: str = "alex",
    resize: int | None = None,
    chunk: int = 64,
    download: bool = False,
) -> Tensor:
    """Return the learned perceptual distance of each pair of images (LPIPS; Zhang et al., CVPR 2018).

    The distance approximates how different two images look to people. It is computed by the authors' package, with an
    ImageNet network and linear layers that were trained on human judgments. The package contains only the linear
    layers. The network's weights are torchvision's, and are loaded from torch.hub's folder. They are downloaded only if
    `download` is true. The distance is computed in float32 and has no gradient.

    Args:
        images: images to compare, float [N, C, H, W] in [0, 1], C in {1, 3}. A gray channel is repeated. The images are
            scaled to [-1, 1] internally.
        references: reference images, of the same shape, dtype and device.
        net: `alex` (the authors' choice for scoring, 233 MB), `vgg` (528 MB) or `squeeze` (5 MB).
        resize: width in pixels of the square to which both images are first resized (bilinear with antialiasing). The
            networks need at least 31 (`alex`), 16 (`vgg`) or 17 (`squeeze`) pixels in height and width, so smaller
            images must be resized. Report `resize`, because it changes the values.
        chunk: number of pairs per forward pass; affects memory, not values.
        download: whether to download missing weights.

    Returns:
        Distance of each pair, float [N]; *lower* is closer, 0 for equal images.

    Raises:
        FileNotFoundError: the weights are absent. The message names the file, the folder and a download command.
        TypeError, ValueError: the shapes differ; a value is outside [0, 1]; the images are too small, or have another
            number of channels; or the weights file is damaged.
    """
    _check(images, references)
    check.positive_int(chunk, "chunk")
    least = _TRUNKS[check.one_of(net, "net", tuple(_TRUNKS))][1]
    if images.shape[1] not in (1, 3):
        raise ValueError(f"images must have 1 or 3 channels for LPIPS, got {images.shape[1]}")
    if resize is not None:
        check.positive_int(resize, "resize")
    if (smallest := resize or min(images.shape[-2:])) < least:
        raise ValueError(f"images must have at least {least} pixels a side for net={net!r}, got {smallest}; resize=64")
    network = _network(net, _weights(net, download), images.device)
    values = []
    with torch.no_grad():
        for pair in zip(images.split(chunk), references.split(chunk)):
            a, b = (_prepared(x, resize) for x in pair)
            values.append(network(a, b).flatten())
    return torch.cat(values).to(images.dtype)


def _check(images: Tensor, references: Tensor) -> None:
    for name, batch in (("images", images), ("references", references)):
        check.batch_of_images(batch, name)
        low, high = float(batch.detach().min()), float(batch.detach().max())
        if low < 0 or high > 1:
            raise ValueError(
                f"{name} must be pixels in [0, 1], got {low:.4g} to {high:.4g}: they seem normalized; use set.pixels()"
            )
    for what in ("shape", "dtype", "device"):
        one, other = getattr(images, what), getattr(references, what)
        if one != other:
            raise ValueError(f"images and references must have the same {what}, got {one} and {other}")


def _prepared(pixels: Tensor, resize: int | None) -> Tensor:
    pixels = pixels.float().expand(-1, 3, -1, -1)
    if resize is not None:
        pixels = F.interpolate(pixels, (resize, resize), mode="bilinear", antialias=True)
    return 2 * pixels - 1


def _weights(net: str, download: bool) -> Path:
    from torchvision.models import get_model_weights

    url = get_model_weights(_TRUNKS[net][0])["IMAGENET1K_V1"].url
    file = Path(torch.hub.get_dir()) / "checkpoints" / url.rsplit("/", 1)[1]
    if not file.is_file():
        if not download:
            raise FileNotFoundError(
                f"LPIPS ({net}) needs the weights {file.name} in {file.parent}, which are missing. Get them with\n"
                f"    curl --create-dirs -o {file} {url}\n"
                "or call lpips(..., download=True). The folder is torch.hub's: set TORCH_HOME to move it."
            )
        file.parent.mkdir(parents=True, exist_ok=True)
        digest = file.stem.rsplit("-", 1)[1]
        torch.hub.download_url_to_file(url, str(file), hash_prefix=digest, progress=False)
    return file


@functools.cache
def _network(net: str, file: Path, device: torch.device) -> Callable[[Tensor, Tensor], Tensor]:
    """Build and cache the LPIPS network for a device."""
    import lpips as package

    try:
        with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
            warnings.simplefilter("ignore")
            network = package.LPIPS(net=net, version="0.1", verbose=False)
    except Exception as error:
        raise ValueError(
            f"{file} cannot be loaded ({str(error) or type(error).__name__}); delete it and download it again"
        ) from error
    return network.to(device)
