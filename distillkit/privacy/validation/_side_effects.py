"""The law that a per-example guarantee rests on, tried on public noise: what is made of an example is its own."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from distillkit.privacy.errors import BatchStatistics, PrivacyError

__all__ = ["forbid_side_effects"]


@contextmanager
def forbid_side_effects(what: str, *modules: nn.Module, device: torch.device) -> Iterator[None]:
    """A `with` block whose code must leave no trace: it draws from no global random state and changes no held tensor.

    Both would be a way past the clip, by which one record could act on another. They are looked for after the block,
    undone, and refused.

    Args:
        what: names the code on trial in the message.
        modules: whose tensors must stay as they are: parameters, buffers, and tensors that are plain attributes.
        device: whose random state is watched beside the CPU's, NumPy's and `random`'s.

    Raises:
        PrivacyError: it draws: whoever knows the seed knows the draws, and a record that takes part shifts them for
            the records after it.
        BatchStatistics: a tensor changed: it would carry what no clip bounds.
    """
    cuda = [device] if device.type == "cuda" else []
    before = {label: (held, name, tensor, tensor.detach().clone()) for label, held, name, tensor in _held(modules)}
    torch_state, python_state = torch.get_rng_state(), random.getstate()
    numpy_state = np.random.get_state(legacy=False)  # noqa: NPY002
    device_states = [torch.cuda.get_rng_state(d) for d in cuda]
    moved: list[str] = []
    refusal: PrivacyError | None = None
    try:
        try:
            yield
        except PrivacyError as error:  # what draws or remembers gives other rows too: name the cause
            refusal = error
        drawn = not torch.equal(torch.get_rng_state(), torch_state)
        drawn |= any(not torch.equal(torch.cuda.get_rng_state(d), s) for d, s in zip(cuda, device_states))
        drawn |= random.getstate() != python_state
        drawn |= _frozen(np.random.get_state(legacy=False)) != _frozen(numpy_state)  # noqa: NPY002
    finally:
        torch.set_rng_state(torch_state)
        np.random.set_state(numpy_state)  # noqa: NPY002
        random.setstate(python_state)
        for d, state in zip(cuda, device_states):
            torch.cuda.set_rng_state(state, d)
        for label, held, name, _ in [*_held(modules)]:
            if label not in before:
                moved.append(label)
                del held[name]
        for label, (held, name, tensor, copy) in before.items():
            if held.get(name) is not tensor or not _equal(tensor, copy):
                moved.append(label)
                held[name] = tensor
                tensor.data = copy
    if moved:
        raise BatchStatistics(
            f"{what}: a forward pass changes {moved[0]}, which would carry what no clip bounds; keep nothing of the "
            "examples"
        )
    if drawn:
        raise PrivacyError(
            f"{what} draws from the global random state, which is not secret: a record that takes part would shift "
            "the draws of those after it. nn.Dropout is drawn from the secret; set the rate of every other layer that "
            "draws (alpha dropout, attention's own, F.dropout, stochastic depth) to 0"
        )
    if refusal is not None:
        raise refusal


def _frozen(state: Any) -> Any:
    if isinstance(state, dict):
        return [(name, _frozen(value)) for name, value in state.items()]
    return state.tobytes() if isinstance(state, np.ndarray) else state


def _held(modules: tuple[nn.Module, ...]) -> Iterator[tuple[str, dict[str, Any], str, Tensor]]:
    """Where the tensors of modules stand: a label, the dict that holds it, its name there, and the tensor."""
    for module in modules:
        for prefix, part in module.named_modules():
            tables: tuple[dict[str, Any], ...] = (part._parameters, part._buffers, vars(part))
            for held in tables:
                for name, value in held.items():
                    if isinstance(value, Tensor):
                        yield f"{prefix}.{name}" if prefix else name, held, name, value


def _equal(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and torch.equal(torch.nan_to_num(one), torch.nan_to_num(other))
