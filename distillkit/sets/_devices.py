"""The option `device` of functions that start work: arguments move to the device once, and results return."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterable, Iterator
from typing import Any, ParamSpec, TypeVar, cast

import torch
from torch import Tensor, nn

from distillkit._utils import check
from distillkit.sets._labeled import LabeledImages
from distillkit.sets._stored import RealImages, StoredImages
from distillkit.sets.as_set import open_set

P = ParamSpec("P")
R = TypeVar("R")

_CPU = torch.device("cpu")
_AHEAD = 8
_MOST = 1 << 23
"""Networks are drawn `_AHEAD` steps ahead, or fewer if they have more than `_MOST` values together."""


def on_device(*sets: str, trains: str = "", makes: bool = True) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Return a decorator that gives a function's keyword `device` its meaning.

    With a device, copies of sets, tensors, networks and samplers are on the device during the call. Tensors and sets in
    the result return to the device of the first argument that has one. Without a device, nothing moves. The `info` of a
    returned set names the device. The keyword `precision`, if the function has it, changes how the call computes.

    Args:
        sets: names of the arguments that accept images in any form. The first may have its labels in `labels`.
        trains: name of a network that is changed in place. It moves itself, and returns even after an error.
        makes: whether the images of a returned set are new, so that their device is recorded.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        signature = inspect.signature(function)

        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            precision = cast("str | None", kwargs.get("precision"))
            if kwargs.get("device") is None:
                home = next((found for value in (*args, *kwargs.values()) if (found := _device_of(value))), _CPU)
                with _computing(precision, home):
                    return _recorded(function(*args, **kwargs), makes)
            device = check.device(cast(str, kwargs["device"]))
            bound = signature.bind(*args, **{name: value for name, value in kwargs.items() if name != "device"})
            given = bound.arguments
            for name in sets:
                if not isinstance(given.get(name), RealImages | None):
                    names = ("labels", "num_classes", "normalization") if name == sets[0] else ()
                    options = {n: given.pop(n, None) for n in names}
                    shown = bool(given.get("progress", True))
                    given[name] = open_set(given[name], **options, name=name, progress=shown)
            home = next((found for value in given.values() if (found := _device_of(value))), _CPU)
            trained = given.get(trains)
            before = _device_of(trained)
            bound.arguments = {
                name: value if name == trains else _moved(value, device) for name, value in given.items()
            }
            with _computing(precision, device):
                if not isinstance(trained, nn.Module) or before is None:
                    return _moved(_recorded(function(*bound.args, **bound.kwargs), makes), home, inside=True)
                try:
                    trained.to(device)
                    return function(*bound.args, **bound.kwargs)
                finally:
                    trained.to(before)

        return call

    return decorate


@contextlib.contextmanager
def _computing(precision: str | None, device: torch.device) -> Iterator[None]:
    """Compute in a `with` block with bfloat16 matrix products and convolutions ("bf16"), or in TF32 on a GPU."""
    if precision is None:
        yield
    elif check.one_of(precision, "precision", ("bf16", "tf32")) == "bf16":
        with torch.autocast(device.type, torch.bfloat16, cache_enabled=False):  # weights change within the block
            yield
    else:
        before = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("high")
        try:
            yield
        finally:
            torch.set_float32_matmul_precision(before)


def _recorded(result: R, makes: bool) -> R:
    if isinstance(result, LabeledImages) and makes:
        result.info = {**result.info, "device": str(result.images.device)}
    return result


def _device_of(value: object) -> torch.device | None:
    """Return the device of a tensor, a set or a network; None for other values."""
    if isinstance(value, RealImages):
        return value._empty.images.device
    if isinstance(value, nn.Module):
        value = next(value.parameters(), None)
    elif callable(getattr(value, "replay", None)):  # a message under attack
        value = next(iter(getattr(value, "observed", ())), None)
    return value.device if isinstance(value, Tensor) else None


def _moved(value: Any, device: torch.device, inside: bool = False) -> Any:
    """Return `value` on a device. Networks are copied; options move with the networks that they contain.

    The tensors of a dataclass move only with `inside`.
    """
    if isinstance(value, StoredImages):
        return value._on(device)
    if isinstance(value, Tensor | LabeledImages):
        return value.to(device) if _device_of(value) != device else value
    if isinstance(value, nn.Module):
        return value if _device_of(value) in (device, None) else copy.deepcopy(value).to(device)
    if callable(getattr(value, "draw", None)) and isinstance(getattr(value, "fixed", None), bool):
        twin = copy.copy(value)
        vars(twin)["draw"] = DrawOnDevice(value.draw, value.fixed, device)
        if callable(factory := getattr(value, "factory", None)):
            vars(twin)["factory"] = lambda: factory().to(device)
        return twin
    if callable(getattr(value, "replay", None)):  # a message under attack
        twin = copy.copy(value)
        vars(twin).update({name: _moved(one, device) for name, one in vars(value).items()})
        return twin
    if isinstance(value, dict):
        return {name: _moved(one, device, inside) for name, one in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_moved(one, device, inside) for one in value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        parts = {f.name: getattr(value, f.name) for f in dataclasses.fields(value) if f.init}
        kept = () if inside else (Tensor, LabeledImages, list, tuple, dict)
        moved = {n: part if isinstance(part, kept) else _moved(part, device, inside) for n, part in parts.items()}
        changed = {n: part for n, part in moved.items() if part is not parts[n]}
        return dataclasses.replace(value, **changed) if changed else value
    return value


class DrawOnDevice:
    """Method `draw` of a sampler whose networks are drawn on their own device, with its bits, and used on another.

    Args:
        draw: the sampler's own method.
        fixed: whether every draw returns the same network.
        device: device of the returned networks.
    """

    def __init__(self, draw: Callable[[torch.Generator], Any], fixed: bool, device: torch.device) -> None:
        self.own, self.fixed, self.device = draw, fixed, device
        self._network: Any = None

    def __call__(self, generator: torch.Generator) -> Any:
        """Return the network that the sampler draws, on the device."""
        return next(self.ahead([generator]))

    def ahead(self, generators: Iterable[torch.Generator]) -> Iterator[Any]:
        """Yield a network for each generator. The values of several networks are copied to the device together."""
        waiting: list[Tensor] = []
        for generator in generators:
            if self.fixed and self._network is not None:
                yield self._network
                continue
            drawn = self.own(generator)
            if not isinstance(drawn, nn.Module):
                yield drawn
                continue
            if self._network is None:
                self._network = copy.deepcopy(drawn).to(self.device)
            waiting.append(torch.cat([t.detach().flatten() for t in _values(drawn)] or [torch.empty(0)]))
            if len(waiting) == max(1, min(_AHEAD, _MOST // max(1, len(waiting[0])))):
                yield from self._load(waiting)
                waiting = []
        if waiting:
            yield from self._load(waiting)

    def _load(self, drawn: list[Tensor]) -> Iterator[Any]:
        own = _values(self._network)
        for values in torch.stack(drawn).to(self.device, non_blocking=True):
            with torch.no_grad():
                for tensor, value in zip(own, values.split([t.numel() for t in own]), strict=True):
                    tensor.copy_(value.view_as(tensor))
            yield self._network


def _values(network: nn.Module) -> list[Tensor]:
    """Return the parameters and the floating-point buffers of a network."""
    return [*network.parameters(), *(b for b in network.buffers() if b.is_floating_point())]
