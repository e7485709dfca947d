"""What all networks of this package share: the split, the choice of normalisation, and the checks."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from distillkit._utils.check import one_of, positive_int
from distillkit._utils.configurable import Configurable

__all__ = ["AveragePool", "ImageNetwork", "InstanceNorm", "MaxPool", "activation_layer", "norm_layer"]

Shape = tuple[int, int, int]


class _ReLU(nn.ReLU):
    """A ReLU that works in place where no graph is recorded, which saves up to a tenth of ConvNet's forward pass."""

    def forward(self, maps: Tensor) -> Tensor:
        return F.relu(maps, inplace=not torch.is_grad_enabled())


class InstanceNorm(nn.GroupNorm):
    """Instance normalisation: a group norm of one channel a group, with its parameters and to its numbers.

    PyTorch's own is slow where maps are small and channels_last, as they are when `forward_chunks` sends images
    through a network on a CPU: there, and where no graph is recorded, it is written out, which is several times as
    fast and as exact.

    Args:
        channels: of the maps [N, channels, H, W].
    """

    def __init__(self, channels: int) -> None:
        super().__init__(channels, channels)

    def forward(self, maps: Tensor) -> Tensor:
        """The normalised maps, of the shape of `maps` [N, channels, H, W], which stay as they are."""
        if torch.is_grad_enabled() or not _small_and_channels_last(maps):
            return super().forward(maps)
        centred = maps - maps.mean((2, 3), keepdim=True)
        scale = centred.square().mean((2, 3), keepdim=True).add_(self.eps).rsqrt_().mul_(self.weight.view(-1, 1, 1))
        return torch.addcmul(self.bias.view(-1, 1, 1), centred, scale)


def _small_and_channels_last(maps: Tensor) -> bool:
    """Whether written out is faster: measured at 8x8 to 28x28; at 32x32 PyTorch takes another way, which is."""
    plain = maps.device.type == "cpu" and maps.ndim == 4 and not torch.is_autocast_enabled("cpu")
    return plain and maps.stride(1) == 1 and not maps.is_contiguous() and maps.shape[2] * maps.shape[3] < 1024


class AveragePool(nn.AvgPool2d):
    """2x2 average pooling, on a CPU as a product with a matrix of quarters, which is faster forward and back.

    The product takes two rows of a map at once, so an infinite value makes all of its two rows NaN, where
    `nn.AvgPool2d` has one infinite mean.
    """

    def __init__(self) -> None:
        super().__init__(2)

    def forward(self, maps: Tensor) -> Tensor:
        """The means [..., H // 2, W // 2] of `maps` [..., H, W]."""
        if not _even_and_narrow(maps):
            return super().forward(maps)
        *some, rows, columns = maps.shape
        half = columns // 2
        quarters = torch.eye(half, dtype=maps.dtype) / 4
        quarters = quarters[None, :, None].expand(2, half, 2, half).reshape(2 * columns, half)
        return (maps.reshape(-1, 2 * columns) @ quarters).view(*some, rows // 2, half)


def _even_and_narrow(maps: Tensor) -> bool:
    """Whether the product is faster and the same: measured up to 64 columns; from 128 on it costs more."""
    rows, columns = maps.shape[-2:]
    plain = maps.device.type == "cpu" and maps.dtype in (torch.float32, torch.float64) and maps.is_contiguous()
    even = rows % 2 == 0 and columns % 2 == 0 and 0 < columns <= 64
    return plain and even and maps.numel() > 0 and not torch.is_autocast_enabled("cpu")


class MaxPool(nn.MaxPool2d):
    """2x2 max pooling, where no graph is recorded on a CPU as the larger of rows, then of columns: many times as fast.

    PyTorch's kernel also looks for where each maximum was, pixel by pixel, which only a gradient needs.
    """

    def __init__(self) -> None:
        super().__init__(2)

    def forward(self, maps: Tensor) -> Tensor:
        """The largest values [..., H // 2, W // 2] of `maps` [..., H, W]."""
        rows, columns = maps.shape[-2:]
        even = rows % 2 == 0 and columns % 2 == 0 and maps.numel() > 0
        if torch.is_grad_enabled() or maps.device.type != "cpu" or not even:
            return cast(Tensor, super().forward(maps))
        upper, lower = maps.unflatten(-2, (rows // 2, 2)).unbind(-2)
        left, right = torch.maximum(upper, lower).unflatten(-1, (columns // 2, 2)).unbind(-1)
        return torch.maximum(left, right)


_ACTIVATIONS: dict[str, type[nn.Module]] = {
    "leaky_relu": nn.LeakyReLU,
    "relu": _ReLU,
    "sigmoid": nn.Sigmoid,
    "silu": nn.SiLU,
    "tanh": nn.Tanh,
}


class ImageNetwork(Configurable, nn.Module):
    """A classifier of images whose forward is `classifier(features(images))`; all our networks are one.

    Args:
        shape: channels, height and width of the images.
        num_classes: K, rows of the classifier, at least 2.
        body: maps images [N, C, H, W] to anything that flattens to [N, embedding_dim].
        embedding_dim: length of one image's embedding.
        any_size: whether `body` takes images of other heights and widths as well (it pools adaptively).

    Attributes:
        shape, num_classes, embedding_dim: as given.
        body, classifier: the two modules; the classifier is an `nn.Linear`.
        chunked_stem: whether a pass without gradients computes its first block in chunks on a CPU, which lets
            `chunking.chunk_size` send more images at once.

    Raises:
        TypeError, ValueError: a shape that is not three positive integers, fewer than two classes, or no embedding.
    """

    chunked_stem = False

    def __init__(
        self, shape: Shape, num_classes: int, body: nn.Module, embedding_dim: int, *, any_size: bool = False
    ) -> None:
        super().__init__()
        self.shape = image_shape(shape)
        self.num_classes = positive_int(num_classes, "num_classes", least=2)
        self.embedding_dim = positive_int(embedding_dim, "embedding_dim")
        self.any_size = any_size
        self.body = body
        self.classifier = nn.Linear(embedding_dim, num_classes)

    def features(self, images: Tensor) -> Tensor:
        """The embedding of each image, float [N, embedding_dim].

        Args:
            images: float [N, C, H, W], in any memory format.

        Raises:
            ValueError: the images do not have the shape the network was built for.
        """
        channels, height, width = self.shape
        fits = images.ndim == 4 and images.shape[1] == channels
        if not fits or not (self.any_size or images.shape[2:] == (height, width)):
            wanted = f"[N, {channels}, H, W]" if self.any_size else f"[N, {channels}, {height}, {width}]"
            raise ValueError(f"images must have shape {wanted} for this network, got {list(images.shape)}")
        return self._maps(images).flatten(1)

    def _maps(self, images: Tensor) -> Tensor:
        return cast(Tensor, self.body(images))

    def forward(self, images: Tensor) -> Tensor:
        """The logits [N, num_classes] of `images` [N, C, H, W]."""
        return cast(Tensor, self.classifier(self.features(images)))


def image_shape(shape: Shape) -> Shape:
    """The shape that a network was asked for, as a tuple of ints.

    Args:
        shape: (channels, height, width).

    Raises:
        TypeError, ValueError: anything but three positive integers.
    """
    if not isinstance(shape, tuple | list) or len(shape) != 3:
        raise ValueError(f"shape must be (channels, height, width), got {shape!r}")
    channels, height, width = (positive_int(n, f"shape[{i}]") for i, n in enumerate(shape))
    return channels, height, width


def norm_layer(kind: str, channels: int, *, groups: int = 2) -> nn.Module:
    """The normalisation layer of that name for maps [N, channels, H, W], with a learned scale and shift a channel.

    "instance" and "layer" are `nn.GroupNorm` with as many groups as channels (`InstanceNorm`), and with one. That
    equals `nn.InstanceNorm2d`, is several times as fast on a CPU, and its second derivatives are right under every mode
    of automatic differentiation (those of `nn.InstanceNorm2d` are not).

    Args:
        kind: "instance" (each channel of each image by itself), "group" (`groups` groups of channels of each
            image), "layer" (all channels of each image), "batch" (each channel over the batch, with running
            statistics) or "none".
        channels: number of channels.
        groups: for "group" only; must divide `channels`.

    Raises:
        ValueError: no such kind, or `groups` does not divide `channels`.
    """
    one_of(kind, "norm", ("batch", "group", "instance", "layer", "none"))
    channels, groups = positive_int(channels, "channels"), positive_int(groups, "groups")
    if kind == "none":
        return nn.Identity()
    if kind == "batch":
        return nn.BatchNorm2d(channels)
    if kind == "group" and channels % positive_int(groups, "groups"):
        raise ValueError(f"groups must divide the {channels} channels of every layer, got {groups}")
    if kind == "instance":
        return InstanceNorm(channels)
    return nn.GroupNorm({"layer": 1, "group": groups}[kind], channels)


def activation_layer(kind: str) -> nn.Module:
    """The activation layer of that name.

    Under `torch.no_grad()` relu overwrites its input, which must be a tensor of the network's own: a hook that keeps
    the output of the layer before it must copy it.

    Args:
        kind: "relu", "leaky_relu" (slope 0.01), "sigmoid", "silu" or "tanh".

    Raises:
        ValueError: no such activation.
    """
    return _ACTIVATIONS[one_of(kind, "activation", _ACTIVATIONS)]()


def require_spatial_maps(norm: str, height: int, width: int) -> None:
    """Refuse instance normalisation of maps of one pixel: it would answer the same for every image.

    Args:
        norm: the kind of normalisation; every other one is let through.
        height, width: of the maps that it is to normalise.

    Raises:
        ValueError: norm="instance" on maps of 1x1.
    """
    if norm == "instance" and height * width == 1:
        raise ValueError(
            "norm='instance' needs maps of more than one pixel, and these images are too small for that in the "
            "last layers: take larger images, or norm='group' or 'batch'"
        )
