"""Generator network of StyleGAN2, in plain PyTorch operations."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from distillkit._utils import check
from distillkit.generate._latents import require_latents

_SLOPE, _GAIN = 0.2, math.sqrt(2)


def _base_and_doublings(size: int) -> tuple[int, int]:
    """Return the side of the first feature maps in pixels, 4 to 8, and how often it is doubled to reach `size`."""
    doublings = max(0, int(math.log2(size / 4)))
    return -(-size // 2**doublings), doublings


class _Dense(nn.Module):
    """Linear layer with an equalized learning rate: weights from N(0, 1), scaled by 1 / sqrt(fan in) in each call."""

    def __init__(self, inputs: int, outputs: int, bias: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs))
        self.bias = bias

    def initialize(self, generator: torch.Generator) -> None:
        _draw(self.weight, generator)

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.T / math.sqrt(self.weight.shape[1]) + self.bias


class _ModulatedConv(nn.Module):
    """Modulated and demodulated convolution of StyleGAN2 (Eq. 1 and 3).

    The layer scales feature maps instead of weights. The result is the same, but all images of a batch can use one
    kernel.
    """

    def __init__(
        self, inputs: int, outputs: int, kernel: int, latent: int, *, up: bool = False, demodulate: bool = True
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs, kernel, kernel))
        self.style = _Dense(latent, inputs, bias=1.0)
        self.up, self.demodulate = up, demodulate

    def initialize(self, generator: torch.Generator) -> None:
        _draw(self.weight, generator)

    def forward(self, x: Tensor, w: Tensor) -> Tensor:
        style = self.style(w)
        weight = self.weight / math.sqrt(self.weight[0].numel())
        x = x * style[:, :, None, None]
        if self.up:
            x = _blur(F.conv_transpose2d(x, weight.transpose(0, 1), stride=2))
        else:
            x = F.conv2d(x, weight, padding=weight.shape[2] // 2)
        if self.demodulate:
            squared = style.square() @ weight.square().sum((2, 3)).T
            x = x * (squared + 1e-8).rsqrt()[:, :, None, None]
        return x


class StyleGAN2(nn.Module):
    """Untrained StyleGAN2 with skip connections, which maps latents [B, latent] to images [B, C, size, size].

    The mapping network consists of PixelNorm and `depth` linear layers. The constant input of the synthesis network has
    a side of 4 to 8 pixels, which is doubled until it is at least `size`: for example, 7 is doubled twice for a size of
    28. If the final side is larger than `size`, the center of the images is returned.

    The first resolution has one modulated 3x3 convolution. Every later resolution has two, of which the first doubles
    the resolution, with the blur [1, 3, 3, 1]. Each resolution also has a 1x1 convolution to the C image channels. The
    images are the sum of the outputs of these 1x1 convolutions, upsampled to the final resolution. Their pixel values
    are unbounded. Weights are drawn from N(0, 1), and scaled in each call. Learned biases and noise gains are omitted,
    because they are zero before training. To add noise, pass noise and a gain to `forward`.

    Args:
        size: height and width, at least 4.
        channels: number of channels C of the images.
        latent: length of a latent vector.
        width: number of feature maps at resolutions up to 32 pixels. Each further doubling of the resolution halves
            this number. The paper uses 512.
        depth: number of layers of the mapping network.

    Raises:
        TypeError, ValueError: an argument is too small.

    Paper: Karras et al., "Analyzing and improving the image quality of StyleGAN" (CVPR 2020), section 2 and figure 2,
    and section 4.1 for the skip connections. No custom CUDA operation is needed.
    """

    def __init__(
        self, size: int = 32, channels: int = 3, *, latent: int = 64, width: int = 512, depth: int = 1
    ) -> None:
        super().__init__()
        self.size = check.positive_int(size, "size", least=4)
        channels = check.positive_int(channels, "channels")
        latent = check.positive_int(latent, "latent")
        width = check.positive_int(width, "width", least=4)
        depth = check.positive_int(depth, "depth")
        self.latent = latent
        base, doublings = _base_and_doublings(size)
        sides = [base * 2**k for k in range(doublings + 1)]
        maps = [max(4, min(width, width * 32 // side)) for side in sides]
        self.mapping = nn.ModuleList(_Dense(latent, latent, bias=0.0) for _ in range(depth))
        self.constant = nn.Parameter(torch.empty(1, maps[0], base, base))
        self.convs = nn.ModuleList([_ModulatedConv(maps[0], maps[0], 3, latent)])
        self.colours = nn.ModuleList([_ModulatedConv(maps[0], channels, 1, latent, demodulate=False)])
        self.noise_sides = [base]
        for before, here, side in zip(maps, maps[1:], sides[1:], strict=False):
            self.convs.append(_ModulatedConv(before, here, 3, latent, up=True))
            self.convs.append(_ModulatedConv(here, here, 3, latent))
            self.colours.append(_ModulatedConv(here, channels, 1, latent, demodulate=False))
            self.noise_sides += [side, side]

    def initialize(self, generator: torch.Generator) -> None:
        """Draw the network's constant input from `generator`. `networks.build` calls this method."""
        _draw(self.constant, generator)

    def forward(self, z: Tensor, noise: Sequence[Tensor] | None = None, noise_gain: float = 0.0) -> Tensor:
        """Generate images [B, C, size, size] with unbounded pixel values from latents.

        Args:
            z: latents, float [B, latent]. Only their direction matters, because PixelNorm scales them to a fixed
                length.
            noise: one tensor [B, 1, side, side] for each side in the attribute `noise_sides`. It is added to the
                feature maps before the activations.
            noise_gain: factor by which the noise is multiplied. In StyleGAN2, this factor is a learned parameter with
                the initial value 0, which is therefore the default here.
        """
        require_latents(z, self.latent, "z")
        w = z * (z.square().mean(1, keepdim=True) + 1e-8).rsqrt()
        for layer in self.mapping:
            w = _activate(layer(w))
        x, image = self.constant.expand(len(z), -1, -1, -1), None
        for k, conv in enumerate(self.convs):
            x = conv(x, w)
            if noise is not None:
                x = x + noise_gain * noise[k]
            x = _activate(x)
            if k % 2 == 0:
                colours = self.colours[k // 2](x, w)
                image = colours if image is None else _double(image) + colours
        assert image is not None
        margin = (image.shape[-1] - self.size) // 2
        return image[..., margin : margin + self.size, margin : margin + self.size]


def _activate(x: Tensor) -> Tensor:
    return F.leaky_relu(x, _SLOPE) * _GAIN


@torch.no_grad()
def _draw(parameter: nn.Parameter, generator: torch.Generator) -> None:
    parameter.copy_(torch.randn(parameter.shape, generator=generator))


def _kernel(x: Tensor) -> Tensor:
    """Return the 2D blur kernel made from [1, 3, 3, 1] for feature maps `x` [B, C, H, W], as a tensor [C, 1, 4, 4].

    The kernel of each channel sums to 4, because upsampling inserts zeros in every second row and column."""
    line = x.new_tensor([1.0, 3.0, 3.0, 1.0]) / 4
    return torch.outer(line, line).expand(x.shape[1], 1, 4, 4)


def _blur(x: Tensor) -> Tensor:
    """Blur the output [2H + 1, 2W + 1] of a transposed convolution, and return it as [2H, 2W]."""
    return F.conv2d(x, _kernel(x), padding=1, groups=x.shape[1])


def _double(image: Tensor) -> Tensor:
    return F.conv_transpose2d(image, _kernel(image), stride=2, padding=1, groups=image.shape[1])
