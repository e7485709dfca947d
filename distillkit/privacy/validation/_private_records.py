"""Comparison of everything that user code holds with the private records of a call."""

from __future__ import annotations

import dis
import gc
import types
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from distillkit.privacy.capture._pytorch import FakeTensor, is_functorch_wrapped_tensor
from distillkit.privacy.errors import NotCapturable
from distillkit.rng import derive

_ACTIVE: ContextVar[PrivateRecords | None] = ContextVar("private records", default=None)
_FACTS = ("dtype", "device", "ndim", "dim", "layout", "requires_grad", "is_cuda", "is_floating_point")
"""Properties of a tensor of records that are public."""
_SIDE = 8
"""Least number of pixels of a channel whose contrast and brightness are removed before a comparison."""
_CODE, _NEAR, _SAME = 8, 0.15, 0.02
"""Length of the random projections of images; largest distances of the projections and of the scaled images."""
_LEAVES = (str, bytes, int, float, complex, types.ModuleType, types.FrameType, types.CodeType, type(None))
_LIBRARIES = (
    *("builtins", "torch", "torchvision", "numpy", "distillkit", "fl", "attacks", "functools", "collections"),
    *("abc", "typing", "dataclasses", "enum", "types"),
)


P = ParamSpec("P")
R = TypeVar("R")


def apart_from_records(*, content: bool = True) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorate a function that uses private records, so that user code which holds them is refused during the call.

    The function declares its records with `declare_records`. Captures of functions and draws of networks compare what
    they find with `active_records`.

    Args:
        content: whether copies of a record are refused, too. Clients of a federated run pass False: a server could
            otherwise send an image as weights, and learn from the error whether a client has it.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            token = _ACTIVE.set(_ACTIVE.get() or PrivateRecords((), content))
            try:
                return function(*args, **kwargs)
            finally:
                _ACTIVE.reset(token)

        return call

    return decorate


def declare_records(*tensors: Tensor) -> None:
    """Declare private images, labels and columns, with which user code is compared during the decorated call."""
    if (records := _ACTIVE.get()) is not None:
        _ACTIVE.set(records.joined(tensors))


def active_records() -> PrivateRecords:
    """Return the records that were declared in the current call, or no records."""
    return _ACTIVE.get() or PrivateRecords((), content=False)


class PrivateRecords:
    """Private tensors, with which tensors that user code holds are compared.

    Two images have the same content if they are equal up to brightness and contrast of each channel, and up to the
    rounding of 8 bits. So copies in another normalization or precision are found, too.

    Args:
        tensors: private tensors; those of four dimensions are images.
        content: whether `refuse` compares contents, or only memory.
    """

    def __init__(self, tensors: Iterable[Tensor], content: bool) -> None:
        self.tensors, self.content = tuple(tensors), content
        self._memory = [m for m in map(_memory, self.tensors) if m]
        self._codes: dict[int, Any] = {}
        self._passed: dict[int, object] = {}

    def joined(self, tensors: Iterable[Tensor]) -> PrivateRecords:
        """Return these records together with further ones."""
        more = [t for t in tensors if not self.share(t)]
        return PrivateRecords((*self.tensors, *more), self.content) if more else self

    def share(self, tensor: Tensor) -> bool:
        """Return whether a tensor overlaps the memory of a private tensor."""
        own = _memory(tensor)
        return own is not None and any(
            own[0] == kind and own[1] < end and start < own[2] for kind, start, end in self._memory
        )

    def contain(self, tensor: Tensor) -> bool:
        """Return whether a tensor contains an image of the records; False if contents are not compared."""
        parts = [i for i, t in enumerate(self.tensors) if t.ndim == 4 and len(t)] if self.content else []
        with torch.autocast("cpu", enabled=False):
            return any(self._match(tensor, part) for part in parts)

    def refuse(self, held: Iterable[tuple[str, Tensor]], name: str) -> None:
        """Refuse tensors that share the memory of the records, or contain a record."""
        for place, tensor in held if self.tensors else ():
            if type(tensor) in (Tensor, nn.Parameter) and self.share(tensor):
                raise NotCapturable(
                    f"{name} uses the records themselves besides the one that it is given ({place} shares their "
                    "memory), so every record would change the results of all; use public tensors only"
                )
            if type(tensor) in (Tensor, nn.Parameter) and self.contain(tensor.detach()):
                raise NotCapturable(
                    f"{name} holds a copy of a private record ({place}), so a record would change the results of all, "
                    "or be published; use public tensors only"
                )

    def refuse_reachable(self, root: object, name: str, *, functions: bool = True) -> None:
        """Refuse an object from which the records can be reached, if contents are compared; see `reachable`."""
        if self.content and self.tensors and id(root) not in self._passed:
            self.refuse(reachable(root, functions=functions), name)
            self._passed[id(root)] = root

    def refuse_state(self, network: nn.Module, name: str) -> None:
        """Refuse a network whose parameters or buffers hold the records."""
        self.refuse((*network.named_parameters(), *network.named_buffers()), name)

    def _match(self, tensor: Tensor, part: int) -> bool:
        images = self.tensors[part]
        channels, height, width = shape = images.shape[1:]
        if tensor.numel() % shape.numel():
            return False
        tensor = tensor.to_dense()
        tensor = torch.stack([tensor.real, tensor.imag]) if tensor.is_complex() else tensor
        views = [tensor.reshape(-1, *shape)]
        if tensor.ndim > 2 and tensor.shape[-1] == channels and tensor.shape[-3:-1] == (height, width):
            views.append(tensor.movedim(-1, -3).reshape(-1, *shape))
        if tensor.ndim == 2 and len(tensor) == shape.numel():
            views.append(tensor.T.reshape(-1, *shape))
        if part not in self._codes:
            from scipy.spatial import cKDTree

            projection = torch.randn(shape.numel(), _CODE, generator=derive(0, "codes"), dtype=torch.float32)
            codes = torch.cat([_scaled(some) @ projection for some in images.detach().cpu().split(512)])
            self._codes[part] = projection, cKDTree(codes.numpy())
        projection, tree = self._codes[part]
        for some in (some for view in views for some in view.detach().cpu().split(4096)):
            rows = _scaled(some)
            used = rows.norm(dim=1) > 0.5
            near = tree.query_ball_point((rows[used] @ projection).numpy(), _NEAR)
            for row, found in zip(rows[used], near):
                if found and float((_scaled(images[found].detach().cpu()) - row).norm(dim=1).min()) < _SAME:
                    return True
        return False


class Untouched(TorchFunctionMode):
    """Torch function mode in which an operation on private tensors is refused, whatever code calls it.

    Args:
        records: the private tensors.
        name: name of the code that runs in this mode, for the message.
        shape: whether the code may read the shape of the records.
    """

    def __init__(self, records: PrivateRecords, name: str, *, shape: bool) -> None:
        super().__init__()
        self.records, self.name = records, name
        self.allowed = (*_FACTS, "shape", "size") if shape else _FACTS

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.look(func, (*args, *(kwargs or {}).values()))
        return func(*args, **(kwargs or {}))

    def look(self, func: Any, arguments: Iterable[Any]) -> None:
        """Refuse a call if an argument shares the memory of the records."""
        name = getattr(getattr(func, "__self__", None), "__name__", getattr(func, "__name__", ""))
        if not self.records.tensors or name in self.allowed:
            return
        for value in arguments:
            for one in value if isinstance(value, list | tuple) else (value,):
                if type(one) in (Tensor, nn.Parameter):
                    self.records.refuse([(f"an argument of {name}", one)] if self.records.share(one) else [], self.name)


def reachable(root: object, *, functions: bool = True) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors and NumPy arrays that an object holds, with the path to each.

    Attributes, items, closures, defaults, bound objects and partial arguments are followed, and the globals that a
    user's function names. Of a user's class, the attributes are followed, and the methods whose name occurs in a
    function that was followed; also `__init__`, if the class itself is reached, such as a factory of networks.
    """
    seen: dict[int, Any] = {}
    names = {"forward", "features", "classifier", "__call__"}
    methods: list[tuple[str, Any]] = []
    stack: list[tuple[str, Any]] = [("it", root)]
    while stack:
        path, value = stack.pop()
        if id(value) not in seen and not isinstance(value, _LEAVES):
            seen[id(value)] = value
            if isinstance(value, Tensor):
                yield path, value
            elif isinstance(value, np.ndarray):
                if value.dtype.kind in "fiu":
                    yield path, torch.from_numpy(value if value.flags.writeable and value.flags.forc else value.copy())
            elif isinstance(value, types.FunctionType):
                if functions:
                    names.update(_names(value.__code__))
                    stack.extend(_parts_of_function(path, value))
            else:
                stack.extend(() if isinstance(value, type) else _parts(path, value))
                for kind in (value if isinstance(value, type) else type(value)).__mro__:
                    held = {} if _is_library(kind) else vars(kind)
                    own = {n: f for n, f in held.items() if isinstance(f, types.FunctionType)}
                    stack.extend((f"{path}.{n}", part) for n, part in held.items() if n not in own)
                    stack.extend((f"{path}.{n}", f) for n, f in own.items() if kind is value and n == "__init__")
                    methods += [(path, f) for f in own.values()]
        if not stack:
            stack = [(f"{p}.{f.__name__}", f) for p, f in methods if f.__name__ in names and id(f) not in seen]


def holds_fake(root: object) -> str:
    """Return the place of a fake tensor that a traced function left in an object's data or closure, or ""."""
    return next((path for path, tensor in reachable(root) if isinstance(tensor, FakeTensor)), "")


def _is_library(value: Any) -> bool:
    return (getattr(value, "__module__", None) or "").split(".")[0] in _LIBRARIES


def _names(code: types.CodeType, *operations: str) -> set[str]:
    """Return the names of globals and attributes in a function's code, or those of some operations."""
    inner = [_names(c, *operations) for c in code.co_consts if isinstance(c, types.CodeType)]
    own = {i.argval for i in dis.get_instructions(code) if i.opname in operations} if operations else code.co_names
    return set(own).union(*inner)


def _parts_of_function(path: str, function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    code, cells = function.__code__, function.__closure__ or ()
    yield from ((f"the variable {n}", c) for n, c in zip(code.co_freevars, cells))
    yield f"a default of {function.__name__}", (function.__defaults__, function.__kwdefaults__, vars(function))
    if not _is_library(function):
        values = function.__globals__
        yield from ((f"the variable {n}", values[n]) for n in _names(code, "LOAD_GLOBAL") if n in values)


def _parts(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        yield from ((f"{path}[{key!r}]", part) for key, part in value.items())
    elif isinstance(value, types.CellType):
        yield from ((path, part) for part in gc.get_referents(value))
    else:
        own = getattr(value, "__dict__", {})
        yield from ((f"{path}.{name}", part) for name, part in own.items())
        yield from ((path, part) for part in gc.get_referents(value) if part is not own)


def _memory(tensor: Tensor) -> tuple[str, int, int] | None:
    """Return the device and the range of addresses of a tensor's storage, or None if it has no memory."""
    wrapped = isinstance(tensor, FakeTensor) or is_functorch_wrapped_tensor(tensor)
    if wrapped or tensor.layout != torch.strided:
        return None
    storage = tensor.untyped_storage()
    start = storage.data_ptr()
    return (str(tensor.device), start, start + storage.nbytes()) if start and storage.nbytes() else None


def _scaled(images: Tensor) -> Tensor:
    """Return images [n, C, H, W] as rows of length 1, each channel without its brightness and contrast; or zeros."""
    rows = images.to(torch.float32).flatten(2)
    if rows.shape[2] >= _SIDE:
        rows = rows - rows.mean(2, keepdim=True)
        rows = rows / rows.norm(dim=2, keepdim=True).clamp_min(1e-6)
    flat = rows.flatten(1)
    length = flat.norm(dim=1, keepdim=True)
    return torch.where(torch.isfinite(length) & (length > 0), flat / length, 0.0)
