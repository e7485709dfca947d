"""The input of a linear layer from the layer's gradient: a division, no optimisation."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from attacks.inversion._inputs import check_layer
from distillkit._utils.display import short_repr

__all__ = ["RecoveredInput", "invert_linear", "invert_linear_batch"]


@dataclass(frozen=True)
class RecoveredInput:
    """The input of a linear layer, and how well it explains the layer's gradient.

    Attributes:
        input: float [D], in the space in which the layer saw it; an image is its `view(C, H, W)`.
        residual: share of the weight's gradient (Frobenius norms) that no single input explains, in [0, 1]: 0 up to
            rounding when the gradient came from one input, and then `input` is that one. The attacker sees it too.
    """

    input: Tensor
    residual: float

    __repr__ = short_repr


def invert_linear(weight_gradient: Tensor, bias_gradient: Tensor) -> RecoveredInput:
    """Read one record off the gradient of a first linear layer with a bias, whatever stands behind the layer.

    For z = W x + b of one record, dL/dW = (dL/db) x^T: every unit whose bias has a gradient gives x away by a division.
    All units say the same, so this is their least-squares answer, sum_i b_i W_i / sum_i b_i^2, which weak units cannot
    spoil. A clipped or scaled gradient gives the same x; noise, or a batch of several, shows in `residual`.

    Args:
        weight_gradient: float [O, D], of the layer's weight.
        bias_gradient: float [O], of its bias.

    Returns:
        The input, in the dtype and on the device of `weight_gradient`, and the residual.

    Raises:
        TypeError, ValueError: tensors that are not of one layer, values that are not finite, or a bias without any
            gradient, from which nothing follows.

    Paper: Phong et al., "Privacy-Preserving Deep Learning via Additively Homomorphic Encryption" (IEEE TIFS 2018), what
    it says of leaks from a gradient; Geiping et al., "Inverting Gradients" (NeurIPS 2020), the proposition on fully
    connected layers. Both divide the row of one unit.
    """
    weight, bias = check_layer(weight_gradient, bias_gradient)
    unit = _direction(bias)
    scaled = unit @ weight  # |b| x
    size = weight.norm()
    residual = float((weight - torch.outer(unit, scaled)).norm() / size) if float(size) > 0 else 0.0
    return RecoveredInput((scaled / bias.norm()).to(weight_gradient.dtype), residual)


def invert_linear_batch(weight_gradient: Tensor, bias_gradient: Tensor) -> Tensor:
    """Read candidates for the records of a batch off a first linear layer's gradient: one for each unit that has one.

    A unit's row divided by its bias is the mean of the records that it reacted to, weighted by how strongly the loss
    pulled it (weights may be negative). Behind a ReLU many units react to one record of a small batch alone: those rows
    are that record exactly. Which ones, the gradient does not say: look at them, or match them to what is known.

    Args:
        weight_gradient: float [O, D], of the layer's weight.
        bias_gradient: float [O], of its bias.

    Returns:
        Float [R, D], R <= O: the units with a bias gradient, in their order.

    Raises:
        TypeError, ValueError: as `invert_linear`.

    Paper: as `invert_linear`; Fowl et al., "Robbing the Fed" (ICLR 2022), choose weights that part batches.
    """
    weight, bias = check_layer(weight_gradient, bias_gradient)
    _direction(bias)
    found = bias != 0
    return (weight[found] / bias[found].unsqueeze(1)).to(weight_gradient.dtype)


def _direction(bias: Tensor) -> Tensor:
    size = bias.norm()
    if float(size) == 0:
        raise ValueError("bias_gradient must not be all 0: no unit of the layer reacted, so nothing can be divided")
    return bias / size
