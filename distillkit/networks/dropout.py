"""Dropout that draws from a generator of ours."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor, nn

__all__ = ["seed_dropout", "seeded_dropout"]

_LAYERS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)


def _drop(layer: nn.modules.dropout._DropoutNd, generator: torch.Generator, x: Tensor) -> Tensor:
    if not layer.training or layer.p == 0:
        return x
    if layer.p == 1:
        return x * 0
    shape = x.shape if isinstance(layer, nn.Dropout) else (*x.shape[:2], *[1] * (x.ndim - 2))
    kept = torch.rand(shape, generator=generator).to(x.device) >= layer.p
    return x * kept / (1 - layer.p)


def seed_dropout(model: nn.Module, generator: torch.Generator) -> list[nn.Module]:
    """Make the `nn.Dropout` layers of `model` (1d to 3d too) draw from `generator`, for good; return these layers.

    Other layers that draw (alpha dropout, attention's own, `F.dropout` in a forward) are not reached.
    """
    layers: list[nn.Module] = [module for module in model.modules() if isinstance(module, _LAYERS)]
    for layer in layers:
        layer.forward = partial(_drop, layer, generator)  # type: ignore[arg-type]
    return layers


@contextlib.contextmanager
def seeded_dropout(model: nn.Module, generator: torch.Generator) -> Iterator[None]:
    """`seed_dropout` for the length of a `with` block."""
    layers = seed_dropout(model, generator)
    try:
        yield
    finally:
        for layer in layers:
            del layer.forward
