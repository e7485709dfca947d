"""An optimiser's state as named tensors, for an optimiser that goes on where another one stopped."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fl.message import Tensors

__all__ = ["moments", "resume"]


def moments(optimizer: torch.optim.Optimizer, names: Sequence[str]) -> Tensors:
    """What an optimiser remembers of each of its parameters (momentum, say), to be kept between two trainings.

    Args:
        optimizer: after its last step.
        names: of its parameters, in its own order.

    Returns:
        "name/moment" -> a copy of the tensor.
    """
    return {
        f"{names[index]}/{key}": value.detach().clone()
        for index, values in optimizer.state_dict()["state"].items()
        for key, value in values.items()
        if isinstance(value, Tensor)
    }


def resume(optimizer: torch.optim.Optimizer, names: Sequence[str], kept: Tensors) -> None:
    """Let an optimiser go on where another one stopped; a parameter of which nothing is known begins anew.

    Args:
        optimizer: before its first step.
        names: of its parameters, in its own order.
        kept: the `moments` of the other.
    """
    places = {name: index for index, name in enumerate(names)}
    found: dict[int, Tensors] = {}
    for key, value in kept.items():
        name, _, moment = key.rpartition("/")
        if name in places:
            found.setdefault(places[name], {})[moment] = value.clone()
    optimizer.load_state_dict({"state": found, "param_groups": optimizer.state_dict()["param_groups"]})
