"""Check that code reads no global random state and changes no tensor of a module."""

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
    """Refuse code in a `with` block that draws from a global random state or changes a tensor of a module.

    Either side effect would let one record influence the results of others without being limited by the clip. After the
    block, side effects are detected and undone, and the code is refused.

    Args:
        what: name of the code in the error message.
        modules: modules whose tensors must not change: parameters, buffers, and tensors that are plain attributes.
        device: device whose random state is checked, in addition to the random states of the CPU, NumPy and `random`.

    Raises:
        PrivacyError: the code draws from a global random state. Anyone who knows the seed knows the draws, and a record
            that takes part shifts the draws for the records after it.
        BatchStatistics: the code changes a tensor, which could carry information that no clip bounds.
    """
    cuda = [device] if device.type == "cuda" else []
    before = {label: (table, name, tensor, tensor.detach().clone()) for label, table, name, tensor in _tensors(modules)}
    torch_state, python_state = torch.get_rng_state(), random.getstate()
    numpy_state = np.random.get_state(legacy=False)  # noqa: NPY002
    device_states = [torch.cuda.get_rng_state(d) for d in cuda]
    changed: list[str] = []
    refusal: PrivacyError | None = None
    try:
        try:
            yield
        except PrivacyError as error:  # drawing or remembering also changes rows: report the cause first
            refusal = error
        drawn = not torch.equal(torch.get_rng_state(), torch_state)
        drawn |= any(not torch.equal(torch.cuda.get_rng_state(d), s) for d, s in zip(cuda, device_states))
        drawn |= random.getstate() != python_state
        drawn |= _comparable(np.random.get_state(legacy=False)) != _comparable(numpy_state)  # noqa: NPY002
    finally:
        torch.set_rng_state(torch_state)
        np.random.set_state(numpy_state)  # noqa: NPY002
        random.setstate(python_state)
        for d, state in zip(cuda, device_states):
            torch.cuda.set_rng_state(state, d)
        for label, table, name, _ in [*_tensors(modules)]:
            if label not in before:
                changed.append(label)
                del table[name]
        for label, (table, name, tensor, copy) in before.items():
            if table.get(name) is not tensor or not _equal(tensor, copy):
                changed.append(label)
                table[name] = tensor
                tensor.data = copy
    if changed:
        raise BatchStatistics(
            f"{what}: a forward pass changes {changed[0]}, which would carry information past the clip; store nothing "
            "about the examples"
        )
    if drawn:
        raise PrivacyError(
            f"{what} draws from the global random state, which is not secret: a record that takes part would shift "
            "the draws of those after it. nn.Dropout is drawn from the secret; set the rate of every other layer that "
            "draws (alpha dropout, dropout inside attention, F.dropout, stochastic depth) to 0"
        )
    if refusal is not None:
        raise refusal


def _comparable(state: Any) -> Any:
    if isinstance(state, dict):
        return [(name, _comparable(value)) for name, value in state.items()]
    return state.tobytes() if isinstance(state, np.ndarray) else state


def _tensors(modules: tuple[nn.Module, ...]) -> Iterator[tuple[str, dict[str, Any], str, Tensor]]:
    """Yield every tensor of the modules as (label, dict that contains the tensor, name in the dict, tensor)."""
    for module in modules:
        for prefix, part in module.named_modules():
            tables: tuple[dict[str, Any], ...] = (part._parameters, part._buffers, vars(part))
            for table in tables:
                for name, value in table.items():
                    if isinstance(value, Tensor):
                        yield f"{prefix}.{name}" if prefix else name, table, name, value


def _equal(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and torch.equal(torch.nan_to_num(one), torch.nan_to_num(other))
