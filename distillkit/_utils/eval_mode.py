"""A network in another mode for a while, each of its modules in its own mode afterwards."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch import nn

__all__ = ["eval_mode", "preserve_modes"]


@contextlib.contextmanager
def preserve_modes(network: nn.Module) -> Iterator[None]:
    """Put every module's own mode back at the end of a `with` block, in which `network` may be given another."""
    modes = {module: module.training for module in network.modules()}
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode


@contextlib.contextmanager
def eval_mode(network: nn.Module) -> Iterator[None]:
    """Put `network` in eval mode for the length of a `with` block; then every module's own mode is put back."""
    with preserve_modes(network):
        network.eval()
        yield
