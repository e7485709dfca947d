"""Checks of the inputs of inversion attacks, such as gradients of a layer or of all parameters of a network."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.func import functional_call

from distillkit._utils import check

_WEIGHTS, _LEAST = 0.9, 100
"""Cosine between a message and the network's weights above which the message is taken for weights, and the number of
weights from which this is no coincidence."""


def check_bias(bias_gradient: Tensor, least: int = 1, name: str = "bias_gradient") -> Tensor:
    """Check that the gradient of a bias is a finite vector [K], and return it as float64.

    Args:
        bias_gradient: the gradient.
        least: smallest allowed K.
        name: name of the argument, for error messages.
    """
    check.float_tensor(bias_gradient, name, "[K], one number per unit")
    if bias_gradient.ndim != 1 or len(bias_gradient) < least:
        raise ValueError(f"{name} must be [K] with K at least {least}, got shape {list(bias_gradient.shape)}")
    return check.finite_tensor(bias_gradient, name).detach().double()


def check_layer(weight_gradient: Tensor, bias_gradient: Tensor) -> tuple[Tensor, Tensor]:
    """Check that gradients of a weight [O, D] and a bias [O] fit one linear layer, and return them as float64."""
    weight = check.matrix(weight_gradient, "weight_gradient").detach().double()
    bias = check_bias(bias_gradient)
    if len(bias) != len(weight):
        raise ValueError(
            f"weight_gradient [O, D] and bias_gradient [O] must be of one layer, got {list(weight.shape)} and "
            f"{list(bias.shape)}"
        )
    return weight, bias.to(weight.device)


def check_tensors(tensors: Sequence[Tensor], name: str) -> tuple[Tensor, ...]:
    """Check that tensors are finite and that at least one value in them is not 0, and return them detached.

    Args:
        tensors: the tensors, of a floating-point type.
        name: name of the argument, for error messages.
    """
    given = check.sequence(tensors, name, "tensors")
    for i, one in enumerate(given):
        check.finite_tensor(one, f"{name}[{i}]")
    if not any(bool(one.any()) for one in given):
        raise ValueError(f"{name} must not be empty or all 0: such a message reveals nothing")
    return tuple(one.detach() for one in given)


def check_update(network: nn.Module, tensors: Sequence[Tensor], name: str) -> tuple[Tensor, ...]:
    """Check that tensors have the shapes of a network's parameters, are finite and not all 0; return them detached.

    Args:
        network: the network.
        tensors: one tensor per parameter, such as a gradient.
        name: name of the argument, for error messages.
    """
    check.with_values(check.instance(network, nn.Module, "network", "an nn.Module"))
    shapes = [list(p.shape) for p in network.parameters()]
    check.sequence(tensors, name, "tensors, one per parameter of the network", len(shapes))
    given = check_tensors(tensors, name)
    for one, shape in zip(given, shapes):
        if list(one.shape) != shape:
            raise ValueError(f"{name} must have the shapes of network.parameters(), got {list(one.shape)}, not {shape}")
    sent, weights = (
        torch.cat([t.detach().double().flatten().cpu() for t in side]) for side in (given, network.parameters())
    )
    if len(sent) >= _LEAST and float(torch.cosine_similarity(sent, weights, dim=0)) > _WEIGHTS:
        raise ValueError(
            f"{name} must be a gradient or a change of weights, but it points in the direction of the network's "
            "weights themselves: subtract the weights that the client received"
        )
    return given


def copy_state(network: nn.Module) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return copies of a network's parameters and of its buffers, by name. The copied parameters require gradients."""
    parameters = {k: p.detach().clone().requires_grad_() for k, p in network.named_parameters()}
    return parameters, {k: b.detach().clone() for k, b in network.named_buffers()}


def compute_logits(network: nn.Module, images: Tensor, parameters: Mapping[str, Tensor] | None = None) -> Tensor:
    """Return a network's logits [N, K] for `images` [N, C, H, W], after checking that it accepts such images.

    Args:
        network: the network, whose state is not changed.
        images: the images.
        parameters: parameters by name that replace the network's own ones; None to use its own parameters.
    """
    own_parameters, buffers = copy_state(network)
    try:
        with torch.no_grad():
            out = functional_call(network, {**own_parameters, **buffers, **(parameters or {})}, (images,))
    except Exception as error:
        first = str(error).split("\n")[0]
        raise ValueError(f"network must take images of shape {list(images.shape)}: {first}") from error
    if not isinstance(out, Tensor) or out.ndim != 2 or len(out) != len(images):
        got = list(out.shape) if isinstance(out, Tensor) else type(out).__name__
        raise ValueError(f"network must give logits [N, K], got {got}")
    return out


_PARTS = ("observed", "ordered", "replay", "count_classes", "read_labels")


def require_message(message: object, name: str) -> None:
    """Check that a value implements `ObservedMessage`.

    Args:
        message: value to check.
        name: name of the argument, for error messages.

    Raises:
        TypeError: a member of the protocol is missing, or the value is a class.
    """
    missing = [part for part in _PARTS if not hasattr(message, part)]
    if missing or isinstance(message, type):
        got = f"the class {message.__name__}" if isinstance(message, type) else type(message).__name__
        lacks = f", which has no {', '.join(missing)}" if len(missing) < len(_PARTS) and missing else ""
        raise TypeError(f"{name} must be an ObservedMessage, such as Gradient(network, gradients), got {got}{lacks}")
