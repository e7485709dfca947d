"""The law that a per-example guarantee rests on, tried on public noise: what is made of an example is its own."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from distillkit.privacy.errors import BatchStatistics, PrivacyError
from distillkit.rng import derive

__all__ = ["require_rows_apart", "untouched"]


@contextmanager
def untouched(what: str, *modules: nn.Module, device: torch.device) -> Iterator[None]:
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


def require_rows_apart(
    function: Callable[[Tensor], Tensor], images: Tensor, what: str, *modules: nn.Module, sizes: Sequence[int] = ()
) -> None:
    """Refuse a function in which the images of a batch meet: each row must be what its image alone would give.

    Called before private images go through a network or an augmentation, because the sensitivity of a sum rests on it:
    one record may change its own row and no other, wherever it stands. Tried on all images together, on a few, at other
    batch sizes, and with some of them replaced.

    Args:
        function: maps images [N, C, H, W] to N rows of anything, without draws of its own.
        images: public ones to try it on, float [N, C, H, W], at least two.
        what: names the function in the message.
        modules: what the function uses; it must change no tensor that they hold.
        sizes: further batch sizes; larger batches hold the images several times, in random places.

    Raises:
        BatchStatistics: images meet, or their number or place counts, or there are not as many rows as images.
        PrivacyError: it draws from a global random state.
    """
    with torch.no_grad(), untouched(what, *modules, device=images.device):
        alone = torch.cat([_rows(function, image, what) for image in images.split(1)])
        for size in sorted({2, 3, len(images), *sizes}):
            drawn = torch.randint(len(images), (size,), generator=derive(size, "try"))
            index = (drawn if size != len(images) else torch.arange(size)).to(images.device)
            batch, own = images[index], alone[index]
            _same(_rows(function, batch, what), own, what)
            kept = (torch.randperm(size, generator=derive(size, "kept")) % 2 == 0).to(images.device)
            for rows in (kept, ~kept) if size in (len(images), max(sizes, default=0)) else ():
                mixed = torch.where(rows.view(-1, 1, 1, 1), batch, 30 * batch.flip(0) + 1)
                _same(_rows(function, mixed, what)[rows], own[rows], what)


def _rows(function: Callable[[Tensor], Tensor], images: Tensor, what: str) -> Tensor:
    out = function(images.clone())
    if out.ndim < 1 or len(out) != len(images):
        raise BatchStatistics(f"{what} makes {list(out.shape)} of {len(images)} images; each must give one row")
    return out.flatten(1) if out.ndim > 1 else out[:, None]


def _same(ours: Tensor, alone: Tensor, what: str) -> None:
    moved = (ours - alone).abs().mean(1) / (alone.abs().mean(1) + 1e-12)
    if not bool((moved <= torch.finfo(moved.dtype).eps ** 0.5).all()):
        raise BatchStatistics(
            f"{what} makes something else of an image when it stands elsewhere or among other images, so one record "
            "changes more than its own contribution; every example must be treated by itself"
        )
