"""Small convolutional networks that papers on federated learning use, and LeNet-5."""

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


class SimpleCNN(ImageNetwork):
    """Simple CNN of MOON (Li et al., CVPR 2021), FedCOG and others: LeNet's layers with ReLU and max pooling.

    The network has two 5x5 convolutions of 6 and 16 channels without padding, each followed by ReLU and 2x2 max
    pooling. Two hidden layers of 120 and 84 units with ReLU and one linear layer follow. The embedding is the 84-d
    output of the last ReLU. With 10 classes, the network has 62,006 parameters for 3x32x32 images, and 44,426 for
    1x28x28 images.

    Args:
        shape: channels, height and width of the images, at least 16x16.
        num_classes: number of classes.
        norm: normalization between each convolution and its ReLU; see `norm_layer`. The papers use "none".
        groups: number of groups of channels for norm="group".

    Raises:
        ValueError: the images are smaller than 16x16, or `norm` is unknown.
    """

    def __init__(self, shape: Shape, num_classes: int, *, norm: str = "none", groups: int = 2) -> None:
        body = _convolutional(shape, (6, 16), 5, (120, 84), norm=norm, groups=groups)
        super().__init__(shape, num_classes, body, 84)


class FedCOGCNN(ImageNetwork):
    """CNN that FedCOG (Ye et al., ICLR 2024) uses for CIFAR-100.

    The network has three 3x3 convolutions of 16, 32 and 64 channels without padding, each followed by ReLU and 2x2 max
    pooling. A hidden layer of 128 units with ReLU, whose output is the embedding, and one linear layer follow. With 100
    classes and 3x32x32 images, the network has 69,380 parameters.

    Args:
        shape: channels, height and width of the images, at least 22x22.
        num_classes: number of classes.
        norm: normalization between each convolution and its ReLU; see `norm_layer`. The paper uses "none".
        groups: number of groups of channels for norm="group".

    Raises:
        ValueError: the images are smaller than 22x22, or `norm` is unknown.
    """

    def __init__(self, shape: Shape, num_classes: int, *, norm: str = "none", groups: int = 2) -> None:
        body = _convolutional(shape, (16, 32, 64), 3, (128,), norm=norm, groups=groups)
        super().__init__(shape, num_classes, body, 128)


class LeNet(ImageNetwork):
    """LeNet-5 (LeCun et al., 1998), with tanh and average pooling. 28x28 images are padded to 32x32.

    The 5x5 convolutions have 6 and 16 channels, and the hidden linear layers have 120 and 84 units. With 10 classes,
    the network has 61,706 parameters for 1x28x28 and 1x32x32 images, and 62,006 for 3x32x32 images. As in most modern
    versions, the second convolution uses all six channels of the first, pooling has no parameters, and the last layer
    is linear.

    Args:
        shape: channels, height and width of the images, at least 16x16. The first convolution pads 28x28 images by 2;
            other images are not padded.
        num_classes: number of classes.
        norm: normalization between each convolution and its activation; see `norm_layer`.
        groups: number of groups of channels for norm="group".
        activation: "tanh", "sigmoid", "relu", "leaky_relu" or "silu".
        pooling: "avg" or "max".

    Raises:
        ValueError: the images are smaller than 16x16, or an option is unknown.
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
    """Build a body of convolutions with 2x2 pooling, followed by hidden linear layers, each with an activation.

    `widths` are the channels of the convolutions, and `hidden` the units of the linear layers. `padding` applies to the
    first convolution only.
    """
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
