"""Dropout that draws from a generator of ours, or not at all."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor, nn

__all__ = ["no_dropout", "seed_dropout", "seeded_dropout"]

_LAYERS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)


def _drop(layer: nn.modules.dropout._DropoutNd, generator: torch.Generator, x: Tensor) -> Tensor:
    if not layer.training or layer.p == 0:
        return x
    if layer.p == 1:
        return x * 0
    shape = x.shape if isinstance(layer, nn.Dropout) else (*x.shape[:2], *[1] * (x.ndim - 2))
    kept = torch.rand(shape, generator=generator).to(x.device) >= layer.p
    return x * kept / (1 - layer.p)


def _layers(network: nn.Module) -> list[nn.Module]:
    return [module for module in network.modules() if isinstance(module, _LAYERS)]


def seed_dropout(network: nn.Module, generator: torch.Generator) -> list[nn.Module]:
    """Make a network's dropout draw from a generator of ours, for good: training is then a function of its seed.

    Args:
        network: its `nn.Dropout` layers (1d to 3d too) are changed. Other layers that draw (alpha dropout, attention's
            own, `F.dropout` in a forward) are not reached.
        generator: what they draw from.

    Returns:
        These layers.
    """
    layers = _layers(network)
    for layer in layers:
        layer.forward = partial(_drop, layer, generator)  # type: ignore[arg-type]
    return layers


@contextlib.contextmanager
def _own_forwards(network: nn.Module) -> Iterator[None]:
    before = [(layer, vars(layer).get("forward")) for layer in _layers(network)]
    try:
        yield
    finally:
        for layer, forward in before:
            vars(layer).pop("forward", None)
            if forward is not None:
                layer.forward = forward


@contextlib.contextmanager
def seeded_dropout(network: nn.Module, generator: torch.Generator) -> Iterator[None]:
    """`seed_dropout` for the length of a `with` block; then the layers draw as they did before.

    Args:
        network: whose dropout layers are meant.
        generator: what they draw from meanwhile.
    """
    with _own_forwards(network):
        seed_dropout(network, generator)
        yield


@contextlib.contextmanager
def no_dropout(network: nn.Module) -> Iterator[None]:
    """Let the dropout layers of `network` pass their input on unchanged, for the length of a `with` block.

    The layers are those that `seed_dropout` reaches; their mode stays as it is.
    """
    with _own_forwards(network):
        for layer in _layers(network):
            layer.forward = _pass
        yield


def _pass(x: Tensor) -> Tensor:
    return x
