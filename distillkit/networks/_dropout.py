"""Seeding of dropout layers, which then draw from a given generator instead of the global random state."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor, nn

_LAYERS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)


def _drop(layer: nn.modules.dropout._DropoutNd, generator: torch.Generator, x: Tensor) -> Tensor:
    if not layer.training or layer.p == 0:
        return x
    if layer.p == 1:
        return x * 0
    shape = x.shape if isinstance(layer, nn.Dropout) else (*x.shape[:2], *[1] * (x.ndim - 2))
    kept = torch.rand(shape, generator=generator).to(x.device, non_blocking=True) >= layer.p
    return x * kept / (1 - layer.p)


def _layers(network: nn.Module) -> list[nn.Module]:
    return [module for module in network.modules() if isinstance(module, _LAYERS)]


def seed_dropout(network: nn.Module, generator: torch.Generator) -> list[nn.Module]:
    """Make the dropout layers of a network draw from `generator`, so that training is reproducible from a seed.

    Args:
        network: network whose layers `nn.Dropout` and `nn.Dropout1d` to `nn.Dropout3d` are changed permanently. Other
            random operations are not changed: alpha dropout, dropout inside attention layers, and calls of `F.dropout`
            in a forward method.
        generator: generator to draw from.

    Returns:
        The changed layers.
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
    """Make the dropout layers of a network draw from `generator` during a `with` block; see `seed_dropout`.

    Args:
        network: network whose dropout layers are changed.
        generator: generator to draw from.
    """
    with _own_forwards(network):
        seed_dropout(network, generator)
        yield


@contextlib.contextmanager
def undraw_dropout(network: nn.Module) -> Iterator[None]:
    """Undo `seed_dropout` during a `with` block, in which dropout layers draw from the global random state again."""
    with _own_forwards(network):
        for layer in _layers(network):
            if isinstance(forward := vars(layer).get("forward"), partial) and forward.func is _drop:
                del vars(layer)["forward"]
        yield
