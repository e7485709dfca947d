"""Networks by name, for scripts and configuration files."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from distillkit._utils.check import one_of
from distillkit.networks._layers import ImageNetwork, Shape
from distillkit.networks.cnn import FedCOGCNN, LeNet, SimpleCNN
from distillkit.networks.convnet import ConvNet
from distillkit.networks.resnet import CifarResNet, ResNet, WideResNet

_NETWORKS: dict[str, tuple[Any, Mapping[str, int]]] = {
    "convnet": (ConvNet, {}),
    "fedcog_cnn": (FedCOGCNN, {}),
    "lenet": (LeNet, {}),
    "resnet8": (CifarResNet, {"depth": 8}),
    "resnet10": (ResNet, {"depth": 10}),
    "resnet18": (ResNet, {"depth": 18}),
    "resnet20": (CifarResNet, {"depth": 20}),
    "resnet34": (ResNet, {"depth": 34}),
    "resnet50": (ResNet, {"depth": 50}),
    "simple_cnn": (SimpleCNN, {}),
    "wrn16_4": (WideResNet, {"depth": 16, "width": 4}),
}

NETWORK_NAMES = tuple(_NETWORKS)
"""Names that `named_network` accepts."""


def named_network(name: str, shape: Shape, num_classes: int, **options: Any) -> ImageNetwork:
    """Create a network by its name, for scripts and configuration files.

    The initial parameters depend on PyTorch's global random state. For a reproducible network, use `build(lambda:
    named_network(...), seed)`.

    Args:
        name: one of `NETWORK_NAMES`, for example "convnet", "resnet18" or "simple_cnn".
        shape: channels, height and width of the images.
        num_classes: number of classes.
        options: further arguments of the network's class, such as `norm="group"`, except those that the name
            determines. For example, "resnet18" determines the depth.

    Raises:
        ValueError: the name is unknown, or an option is determined by the name.
        TypeError: the network's class has no such option.
    """
    make, fixed = _NETWORKS[one_of(name, "name", NETWORK_NAMES)]
    twice = sorted(set(fixed) & set(options))
    if twice:
        raise ValueError(f"the name {name!r} fixes {', '.join(twice)}; use the class {make.__name__} to choose it")
    known = inspect.signature(make).parameters
    if unknown := sorted(set(options) - set(known)):
        own = ", ".join(key for key in known if key not in ("shape", "num_classes", *fixed))
        raise TypeError(f"{name!r} has no option {', '.join(unknown)}; it has {own}")
    made: ImageNetwork = make(shape, num_classes, **fixed, **options)
    return made
