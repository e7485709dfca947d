"""Training and eval modes of the modules of a network."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch import nn

_FIXED_IN_EVAL = (
    nn.modules.batchnorm._BatchNorm, nn.modules.instancenorm._InstanceNorm, nn.utils.parametrizations._SpectralNorm
)  # fmt: skip


def train_mode(network: nn.Module) -> nn.Module:
    """Put `network` in training mode, except for norm layers in eval mode, which keep their running statistics fixed.

    So a pretrained body with batch norm in eval mode stays as it is while a head is trained.
    """
    kept = [module for module in network.modules() if isinstance(module, _FIXED_IN_EVAL) and not module.training]
    network.train()
    for module in kept:
        module.eval()
    return network


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
