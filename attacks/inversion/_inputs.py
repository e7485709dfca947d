"""What every attack on a layer's gradient is given, checked once."""

from __future__ import annotations

import torch
from torch import Tensor

from distillkit import check

__all__ = ["bias_row", "layer"]


def bias_row(bias_gradient: Tensor, least: int = 1) -> Tensor:
    """The gradient of a bias in float64 [K]; else an error that names it."""
    if not isinstance(bias_gradient, Tensor) or not bias_gradient.is_floating_point():
        came = bias_gradient.dtype if isinstance(bias_gradient, Tensor) else type(bias_gradient).__name__
        raise TypeError(f"bias_gradient must be a floating tensor [K], one number a unit, got {came}")
    if bias_gradient.ndim != 1 or len(bias_gradient) < least:
        raise ValueError(f"bias_gradient must be [K] with K at least {least}, got shape {list(bias_gradient.shape)}")
    if not bool(torch.isfinite(bias_gradient).all()):
        raise ValueError("bias_gradient must be finite, got NaN or Inf")
    return bias_gradient.detach().double()


def layer(weight_gradient: Tensor, bias_gradient: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of a linear layer in float64, [O, D] and [O]; else an error that names one."""
    weight = check.rows(weight_gradient, "weight_gradient").detach().double()
    bias = bias_row(bias_gradient)
    if len(bias) != len(weight):
        raise ValueError(
            f"weight_gradient [O, D] and bias_gradient [O] must be of one layer, got {list(weight.shape)} and "
            f"{list(bias.shape)}"
        )
    return weight, bias.to(weight.device)
