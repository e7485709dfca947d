"""Context managers that restore the training or eval mode of every module of a network."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch import nn

__all__ = ["eval_mode", "preserve_modes"]


@contextlib.contextmanager
def preserve_modes(network: nn.Module) -> Iterator[None]:
    """Restore the training or eval mode of every module of `network` at the end of a `with` block."""
    modes = {module: module.training for module in network.modules()}
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode


@contextlib.contextmanager
def eval_mode(network: nn.Module) -> Iterator[None]:
    """Put `network` in eval mode during a `with` block, then restore the mode of every module."""
    with preserve_modes(network):
        network.eval()
        yield
