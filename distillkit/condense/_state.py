"""What a condenser needs to go on where it stopped, and how it tells the caller how far it is."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from distillkit._utils.files import read_tensors, write_tensors
from distillkit.fingerprint import network_fingerprint, set_fingerprint
from distillkit.networks.samplers import NetworkSampler
from distillkit.rng import derive
from distillkit.sets import LabeledImages

__all__ = [
    "Progress",
    "Resume",
    "State",
    "call_identity",
    "load_state",
    "pack_arguments",
    "restore_state",
    "save_state",
    "stable_repr",
]

State = dict[str, Tensor]
Resume = Mapping[str, Tensor] | str | os.PathLike[str]

_FORMAT = "distillkit.CondenserState/1"


@dataclass(frozen=True)
class Progress:
    """How far a condenser is: what it hands to `callback(progress)` after every step, to be shown, plotted or saved.

    Attributes:
        step: steps done so far, 1 to `steps`.
        steps: steps asked for.
        loss: the loss of this step, before its update.
        images: the synthetic images [N, C, H, W] as they are now. They are live: clone what you keep.
        live: the tensors that the condenser goes on from, live too; `state()` copies them.
        arguments: gives the call's arguments as a tensor for the state (see `pack_arguments`), worked out when asked.
    """

    step: int
    steps: int
    loss: float
    images: Tensor
    live: Mapping[str, Tensor] = field(repr=False)
    arguments: Callable[[], Tensor] | None = field(default=None, repr=False)

    def state(self) -> State:
        """A copy of all that is needed to go on from here, bit for bit: pass it (or its file) as `resume=`.

        Call it inside the callback: afterwards the live tensors belong to a later step.
        """
        state = {name: tensor.detach().clone() for name, tensor in self.live.items()}
        return state if self.arguments is None else {**state, "arguments": self.arguments().clone()}


def pack_arguments(arguments: Mapping[str, Any]) -> Tensor:
    """A call's arguments as a byte tensor, so that a condenser's state stays a flat map of tensors.

    Args:
        arguments: JSON values by name.
    """
    return torch.tensor(list(json.dumps(dict(arguments), sort_keys=True).encode()), dtype=torch.uint8)


def stable_repr(value: object) -> str:
    """A value as text for a record that another process compares.

    It is the repr, but what would show an address goes by its name.

    Args:
        value: an augmentation, say.
    """
    text = repr(value)
    if " at 0x" not in text:
        return text
    thing = value if hasattr(value, "__qualname__") else type(value)
    return f"{thing.__module__}.{getattr(thing, '__qualname__', '')}"


def call_identity(real: LabeledImages, networks: NetworkSampler) -> dict[str, Any]:
    """What a condensation's state says of its data and networks: a resumed call must have the same ones.

    The fingerprint of the data has no key: a state holds images that were made of them without noise anyway.

    Args:
        real: the set to condense.
        networks: where the networks come from; one is drawn, and judged by what it makes of noise.
    """
    drawn = networks.draw(derive(0, "identity"))
    return {"data": set_fingerprint(real), "network": network_fingerprint(drawn, real.images)}


def save_state(path: str | os.PathLike[str], state: Mapping[str, Tensor]) -> Path:
    """Write a condenser's state to one `.safetensors` file, as a whole or not at all; in the callback, now and then.

    Args:
        path: the file.
        state: what `Progress.state()` returned.

    Returns:
        The path.

    Raises:
        OSError: the folder is missing, unwritable or full; a file that was there before is left as it was.
    """
    return write_tensors(path, state, {"format": _FORMAT})


def load_state(path: str | os.PathLike[str]) -> State:
    """Read a state that `save_state` wrote. (`resume=` takes the file as well.)

    Args:
        path: the file.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file is damaged, or is something else than a condenser's state.
    """
    return read_tensors(path, kind=_FORMAT, what="a condenser's state")[0]


def restore_state(resume: Resume | None, arguments: Mapping[str, Any], steps: int) -> State | None:
    """The state that a condenser goes on from, once it is sure that it belongs to this call; None without `resume`.

    Args:
        resume: what `Progress.state()` returned, or the file that holds it.
        arguments: JSON values that decide the trajectory; the state's `arguments` entry (see `pack_arguments`)
            must hold the same. More steps may be asked for than the first call did.
        steps: steps asked for in all; the state's `step` must not be beyond.

    Raises:
        TypeError: `resume` is neither a mapping nor a path.
        ValueError: the state was saved by a call with other arguments (each is named), or is beyond `steps`.
    """
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
            f"resume has {int(state['step'])} steps behind it, but steps={steps}; ask for at least as many"
        )
    return state
