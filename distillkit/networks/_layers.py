"""Base class of the networks of this package, and layers that several of them use."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from distillkit._utils.check import one_of, positive_int
from distillkit._utils.configurable import Configurable

Shape = tuple[int, int, int]


class _ReLU(nn.ReLU):
    """ReLU that works in place if gradients are disabled, which saves time in the forward pass of `ConvNet`."""

    def forward(self, maps: Tensor) -> Tensor:
        return F.relu(maps, inplace=not torch.is_grad_enabled())


class InstanceNorm(nn.GroupNorm):
    """Instance normalization, equivalent to a group norm with one channel per group.

    On a CPU, PyTorch's group norm is slow for small feature maps in channels_last format. For these maps, if gradients
    are disabled, this layer computes the formula with elementary operations, which is several times as fast.

    Args:
        channels: number of channels of the feature maps [N, channels, H, W].
    """

    def __init__(self, channels: int) -> None:
        super().__init__(channels, channels)

    def forward(self, maps: Tensor) -> Tensor:
        """Return the normalized `maps` [N, channels, H, W]. The input is not changed."""
        if torch.is_grad_enabled() or not _small_and_channels_last(maps):
            return super().forward(maps)
        centred = maps - maps.mean((2, 3), keepdim=True)
        scale = centred.square().mean((2, 3), keepdim=True).add_(self.eps).rsqrt_().mul_(self.weight.view(-1, 1, 1))
        return torch.addcmul(self.bias.view(-1, 1, 1), centred, scale)


def _small_and_channels_last(maps: Tensor) -> bool:
    """Return whether PyTorch's group norm is slow for these feature maps [N, C, H, W].

    It is slow if the maps are small, on a CPU and in channels_last format.
    """
    plain = maps.device.type == "cpu" and maps.ndim == 4 and not torch.is_autocast_enabled("cpu")
    return plain and maps.stride(1) == 1 and not maps.is_contiguous() and maps.shape[2] * maps.shape[3] < 1024


class AveragePool(nn.AvgPool2d):
    """2x2 average pooling that is faster than `nn.AvgPool2d` on a CPU, because it uses a matrix product.

    The matrix has the entries 0 and 1/4. The results agree with `nn.AvgPool2d` for finite values. If a feature map
    contains an infinite value, a whole row of averages becomes NaN, while `nn.AvgPool2d` returns a single infinite
    average.
    """

    def __init__(self) -> None:
        super().__init__(2)

    def forward(self, maps: Tensor) -> Tensor:
        """Return the means [..., H // 2, W // 2] of `maps` [..., H, W]."""
        if not _even_and_narrow(maps):
            return super().forward(maps)
        *some, rows, columns = maps.shape
        half = columns // 2
        quarters = torch.eye(half, dtype=maps.dtype, device=maps.device) / 4
        quarters = quarters[None, :, None].expand(2, half, 2, half).reshape(2 * columns, half)
        return (maps.reshape(-1, 2 * columns) @ quarters).view(*some, rows // 2, half)


def _even_and_narrow(maps: Tensor) -> bool:
    """Return whether the feature maps are on a CPU and have even sizes and at most 64 columns.

    For such feature maps, `AveragePool` uses a matrix product, which is faster and gives the same result.
    """
    rows, columns = maps.shape[-2:]
    plain = maps.device.type == "cpu" and maps.dtype in (torch.float32, torch.float64) and maps.is_contiguous()
    even = rows % 2 == 0 and columns % 2 == 0 and 0 < columns <= 64
    return plain and even and maps.numel() > 0 and not torch.is_autocast_enabled("cpu")


class MaxPool(nn.MaxPool2d):
    """2x2 max pooling. On a CPU with gradients disabled, it computes the maximum over rows, then over columns.

    This is faster than PyTorch's kernel, which also records the position of each maximum for the backward pass.
    """

    def __init__(self) -> None:
        super().__init__(2)

    def forward(self, maps: Tensor) -> Tensor:
        """Return the maxima [..., H // 2, W // 2] of `maps` [..., H, W]."""
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
    """Base class of the image classifiers in this package. The forward pass is `classifier(features(images))`.

    Args:
        shape: channels, height and width of the images.
        num_classes: number of logits, K, at least 2.
        body: module that maps images [N, C, H, W] to feature maps, which are flattened to embeddings [N,
            embedding_dim].
        embedding_dim: size of an embedding.
        any_size: whether `body` also accepts images of other heights and widths, because it ends with adaptive pooling.

    Attributes:
        shape, num_classes, embedding_dim: the values of the arguments.
        body, classifier: the module `body`, and the classifier, which is an `nn.Linear`.
        chunked_stem: whether the network processes its first block in smaller chunks when it runs on a CPU with
            gradients disabled; see `chunking.chunk_size`.

    Raises:
        TypeError, ValueError: `shape` is not three positive integers, there are fewer than two classes, or
            `embedding_dim` is not positive.
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
        """Compute the embedding of each image, float [N, embedding_dim].

        Args:
            images: float [N, C, H, W], in any memory format.

        Raises:
            TypeError: the images have another dtype than the network.
            ValueError: the network does not accept images of this shape.
        """
        channels, height, width = self.shape
        fits = images.ndim == 4 and images.shape[1] == channels
        if not fits or not (self.any_size or images.shape[2:] == (height, width)):
            wanted = f"[N, {channels}, H, W]" if self.any_size else f"[N, {channels}, {height}, {width}]"
            raise ValueError(f"images must have shape {wanted} for this network, got {list(images.shape)}")
        if images.dtype != self.classifier.weight.dtype and not torch.is_autocast_enabled(images.device.type):
            raise TypeError(
                f"images must have the dtype of the network, {self.classifier.weight.dtype}, got {images.dtype}; "
                "convert one of them by .to(dtype), and divide pixels of 0..255 by 255"
            )
        return self._maps(images).flatten(1)

    def _maps(self, images: Tensor) -> Tensor:
        return cast(Tensor, self.body(images))

    def forward(self, images: Tensor) -> Tensor:
        """Compute the logits [N, num_classes] of `images` [N, C, H, W]."""
        return cast(Tensor, self.classifier(self.features(images)))


def image_shape(shape: Shape) -> Shape:
    """Check an image shape and return it as a tuple of ints.

    Args:
        shape: (channels, height, width).

    Raises:
        TypeError, ValueError: `shape` is not three positive integers.
    """
    if not isinstance(shape, tuple | list) or len(shape) != 3:
        raise ValueError(f"shape must be (channels, height, width), got {shape!r}")
    channels, height, width = (positive_int(n, f"shape[{i}]") for i, n in enumerate(shape))
    return channels, height, width


def norm_layer(kind: str, channels: int, *, groups: int = 2) -> nn.Module:
    """Create a normalization layer for maps [N, channels, H, W], with a learned scale and shift per channel.

    The kind "layer" creates an `nn.GroupNorm` with a single group. The kind "instance" creates this package's
    `InstanceNorm`, a group norm with one channel per group. It returns the same values as `nn.InstanceNorm2d`, but is
    faster on a CPU, and has correct second derivatives in every mode of automatic differentiation.

    Args:
        kind: the values that are normalized together: "instance" (each channel of each image), "group" (each of
            `groups` groups of channels of each image), "layer" (all channels of each image) or "batch" (each channel
            over the batch, with running statistics). "none" creates an `nn.Identity`.
        channels: number of channels.
        groups: number of groups for "group". It must divide `channels`.

    Raises:
        ValueError: `kind` is unknown, or `groups` does not divide `channels`.
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
    """Create an activation layer by name.

    Under `torch.no_grad()`, "relu" overwrites its input, so the input must be a tensor that the network itself has
    created. A forward hook that keeps the output of the previous layer must copy it.

    Args:
        kind: "relu", "leaky_relu" (slope 0.01), "sigmoid", "silu" or "tanh".

    Raises:
        ValueError: `kind` is unknown.
    """
    return _ACTIVATIONS[one_of(kind, "activation", _ACTIVATIONS)]()


def require_spatial_maps(norm: str, height: int, width: int) -> None:
    """Refuse instance normalization of one-pixel maps, because its output would be the same for every image.

    Args:
        norm: kind of normalization; all kinds except "instance" are accepted.
        height, width: size of the feature maps that are normalized.

    Raises:
        ValueError: `norm` is "instance", and the maps are 1x1.
    """
    if norm == "instance" and height * width == 1:
        raise ValueError(
            "norm='instance' needs maps of more than one pixel, but these images are too small in the last layers; "
            "use larger images, or norm='group' or 'batch'"
        )
