"""The clients' optimizer: its options, its state between rounds, and its effective learning rate."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from distillkit._utils import check
from distillkit._utils.options import CheckedOptions, NonNegative, Positive
from fl.message import Tensors


@dataclass(frozen=True)
class ClientOptimizer(CheckedOptions):
    """Options of the clients' optimizer besides the learning rate and momentum. Pass it as `FedAvg(optimizer=...)`.

    Args:
        name: "sgd" or "adam".
        weight_decay: coefficient lambda >= 0. The optimizer adds lambda w to the gradient of the weights w.
        lr_decay: factor by which the learning rate changes per round. Round t has the rate lr * lr_decay ** (t - 1).
        state: lifetime of the optimizer's state (momentum, or Adam's moments). "round": it starts at zero in each
            round. "client": each client keeps it until the next round in which it takes part, as in the code of the
            authors of VHL (`fl.addons.VHL`).

    Raises:
        TypeError, ValueError: an option is out of range.
    """

    name: Literal["sgd", "adam"] = "sgd"
    weight_decay: NonNegative = 0.0
    lr_decay: Positive = 1.0
    state: Literal["round", "client"] = "round"

    @staticmethod
    def of(optimizer: str | ClientOptimizer) -> ClientOptimizer:
        """Return the optimizer's options: `optimizer` itself or, for the name "sgd" or "adam", the default options."""
        if isinstance(optimizer, ClientOptimizer):
            return optimizer
        return ClientOptimizer(check.one_of(optimizer, "optimizer", ("sgd", "adam")))  # type: ignore[arg-type]


def effective_lr(
    optimizer: Callable[[list[Tensor]], torch.optim.Optimizer], steps: Sequence[int], damping: float
) -> float:
    """Return the distance by which a constant gradient of 1 moves a parameter in a training without weight decay.

    SCAFFOLD and FedNova divide a change of weights by this distance. With plain SGD and no damping it is steps * lr.

    Args:
        optimizer: function that takes a list of tensors and returns an optimizer for them. It is called once for each
            phase of local training (`fl.Phase`), because a phase starts with a new optimizer.
        steps: number of steps in each phase of local training.
        damping: coefficient mu of a term mu (w - w_0) in the gradient, which pulls the parameter w towards its initial
            value w_0.

    Returns:
        The distance, >= 0, in the units of the parameter.
    """
    moved = 0.0
    for count in steps:
        point = torch.zeros(1, dtype=torch.float64)
        stepper = optimizer([point])
        stepper.param_groups[0]["weight_decay"] = 0.0
        for _ in range(count):
            point.grad = 1.0 + damping * (point - moved)
            stepper.step()
        moved -= float(point)
    return moved


def saved_state(optimizer: torch.optim.Optimizer, names: Sequence[str]) -> Tensors:
    """Return a copy of the optimizer's state, such as momentum, to keep it between two trainings.

    Args:
        optimizer: optimizer after its last step.
        names: names of the optimizer's parameters, in the optimizer's order.

    Returns:
        Tensors of the state. Each name consists of the parameter's name, "/" and the name in PyTorch's state, such as
        "conv.weight/momentum_buffer".
    """
    return {
        f"{names[index]}/{key}": value.detach().clone()
        for index, values in optimizer.state_dict()["state"].items()
        for key, value in values.items()
        if isinstance(value, Tensor)
    }


def load_state(optimizer: torch.optim.Optimizer, names: Sequence[str], saved: Tensors) -> None:
    """Load the saved state of an earlier optimizer into a new one.

    The state of a parameter starts at zero if `saved` does not contain it.

    Args:
        optimizer: optimizer before its first step.
        names: names of the optimizer's parameters, in the optimizer's order.
        saved: state that `saved_state` returned.
    """
    positions = {name: index for index, name in enumerate(names)}
    state: dict[int, Tensors] = {}
    for key, value in saved.items():
        name, _, buffer = key.rpartition("/")
        if name in positions:
            # PyTorch reads the number of steps in every step, so it must not be on an accelerator.
            state.setdefault(positions[name], {})[buffer] = value.cpu().clone() if buffer == "step" else value.clone()
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})
