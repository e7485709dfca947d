"""Recovery of a linear layer's input from the layer's gradient, in closed form."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from attacks.inversion._inputs import check_layer
from distillkit._utils import check
from distillkit._utils.display import short_repr


@dataclass(frozen=True)
class RecoveredInput:
    """Recovered input of a linear layer, and a measure of the recovery's error.

    Attributes:
        input: input of the layer, float [D]; reshape it to (C, H, W) to get an image.
        residual: Frobenius norm of the part of the weight's gradient that `input` does not explain, divided by the norm
            of the whole gradient; in [0, 1]. If the gradient came from one input, the residual is 0 up to rounding, and
            `input` is exact. An attacker can compute the residual, because it does not depend on the private records.
    """

    input: Tensor
    residual: float

    __repr__ = short_repr


def invert_linear(weight_gradient: Tensor, bias_gradient: Tensor) -> RecoveredInput:
    """Recover one record from the gradient of a network's first layer, which is linear and has a bias.

    The layers that follow may be of any kind.

    For z = W x + b and one record x, the gradient of the loss L is dL/dW = (dL/db) x^T, so every unit with a nonzero
    bias gradient reveals x by a division. The result is the least-squares solution over all units,
    sum_i g_i G_i / sum_i g_i^2, where g_i is the gradient dL/db_i of unit i's bias, and G_i the gradient of unit i's
    row of W. It is robust to units with a small gradient. Clipping or scaling the gradient does not change the result.
    Noise, or a batch of several records, increases `residual`.

    Args:
        weight_gradient: gradient of the layer's weight, float [O, D].
        bias_gradient: gradient of the layer's bias, float [O].

    Returns:
        The input, in the dtype and on the device of `weight_gradient`, and the residual, which is the share of
        `weight_gradient` that this input does not explain.

    Raises:
        TypeError, ValueError: the tensors do not belong to one layer or are not finite, or the bias gradient is all 0
            and therefore reveals nothing.

    Paper: Phong et al., "Privacy-Preserving Deep Learning via Additively Homomorphic Encryption" (IEEE TIFS 2018), on
    gradient leakage; Geiping et al., "Inverting Gradients" (NeurIPS 2020), the proposition on fully connected layers.
    Both papers use a single unit i, and compute x as G_i / g_i.
    """
    weight, bias = check_layer(weight_gradient, bias_gradient)
    unit = _direction(bias)
    scaled = unit @ weight  # |b| x
    size = weight.norm()
    residual = float((weight - torch.outer(unit, scaled)).norm() / size) if float(size) > 0 else 0.0
    return RecoveredInput(_in_range(scaled / bias.norm(), weight_gradient), residual)


def invert_linear_batch(weight_gradient: Tensor, bias_gradient: Tensor) -> Tensor:
    """Recover candidates for the records of a batch from the gradient of a network's first layer, which is linear.

    Each unit with a nonzero bias gradient gives one candidate: its row of the weight's gradient, divided by its bias
    gradient. The candidate is a weighted mean of the records that activate the unit. A record's weight in this mean is
    the derivative of its loss with respect to the unit's output, and may be negative. If a ReLU follows the layer and
    the batch is small, many units are activated by only one record. The candidate of such a unit equals the record that
    activates it. The gradient does not show which units these are, so inspect the candidates, or match them to known
    images.

    Args:
        weight_gradient: gradient of the layer's weight, float [O, D].
        bias_gradient: gradient of the layer's bias, float [O].

    Returns:
        Candidates, float [R, D], R <= O: one row for each unit with a nonzero bias gradient, in order.

    Raises:
        TypeError, ValueError: the tensors do not belong to one layer or are not finite, or the bias gradient is all 0
            and therefore reveals nothing.

    Paper: see `invert_linear`. In addition, Fowl et al., "Robbing the Fed" (ICLR 2022), choose weights of the layer
    that separate the records of a batch.
    """
    weight, bias = check_layer(weight_gradient, bias_gradient)
    _direction(bias)
    found = bias != 0
    return _in_range(weight[found] / bias[found].unsqueeze(1), weight_gradient)


def _in_range(recovered: Tensor, gradient: Tensor) -> Tensor:
    remedy = f"{gradient.dtype} cannot hold them; pass the gradients as float64"
    return check.finite(recovered.to(gradient.dtype), "the recovered inputs", remedy)


def _direction(bias: Tensor) -> Tensor:
    size = bias.norm()
    if float(size) == 0:
        raise ValueError("bias_gradient must not be all 0: no unit of the layer was active")
    return bias / size
