"""Emulated second device for machines without an accelerator: tensors in CPU memory, with an error for mixed devices.

PyTorch accepts the device `cpu:1` and forgets it. Here every storage remembers its device, with the rules of CUDA. Only
copies, scalars and CPU indices may mix devices. A CPU generator draws no tensor of the other device. Only CPU tensors
become arrays.

What a real accelerator would wait for, and every copy between the devices, is counted by `second_device`.
"""

from __future__ import annotations

import threading
import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils import clip_grad
from torch.overrides import TorchFunctionMode
from torch.utils._foreach_utils import _group_tensors_by_device_and_dtype
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

DEVICE = torch.device("cpu:1")
COPIES = ("aten::_to_copy", "aten::copy_", "aten::_foreach_copy_")
WAITING = (
    "aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select", "aten::equal", "aten::is_nonzero",
    "aten::bincount", "aten::unique_dim", "aten::_unique2", "aten::repeat_interleave",
)  # fmt: skip
"""Operations that read values of the device, for which Python waits."""
INDEXING = ("aten::index", "aten::index_put_", "aten::index_put", "aten::_index_put_impl_")


class _Inside(threading.local):
    """Thread-local flags: whether a PyTorch function is running that was given a tensor of the second device, and
    whether it is one that waits for nothing on an accelerator.
    """

    active = quiet = False


_inside = _Inside()


class Events(Counter[str]):
    """Numbers of "wait" (for the device) and "copy" (to or from it), on all threads; `places` tells where.

    A copy from the device, and a copy to it without `non_blocking`, also waits.
    """

    def __init__(self) -> None:
        super().__init__()
        self.places: Counter[str] = Counter()

    def note(self, kind: str, what: str) -> None:
        self[kind] += 1
        frames = [f for f in traceback.extract_stack() if "site-packages" not in f.filename]
        frames = [f for f in frames if "emulated_device" not in f.filename]
        self.places[f"{kind}: {what} at {frames[-1].filename.rpartition('/')[2]}:{frames[-1].lineno}"] += 1


_events = Events()


def _note_copy(to_device: bool, non_blocking: bool, what: str) -> None:
    _events.note("copy", what)
    if not (to_device and non_blocking):
        _events.note("wait", what)


class Mixed(RuntimeError):
    """An operation that CUDA would have refused."""


def on_second_device(value: Tensor) -> bool:
    """Return whether a tensor is on the second device."""
    try:
        return getattr(value.untyped_storage(), "second", False)
    except (NotImplementedError, RuntimeError):  # inside a transformation it has none of its own
        return False


def _put(value: Any, where: bool) -> None:
    for leaf in tree_leaves(value):
        if isinstance(leaf, Tensor):
            leaf.untyped_storage().second = where  # type: ignore[attr-defined]


class _Operations(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name, device = func._schema.name, kwargs.get("device")
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if name in INDEXING:
            given = [args[0], *(t for t in tree_leaves(args[2:]) if isinstance(t, Tensor))] + [
                t for t in tree_leaves(args[1]) if isinstance(t, Tensor) and on_second_device(t)
            ]
        places = {on_second_device(t) for t in given if t.ndim}
        inputs = any(on_second_device(t) for t in given)
        if name not in COPIES and (len(places) > 1 or (inputs and places == {False})):
            shapes = [(tuple(t.shape), "second" if on_second_device(t) else "CPU") for t in given]
            raise Mixed(f"{name} takes tensors of both devices: {shapes}")
        masks = (
            isinstance(args[1], list) and any(t is not None and t.dtype == torch.bool for t in args[1])
            if (name in INDEXING)
            else False
        )
        if inputs and (name in WAITING or masks) and not _inside.quiet:
            _events.note("wait", name)
        if name in INDEXING and on_second_device(args[0]):
            for index in (t for t in tree_leaves(args[1]) if isinstance(t, Tensor) and not on_second_device(t)):
                _note_copy(True, False, f"{name} by an index of {list(index.shape)} on the CPU")
        if (
            not _inside.quiet
            and name == "aten::copy_"
            and on_second_device(args[0]) != on_second_device(args[1])
            and args[1].ndim
        ):
            _note_copy(on_second_device(args[0]), bool(kwargs.get("non_blocking") or args[2:3] == (True,)), name)
        target = device == DEVICE or (device is None and inputs)
        backward = torch._C._current_graph_task_id() != -1  # where a cast names the device, too
        if device is not None and (backward or (name not in COPIES and _inside.active)):
            target = inputs if given else True  # by PyTorch itself, on the device that it reads off another tensor
        if kwargs.get("generator") is not None and (target or inputs):
            raise Mixed(f"{name} draws on the second device with a generator of the CPU")
        found = func(*args, **kwargs)
        if name in ("aten::copy_", "aten::_foreach_copy_"):
            return found
        fresh = [t for t in tree_leaves(found) if isinstance(t, Tensor)]
        known = {t.untyped_storage()._cdata for t in given}
        made = [t for t in fresh if t.untyped_storage()._cdata not in known]
        _put(made if given or device == DEVICE else [t for t in made if t.ndim], target)
        return found


class _Functions(TorchFunctionMode):
    """Handler of functions without an operation: the device of a tensor, and moves to its own device."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        first = args[0] if args and isinstance(args[0], Tensor) else None
        if func == Tensor.device.__get__:  # type: ignore[attr-defined]
            return DEVICE if first is not None and on_second_device(first) else func(*args, **kwargs)
        if first is not None and func in (Tensor.numpy, Tensor.__array__) and on_second_device(first):
            raise Mixed("a tensor of the second device becomes no array")
        if func is torch._C._nn._parse_to and first is not None:
            return (DEVICE if on_second_device(first) else first.device, *func(*args, **kwargs)[1:])
        if func is Tensor.cpu and first is not None:
            return _moved(first, False)
        blocking = not kwargs.get("non_blocking")
        if func is Tensor.to and first is not None:
            asked = torch._C._nn._parse_to(*(a for a in args[1:] if not isinstance(a, Tensor)), **_plain(kwargs))
            other = next((a for a in (*args[1:], kwargs.get("other")) if isinstance(a, Tensor)), None)
            dtype = other.dtype if other is not None else asked[1]
            if other is not None:
                moved = _moved(first, on_second_device(other), blocking)
            else:
                blocking = blocking and not asked[2]
                moved = first if asked[0] is None else _moved(first, asked[0] == DEVICE, blocking)
            same = dtype is None or dtype == moved.dtype
            return moved if same and not kwargs.get("copy") else moved.to(dtype=dtype or moved.dtype, copy=True)
        before = (_inside.active, _inside.quiet)
        _inside.active = first is not None and on_second_device(first) and "device" not in kwargs
        # CUDA checks no values of `one_hot`. A deep copy copies the storage, and later the flag of the device.
        _inside.quiet = (func is F.one_hot and len(args) + len(kwargs) > 1) or func is Tensor.__deepcopy__
        try:
            found = func(*args, **kwargs)
        finally:
            _inside.active, _inside.quiet = before
        if func in (torch.tensor, torch.as_tensor, torch.asarray) and kwargs.get("device") is not None:
            _put(found, torch.device(kwargs["device"]) == DEVICE)
            if torch.device(kwargs["device"]) == DEVICE and not (args and isinstance(args[0], Tensor)):
                _note_copy(True, False, "torch.tensor")
        if func is Tensor.new_tensor:
            if on_second_device(args[0]):
                _note_copy(True, False, "new_tensor")
            _put(found, on_second_device(args[0]))
        if func is Tensor.__deepcopy__ and first is not None and isinstance(found, Tensor):
            _put(found, on_second_device(first))
        return found


def _plain(kwargs: dict[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in kwargs.items() if k in ("device", "dtype", "non_blocking") and v is not None}


def _moved(value: Tensor, where: bool, blocking: bool = True) -> Tensor:
    if on_second_device(value) == where:
        return value
    _note_copy(where, not blocking, f"a tensor {list(value.shape)}")
    found = value.clone()
    _put(found, where)
    return found


@contextmanager
def second_device() -> Iterator[Events]:
    """Make `cpu:1` a separate device on this thread, and count what waits for it or copies."""
    with _Functions(), _Operations(), patch.object(clip_grad, "_group_tensors_by_device_and_dtype", _grouped):
        yield _events


def _grouped(lists: list[list[Tensor]], with_indices: bool = False) -> Any:
    """Group tensors for the clipping of gradients, which gets their device from C++."""
    found = _group_tensors_by_device_and_dtype(lists, with_indices)  # type: ignore[arg-type]
    return {(own[0][0].device, dtype): (own, rows) for (_, dtype), (own, rows) in found.items()}  # type: ignore[union-attr]
