"""Checks whether a network or an augmentation consists of unchanged classes of this package and of PyTorch.

These classes treat each image separately. Their code may therefore run on private images, while other code must first
be traced into a fixed graph of operators.
"""

from __future__ import annotations

import sys
from typing import Any

from torch import Tensor, nn

from distillkit.augment import DSA, CropFlip

__all__ = ["is_own_augmentation", "is_own_network"]

_LAYERS = (
    nn.Sequential, nn.Identity, nn.Flatten, nn.Conv2d, nn.Linear, nn.GroupNorm, nn.BatchNorm2d, nn.ReLU, nn.LeakyReLU,
    nn.Sigmoid, nn.SiLU, nn.Tanh, nn.AvgPool2d, nn.MaxPool2d, nn.AdaptiveAvgPool2d,
)  # fmt: skip


def is_own_augmentation(augment: object) -> bool:
    """Return whether an augmentation is None, a `DSA` or a `CropFlip`. Instances of subclasses do not count."""
    return augment is None or type(augment) in (DSA, CropFlip)


def is_own_network(network: object) -> bool:
    """Return whether a network consists only of unchanged layers of this package and of PyTorch.

    The result is False for a network with a hook, a replaced method or layer, batch statistics or tensor subclasses.
    """
    if not isinstance(network, nn.Module) or any(_global_hooks()):
        return False
    tensors = [*network.parameters(), *network.buffers()]
    return all(_is_plain(m) for m in network.modules()) and all(type(t) in (Tensor, nn.Parameter) for t in tensors)


def _global_hooks() -> list[Any]:
    module = nn.modules.module
    return [getattr(module, name) for name in dir(module) if name.startswith("_global_") and name.endswith("_hooks")]


def _is_plain(module: nn.Module) -> bool:
    kind = type(module)
    named = getattr(sys.modules.get(kind.__module__), kind.__qualname__, None)
    known = kind in _LAYERS or (named is kind and kind.__module__.startswith("distillkit.networks."))
    changed = any(callable(value) and not isinstance(value, nn.Module) for value in vars(module).values())
    hooked = any(value for name, value in vars(module).items() if name.endswith("_hooks"))
    mixing = isinstance(module, nn.BatchNorm2d) and (module.training or module.running_mean is None)
    mixing |= isinstance(module, nn.Flatten) and module.start_dim != 1
    return known and not changed and not hooked and not mixing
