"""Residual networks for small images of any size, with a 3x3 stem, and pooling only before the last layer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn.utils import skip_init

from distillkit._utils.check import one_of, positive_int
from distillkit.networks._initialization import init_linear
from distillkit.networks._layers import ImageNetwork, Shape, image_shape, norm_layer, require_spatial_maps

_BLOCKS = {10: (1, 1, 1, 1), 18: (2, 2, 2, 2), 34: (3, 4, 6, 3), 50: (3, 4, 6, 3)}
Block = Callable[[int, int, int, "_Layers"], nn.Module]


class ResNet(ImageNetwork):
    """ResNet-10, -18, -34 or -50 (He et al., CVPR 2016) with the stem for small images that VHL and FedLGD use.

    The network has a 3x3 convolution of stride 1, four stages of residual blocks, global average pooling and one linear
    layer. The stages have 64, 128, 256 and 512 channels and strides 1, 2, 2, 2. ResNet-50 has bottleneck blocks, whose
    outputs have four times as many channels. With 10 classes, 3x32x32 images and norm="batch", the four depths have
    4,903,242, 11,173,962, 21,282,122 and 23,520,842 parameters. The embedding is 512-d, or 2048-d for ResNet-50.

    Args:
        shape: channels, height and width of the images. Images of other heights and widths are accepted, too.
        num_classes: number of classes.
        depth: 10, 18, 34 or 50.
        width: number of channels of the first stage.
        norm: "batch" (VHL), "instance" (FedLGD), "group" (FedCOG), "layer" or "none"; see `norm_layer`. Convolutions
            have a bias only with norm="none".
        groups: number of groups of channels for norm="group" (2 in FedCOG).

    FedLGD's paper describes a 7x7 stem with batch normalization. This class follows FedLGD's code, which has a 3x3 stem
    with instance normalization. For 96x96 images, FedLGD's code flattens the last feature map to 4608 values and adds a
    hidden layer; this class pools the map to 512 values.

    Raises:
        ValueError: the depth or `norm` is unknown, or the images are too small for norm="instance".
    """

    def __init__(
        self, shape: Shape, num_classes: int, *, depth: int = 18, width: int = 64, norm: str = "batch", groups: int = 2
    ) -> None:
        one_of(depth, "depth", _BLOCKS)
        block, expansion = (_bottleneck, 4) if depth == 50 else (_basic, 1)
        positive_int(width, "width")
        outs = [width * expansion * 2**stage for stage in range(4)]
        body = _residual(shape, width, outs, _BLOCKS[depth], block, norm, groups)
        super().__init__(shape, num_classes, body, outs[-1], any_size=True)


class CifarResNet(ImageNetwork):
    """ResNet-8, ResNet-20 and so on (6n+2 layers), from He et al.'s CIFAR experiments.

    The network has a 3x3 stem, three stages with n basic blocks each, global average pooling to a 64-d embedding and
    one linear layer. The stages have 16, 32 and 64 channels and strides 1, 2, 2. With 10 classes and 3x32x32 images,
    ResNet-8 has 78,042 parameters and ResNet-20 has 272,474.

    Two details follow the code (models/cifar_resnet.py) of Soni et al., "Federated learning with a single shared image"
    (CVPR 2024 workshops). The shortcuts between stages are 1x1 convolutions followed by a normalization layer, while
    those of He et al. have no parameters, so their ResNet-20 has 269,722 parameters. Convolutions are initialized from
    N(0, 2 / fan_out).

    Args:
        shape: channels, height and width of the images. Images of other heights and widths are accepted, too.
        num_classes: number of classes.
        depth: number of layers, 6n+2: 8, 14, 20, ...
        width: number of channels of the first stage.
        norm: "batch", "instance", "group", "layer" or "none"; see `norm_layer`. Convolutions have a bias only with
            norm="none".
        groups: number of groups of channels for norm="group".
        init: initialization of convolutions: "kaiming" (as above, with zero biases) or "default" (that of PyTorch).

    Raises:
        ValueError: the depth is not 6n+2, `norm` is unknown, or the images are too small for norm="instance".
    """

    def __init__(
        self,
        shape: Shape,
        num_classes: int,
        *,
        depth: int = 20,
        width: int = 16,
        norm: str = "batch",
        groups: int = 2,
        init: str = "kaiming",
    ) -> None:
        if positive_int(depth, "depth", least=8) % 6 != 2:
            raise ValueError(f"depth must be 6n+2 (8, 14, 20, ...), got {depth}")
        positive_int(width, "width")
        kaiming = "normal" if one_of(init, "init", ("kaiming", "default")) == "kaiming" else ""
        outs = [width, 2 * width, 4 * width]
        body = _residual(shape, width, outs, [(depth - 2) // 6] * 3, _basic, norm, groups, kaiming)
        super().__init__(shape, num_classes, body, outs[-1], any_size=True)


class WideResNet(ImageNetwork):
    """Wide residual network WRN-depth-width of Zagoruyko and Komodakis (BMVC 2016), by default WRN-16-4.

    The network has a 3x3 stem of 16 channels, and three stages of pre-activation blocks, with 16, 32 and 64 times
    `width` channels and strides 1, 2, 2. Norm, ReLU, global average pooling and one linear layer follow. There is no
    dropout. With 10 classes and 3x32x32 images, WRN-16-4 has 2,748,890 parameters and a 256-d embedding. Convolutions
    are initialized from a uniform distribution with variance 2 / fan_in, as in the code (models/cifar_wrn.py) of the
    single-image paper, Soni et al., "Federated learning with a single shared image" (CVPR 2024 workshops).

    Args:
        shape: channels, height and width of the images. Images of other heights and widths are accepted, too. The
            single-image paper's code pools a fixed area of 8x8, so it accepts only 32x32 images.
        num_classes: number of classes.
        depth: number of layers, 6n+4: 10, 16, 22, ...
        width: widening factor.
        norm: "batch", "instance", "group", "layer" or "none"; see `norm_layer`. Convolutions have a bias only with
            norm="none".
        groups: number of groups of channels for norm="group".
        init: initialization of convolutions: "kaiming" (as above, with zero biases) or "default" (that of PyTorch).

    Raises:
        ValueError: the depth is not 6n+4, `norm` is unknown, or the images are too small for norm="instance".
    """

    def __init__(
        self,
        shape: Shape,
        num_classes: int,
        *,
        depth: int = 16,
        width: int = 4,
        norm: str = "batch",
        groups: int = 2,
        init: str = "kaiming",
    ) -> None:
        if positive_int(depth, "depth", least=10) % 6 != 4:
            raise ValueError(f"depth must be 6n+4 (10, 16, 22, ...), got {depth}")
        positive_int(width, "width")
        kaiming = "uniform" if one_of(init, "init", ("kaiming", "default")) == "kaiming" else ""
        outs = [16 * width, 32 * width, 64 * width]
        body = _residual(shape, 16, outs, [(depth - 4) // 6] * 3, _PreActivation, norm, groups, kaiming)
        super().__init__(shape, num_classes, body, outs[-1], any_size=True)


class _Layers:
    """Builder of the norm layers and convolutions of a network. Convolutions have a bias only with norm="none"."""

    def __init__(self, norm: str, groups: int, kaiming: str) -> None:
        self._norm, self._groups, self._kaiming = norm, groups, kaiming

    def norm(self, channels: int) -> nn.Module:
        return norm_layer(self._norm, channels, groups=self._groups)

    def conv(self, inputs: int, outputs: int, kernel: int, stride: int = 1) -> nn.Module:
        sizes, device = (inputs, outputs, kernel, stride, kernel // 2), torch.get_default_device()
        layer = skip_init(nn.Conv2d, *sizes, bias=self._norm == "none", device=device)
        layer.kaiming = self._kaiming
        init_linear(layer, None)
        return layer


def _residual(
    shape: Shape,
    stem: int,
    outs: Sequence[int],
    blocks: Sequence[int],
    block: Block,
    norm: str,
    groups: int,
    kaiming: str = "",
) -> nn.Sequential:
    """Build the body of a residual network, from the first convolution to the global average pooling."""
    inputs, rows, columns = image_shape(shape)
    halved = 2 ** (len(outs) - 1)
    require_spatial_maps(norm, -(-rows // halved), -(-columns // halved))
    make, pre = _Layers(norm, groups, kaiming), block is _PreActivation
    layers = [make.conv(inputs, stem, 3)]
    if not pre:
        layers += [make.norm(stem), nn.ReLU()]
    channels = stem
    for stage, (out, count) in enumerate(zip(outs, blocks)):
        for i in range(count):
            layers.append(block(channels, out, 2 if stage and not i else 1, make))
            channels = out
    if pre:
        layers += [make.norm(channels), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1))


class _Residual(nn.Module):
    """Residual block relu(main(x) + shortcut(x)).

    The shortcut is the identity if input and output have the same shape, and otherwise a 1x1 convolution followed by a
    normalization layer.
    """

    def __init__(self, main: nn.Module, inputs: int, outputs: int, stride: int, make: _Layers) -> None:
        super().__init__()
        self.main = main
        self.shortcut: nn.Module = nn.Identity()
        if inputs != outputs or stride != 1:
            self.shortcut = nn.Sequential(make.conv(inputs, outputs, 1, stride), make.norm(outputs))
        self.relu = nn.ReLU()

    def forward(self, maps: Tensor) -> Tensor:
        return cast(Tensor, self.relu(self.main(maps) + self.shortcut(maps)))


def _basic(inputs: int, outputs: int, stride: int, make: _Layers) -> nn.Module:
    main = nn.Sequential(
        *(make.conv(inputs, outputs, 3, stride), make.norm(outputs), nn.ReLU()),
        *(make.conv(outputs, outputs, 3), make.norm(outputs)),
    )
    return _Residual(main, inputs, outputs, stride, make)


def _bottleneck(inputs: int, outputs: int, stride: int, make: _Layers) -> nn.Module:
    inner = outputs // 4
    main = nn.Sequential(
        *(make.conv(inputs, inner, 1), make.norm(inner), nn.ReLU()),
        *(make.conv(inner, inner, 3, stride), make.norm(inner), nn.ReLU()),
        *(make.conv(inner, outputs, 1), make.norm(outputs)),
    )
    return _Residual(main, inputs, outputs, stride, make)


class _PreActivation(nn.Module):
    """Pre-activation block: main(a) + x with a = relu(norm(x)), or main(a) + conv1x1(a) if the channels change."""

    def __init__(self, inputs: int, outputs: int, stride: int, make: _Layers) -> None:
        super().__init__()
        self.activate = nn.Sequential(make.norm(inputs), nn.ReLU())
        self.main = nn.Sequential(
            *(make.conv(inputs, outputs, 3, stride), make.norm(outputs), nn.ReLU()), make.conv(outputs, outputs, 3)
        )
        self.shortcut = make.conv(inputs, outputs, 1, stride) if inputs != outputs else None

    def forward(self, maps: Tensor) -> Tensor:
        activated = self.activate(maps)
        kept = maps if self.shortcut is None else self.shortcut(activated)
        return cast(Tensor, self.main(activated) + kept)
