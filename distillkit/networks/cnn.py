"""Small convolutional networks of the federated-learning papers, and LeNet-5."""

from __future__ import annotations

from torch import nn

from distillkit._utils.check import one_of
from distillkit.networks._layers import (
    AveragePool,
    ImageNetwork,
    MaxPool,
    Shape,
    activation_layer,
    image_shape,
    norm_layer,
)

__all__ = ["FedCOGCNN", "LeNet", "SimpleCNN"]


class SimpleCNN(ImageNetwork):
    """Simple CNN of MOON (Li et al., CVPR 2021), FedCOG and others: LeNet's layers with ReLU and max pooling.

    Two 5x5 convolutions of 6 and 16 channels without padding, each with ReLU and 2x2 max pooling; hidden layers of 120
    and 84 units with ReLU; one linear layer. The embedding is the 84-d output of the last ReLU. With 10 classes it has
    62,006 parameters for 3x32x32 and 44,426 for 1x28x28.

    Args:
        shape: channels, height and width of the images, at least 16x16.
        num_classes: number of classes.
        norm: normalization between each convolution and its ReLU; see `norm_layer`. The papers use "none".
        groups: groups of channels for norm="group".

    Raises:
        ValueError: images smaller than 16x16, or an unknown norm.
    """

    def __init__(self, shape: Shape, num_classes: int, *, norm: str = "none", groups: int = 2) -> None:
        body = _convolutional(shape, (6, 16), 5, (120, 84), norm=norm, groups=groups)
        super().__init__(shape, num_classes, body, 84)


class FedCOGCNN(ImageNetwork):
    """CNN of FedCOG for CIFAR-100.

    Three 3x3 convolutions of 16, 32 and 64 channels without padding, each with ReLU and 2x2 max pooling; a hidden layer
    of 128 units with ReLU, whose output is the embedding; one linear layer. With 100 classes of 3x32x32 it has 69,380
    parameters.

    Args:
        shape: channels, height and width of the images, at least 22x22.
        num_classes: number of classes.
        norm: normalization between each convolution and its ReLU; see `norm_layer`. The paper uses "none".
        groups: groups of channels for norm="group".

    Raises:
        ValueError: images smaller than 22x22, or an unknown norm.
    """

    def __init__(self, shape: Shape, num_classes: int, *, norm: str = "none", groups: int = 2) -> None:
        body = _convolutional(shape, (16, 32, 64), 3, (128,), norm=norm, groups=groups)
        super().__init__(shape, num_classes, body, 128)


class LeNet(ImageNetwork):
    """LeNet-5 (LeCun et al., 1998): tanh, average pooling, 28x28 images padded to 32x32.

    It has the same layers as `SimpleCNN`. With 10 classes it has 61,706 parameters for 1x28x28 and 1x32x32, and 62,006
    for 3x32x32. As in most modern versions, the second convolution uses all six maps, pooling has no parameters and the
    output is one linear layer.

    Args:
        shape: channels, height and width of the images, at least 16x16. The first convolution pads only 28x28 images,
            by 2.
        num_classes: number of classes.
        norm: normalization between each convolution and its activation; see `norm_layer`.
        groups: groups of channels for norm="group".
        activation: "tanh", "sigmoid", "relu", "leaky_relu" or "silu".
        pooling: "avg" or "max".

    Raises:
        ValueError: images smaller than 16x16, or an unknown option.
    """

    def __init__(
        self,
        shape: Shape,
        num_classes: int,
        *,
        norm: str = "none",
        groups: int = 2,
        activation: str = "tanh",
        pooling: str = "avg",
    ) -> None:
        padding = 2 if image_shape(shape)[1:] == (28, 28) else 0
        body = _convolutional(
            shape, (6, 16), 5, (120, 84), padding, norm=norm, groups=groups, activation=activation, pooling=pooling
        )
        super().__init__(shape, num_classes, body, 84)


def _convolutional(
    shape: Shape,
    widths: tuple[int, ...],
    kernel: int,
    hidden: tuple[int, ...],
    padding: int = 0,
    *,
    norm: str,
    groups: int,
    activation: str = "relu",
    pooling: str = "max",
) -> nn.Sequential:
    """Build convolutions with `widths` channels and pooling, then `hidden` units per layer; all have activations."""
    inputs, rows, columns = image_shape(shape)
    one_of(pooling, "pooling", ("avg", "max"))
    least = 1
    for _ in widths:
        least = 2 * least + kernel - 1
    if min(rows, columns) + 2 * padding < least:
        raise ValueError(f"shape must be at least {least} pixels high and wide for this network, got {tuple(shape)}")
    layers: list[nn.Module] = []
    for outputs in widths:
        rows, columns = rows + 2 * padding - kernel + 1, columns + 2 * padding - kernel + 1
        layers += [
            nn.Conv2d(inputs, outputs, kernel, padding=padding),
            norm_layer(norm, outputs, groups=groups),
            activation_layer(activation),
            AveragePool() if pooling == "avg" else MaxPool(),
        ]
        inputs, rows, columns, padding = outputs, rows // 2, columns // 2, 0
    layers.append(nn.Flatten())
    inputs = inputs * rows * columns
    for outputs in hidden:
        layers += [nn.Linear(inputs, outputs), activation_layer(activation)]
        inputs = outputs
    return nn.Sequential(*layers)
