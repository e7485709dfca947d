"""Progress of a condenser, and the saved state from which it can be resumed."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from distillkit._utils import check
from distillkit._utils.files import read_tensors, write_tensors

State = dict[str, Tensor]
Resume = Mapping[str, Tensor] | str | os.PathLike[str]

_FORMAT = "distillkit.CondenserState/1"


@dataclass(frozen=True)
class Progress:
    """Progress of a condenser, passed to `callback` after every step.

    Attributes:
        step: number of finished steps, 1 to `steps`.
        steps: total number of steps.
        loss_value: loss of this step, computed before the images were updated; on an accelerator a tensor, for whose
            value the property `loss` waits.
        images: current synthetic images [N, C, H, W]. The condenser changes this tensor, so clone it to keep it.
        state_tensors: the tensors that make up the condenser's state. The condenser changes them in place, so use
            `state()`, which copies them.
        compute_arguments: function that returns the condenser's arguments as JSON text in a byte tensor. It is slow,
            because it also computes fingerprints (hashes) of the data and the networks.
    """

    step: int
    steps: int
    loss_value: float | Tensor
    images: Tensor
    state_tensors: Mapping[str, Tensor] = field(repr=False)
    compute_arguments: Callable[[], Tensor] | None = field(default=None, repr=False)

    @property
    def loss(self) -> float:
        """Loss of this step as a number.

        Raises:
            FloatingPointError: the loss is not finite.
        """
        return finite_loss(self.loss_value, self.step)

    def state(self) -> State:
        """Return a copy of the condenser's state. Pass it as `resume=` to continue with a bit-identical result.

        Call this method before your `callback` function returns, because later steps overwrite the state.
        """
        state = {name: tensor.detach().clone() for name, tensor in self.state_tensors.items()}
        return state if self.compute_arguments is None else {**state, "arguments": self.compute_arguments()}


def finite_loss(loss: float | Tensor, step: int) -> float:
    """Return the loss of a step as a number, after checking that it is finite."""
    value = float(loss)
    if not math.isfinite(value):
        raise FloatingPointError(f"the loss is {value} in step {step}: matching diverged; lower lr")
    return value


def pack_arguments(arguments: Mapping[str, Any]) -> Tensor:
    """Return a condenser's arguments as a byte tensor of JSON text, because a saved state contains only tensors."""
    return torch.tensor(list(json.dumps(dict(arguments), sort_keys=True).encode()), dtype=torch.uint8)


def save_state(path: str | os.PathLike[str], state: Mapping[str, Tensor]) -> Path:
    """Write a condenser's state atomically to a single `.safetensors` file.

    Call this function in the function that you pass to the condenser as `callback=`.

    Args:
        path: path of the file.
        state: a state from `Progress.state()`.

    Returns:
        The path.

    Raises:
        OSError: the folder does not exist, is not writable or has no space left. An existing file is left unchanged.
        TypeError: `state` is not a mapping of tensors.
    """
    for value in check.mapping(state, "state").values():
        check.instance(value, Tensor, "state", "a mapping of names to tensors, as progress.state() returns it")
    return write_tensors(path, state, {"format": _FORMAT})


def load_state(path: str | os.PathLike[str]) -> State:
    """Read a state written by `save_state`. A condenser's option `resume` accepts this state, or the path of the file.

    Args:
        path: path of the file.

    Raises:
        FileNotFoundError: the file does not exist.
        ValueError: the file is damaged, was changed after it was written, or does not contain a condenser's state.
    """
    return read_tensors(path, kind=_FORMAT, content="a condenser's state")[0]


def restore_state(resume: Resume | None, arguments: Mapping[str, Any], steps: int) -> State | None:
    """Return the state to resume, after checking that it belongs to this call. Return None if `resume` is None."""
    if resume is None:
        return None
    if isinstance(resume, str | os.PathLike):
        state = load_state(resume)
    elif isinstance(resume, Mapping):
        state = dict(resume)
    else:
        raise TypeError(f"resume must be a state or the path of one, got {type(resume).__name__}")
    if not {"arguments", "step"} <= set(state):
        raise ValueError(f"resume must be a condenser's state, got a mapping of {sorted(state) or 'nothing'}")
    saved: dict[str, Any] = json.loads(bytes(state["arguments"].tolist()))
    wanted: dict[str, Any] = json.loads(json.dumps(dict(arguments)))
    different = [
        f"{name}={saved.get(name)!r} (now {wanted.get(name)!r})"
        for name in sorted({*saved, *wanted})
        if saved.get(name) != wanted.get(name)
    ]
    if different:
        raise ValueError(f"resume was saved by a call with other arguments: {', '.join(different)}")
    if int(state["step"]) > steps:
        raise ValueError(
            f"resume has already done {int(state['step'])} steps, but steps={steps}; pass at least as many"
        )
    return state
