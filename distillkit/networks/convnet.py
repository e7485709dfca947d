"""ConvNet, the standard network of the literature on dataset distillation."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn

from distillkit._utils.check import one_of, positive_int
from distillkit.networks._layers import (
    AveragePool,
    ImageNetwork,
    MaxPool,
    Shape,
    activation_layer,
    image_shape,
    norm_layer,
    require_spatial_maps,
)

_PIXELS = 8 * 32 * 32


class ConvNet(ImageNetwork):
    """ConvNet of DC (Zhao et al., ICLR 2021), which DM, DSA, FedDM and FedLGD also use for distillation.

    The network has `depth` blocks of 3x3 convolution, normalization, activation and 2x2 pooling, and one linear layer
    on the flattened last feature map. With default options, 10 classes and 3x32x32 images, it has 320,010 parameters
    and a 2048-d embedding.

    Args:
        shape: channels, height and width of the images.
        num_classes: number of classes.
        width: number of channels of each block.
        depth: number of blocks. Each block halves height and width, rounding down, unless `pooling` is "none".
        norm: "instance", "group", "layer", "batch" or "none"; see `norm_layer`.
        pooling: "avg", "max" or "none".
        activation: "relu", "leaky_relu", "sigmoid", "silu" or "tanh".
        groups: number of groups of channels for norm="group". DC uses 4.

    Every convolution pads by 1, with one exception: the first convolution pads 1x28x28 images by 3. MNIST is thus
    processed at 32x32 pixels, with a 2048-d embedding. The code of DC's authors pads all gray images by 3; this class
    keeps the size of gray images that are not 28x28. As in FedLGD, 3x28x28 images keep their size, which gives a 1152-d
    embedding.

    On a CPU with gradients disabled, the first block processes a batch in chunks, for example of 8 images of 32x32
    pixels. The feature maps of a chunk then fit into the processor's cache. The batch is not divided into chunks if
    norm="batch", because the images of a batch then influence each other, or if a layer of the first block has a
    forward hook.

    With `norm="layer"`, this class learns one scale per channel. In DC's code, the option "layernorm" instead learns a
    scale for each value of a feature map.

    Raises:
        ValueError: the images are too small for the depth, or an option is unknown.
    """

    def __init__(
        self,
        shape: Shape,
        num_classes: int,
        *,
        width: int = 128,
        depth: int = 3,
        norm: str = "instance",
        pooling: str = "avg",
        activation: str = "relu",
        groups: int = 4,
    ) -> None:
        in_channels, rows, columns = image_shape(shape)
        positive_int(width, "width")
        positive_int(depth, "depth")
        one_of(pooling, "pooling", ("avg", "max", "none"))
        padding = 3 if (in_channels, rows, columns) == (1, 28, 28) else 1
        rows, columns = rows + 2 * (padding - 1), columns + 2 * (padding - 1)
        if pooling != "none" and min(rows, columns) < 2**depth:
            raise ValueError(
                f"shape must be at least {2**depth} pixels high and wide for depth={depth} (each block halves it), "
                f"got {tuple(shape)}; use a smaller depth or pooling='none'"
            )
        layers: list[nn.Module] = []
        for block in range(depth):
            require_spatial_maps(norm, rows, columns)
            layers += [
                nn.Conv2d(width if block else in_channels, width, 3, padding=1 if block else padding),
                norm_layer(norm, width, groups=groups),
                activation_layer(activation),
            ]
            if pooling != "none":
                layers.append(AveragePool() if pooling == "avg" else MaxPool())
                rows, columns = rows // 2, columns // 2
        super().__init__(shape, num_classes, nn.Sequential(*layers), width * rows * columns)
        self.chunked_stem = pooling != "none" and norm != "batch"

    def _maps(self, images: Tensor) -> Tensor:
        size = max(1, _PIXELS // (images.shape[2] * images.shape[3]))
        if not self.chunked_stem or torch.is_grad_enabled() or images.device.type != "cpu" or len(images) <= size:
            return super()._maps(images)
        body = cast(nn.Sequential, self.body)
        first, others = body[:4], body[4:]
        if any(layer._forward_pre_hooks or layer._forward_hooks for layer in first):
            return super()._maps(images)
        return cast(Tensor, others(torch.cat([first(part) for part in images.split(size)])))
