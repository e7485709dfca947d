"""How far an optimiser carries a parameter: what turns a change of weights back into a mean gradient."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

__all__ = ["effective_lr"]


def effective_lr(
    optimizer: Callable[[list[Tensor]], torch.optim.Optimizer], steps: Sequence[int], damping: float
) -> float:
    """How far a constant unit gradient moves a parameter under the given optimiser, without weight decay.

    SCAFFOLD and FedNova divide a change of weights by it. With plain SGD and no damping it is steps x lr.

    Args:
        optimizer: makes the optimiser of some tensors; it is made anew for each phase, as in training.
        steps: the number of steps in each phase.
        damping: strength mu of a pull to the start, which adds mu x (distance so far) against the movement.

    Returns:
        The distance, >= 0: learning rate times a number of steps.
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
