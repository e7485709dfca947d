"""Tracing of a function of one record on fake tensors, and refusal of functions that cannot be captured."""

from __future__ import annotations

import random
import sys
import threading
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensor
from torch.distributions import Distribution
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

from distillkit.networks._dropout import undraw_dropout
from distillkit.privacy.capture._graph import Violation, constants, find_violation, without_writes
from distillkit.privacy.capture._private_records import PrivateRecords, Untouched, active_records
from distillkit.privacy.errors import BatchStatistics, NotCapturable, PrivacyError

__all__ = ["MARKER", "Stateless", "trace"]

MARKER = torch.Generator()
"""Generator that a traced function may draw from. Its draws become inputs of the captured function."""

_LOCK = threading.RLock()
_OWN_FOLDERS = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]), "<")
_FUSED = ("mkldnn", "scaled_dot_product")
"""Operators that vmap cannot batch. PyTorch has equivalents that it can batch."""


def trace(
    function: Callable[..., Sequence[Tensor]],
    shared: Sequence[Tensor],
    examples: Sequence[Tensor],
    *,
    function_name: str,
    names: Sequence[str],
    modules: Sequence[nn.Module] = (),
    records: Sequence[Tensor] = (),
) -> GraphModule:
    """Trace `function(shared, *examples)` on fake tensors, and return its graph of ATen operators.

    The graph computes the same results, but none of its operators writes to an existing tensor.
    """
    zeros = [torch.zeros(e.shape, dtype=e.dtype, device=e.device) for e in examples]
    private = active_records().joined(records)
    private.refuse(((names[i] if i < len(names) else "an argument", t) for i, t in enumerate(shared)), function_name)
    private.refuse_reachable(function, function_name)
    run = partial(
        _trace, function, [t.detach() for t in shared], zeros, function_name=function_name, modules=modules,
        records=private,
    )  # fmt: skip
    with _LOCK:
        graph = run()
        if any(fused in str(node.target) for node in graph.graph.nodes for fused in _FUSED):
            before = torch.backends.mkldnn.set_flags(_enabled=False)
            try:
                with sdpa_kernel(SDPBackend.MATH):
                    graph = run()
            finally:
                torch.backends.mkldnn.set_flags(_enabled=before[0])
        for node in reversed(list(graph.graph.nodes)):  # marks for the profiler, such as those of DataParallel
            if getattr(node.target, "namespace", "") == "profiler":
                graph.graph.erase_node(node)
        held = constants(graph, modules)
        private.refuse(held, function_name)
        violation = find_violation(graph, names, modules)
        targets = [node.target for node in graph.graph.nodes]
        if violation is None and any(torch.Tag.nondeterministic_seeded in getattr(t, "tags", ()) for t in targets):
            run(within=_NoBackwardDraws(function_name))
        if violation is not None:
            try:
                run(within=_Locate(violation))
            except NotCapturable as error:
                raise violation.error(function_name, str(error)) from None
            raise violation.error(function_name, "")
        graph = without_writes(graph, [*(t.detach() for t in shared), *zeros], function_name)
        graph.meta["constants"] = held
        return graph


def _trace(
    function: Callable[..., Sequence[Tensor]],
    shared: list[Tensor],
    examples: list[Tensor],
    *,
    function_name: str,
    modules: Sequence[nn.Module],
    records: PrivateRecords,
    within: TorchDispatchMode | None = None,
) -> GraphModule:
    def call(*inputs: Tensor) -> Sequence[Tensor]:
        values, one = list(inputs[: len(shared)]), inputs[len(shared) :]
        with ExitStack() as stack:
            stack.enter_context(_Watch(function_name, records))
            if within is not None:
                stack.enter_context(within)
            return function(values, *(e.clone() for e in one))

    python, numpy = random.getstate(), np.random.get_state(legacy=False)  # noqa: NPY002
    try:
        with ExitStack() as stack:
            stack.enter_context(_without_validation())
            for module in modules:
                stack.enter_context(undraw_dropout(module))
            if dynamo := sys.modules.get("torch._dynamo"):  # trace through torch.compile
                stack.enter_context(dynamo.config.patch(error_on_nested_fx_trace=False))
            graph = make_fx(call, tracing_mode="fake", _allow_non_fake_inputs=True)(*shared, *examples)
    except PrivacyError:
        raise
    except Exception as error:
        from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode  # imports sympy

        if isinstance(error, GuardOnDataDependentSymNode | DataDependentOutputException | DynamicOutputShapeException):
            raise NotCapturable(
                f"{function_name} chooses by the values of an example or of a random draw{user_line(error)}, so it is "
                "not a fixed function of one record; write the choice with torch.where, and keep shapes fixed"
            ) from None
        raise NotCapturable(
            f"{function_name} cannot be captured as a function of one example{user_line(error)}: "
            f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else 'no message'}"
        ) from error
    finally:
        for layer in (part for module in modules for part in module.modules() if isinstance(part, nn.RNNBase)):
            layer._flat_weights = [getattr(layer, name, None) for name in layer._flat_weights_names]
    drawn = random.getstate() != python
    drawn |= _comparable(np.random.get_state(legacy=False)) != _comparable(numpy)  # noqa: NPY002
    if drawn:
        random.setstate(python)
        np.random.set_state(numpy)  # noqa: NPY002
        raise NotCapturable(
            f"{function_name} draws from the global random state of NumPy or of `random`, so its draws would be the "
            "same for all records; draw with torch, without a generator, or from the generator that is passed"
        )
    return graph


@contextmanager
def _without_validation() -> Iterator[None]:
    """Leave out the default checks of `torch.distributions`, which choose by values; `torch.compile` does so, too."""
    before = Distribution._validate_args
    Distribution.set_default_validate_args(False)
    try:
        yield
    finally:
        Distribution.set_default_validate_args(before)


class _Watch(Untouched):
    """Torch function mode that raises an error if the traced function violates one of three rules.

    The function must not normalize with the statistics of a batch, draw from a generator that it created itself, or use
    the records.
    """

    def __init__(self, function_name: str, records: PrivateRecords) -> None:
        super().__init__(records, function_name, shape=False)
        self.function_name = function_name

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        self.look(func, (*args, *kwargs.values()))
        if (func in (F.batch_norm, torch.batch_norm)) and (kwargs.get("training", args[5:6] == (True,))):
            raise BatchStatistics(
                f"{self.function_name} normalizes with the statistics of a batch{user_line()}, so one record would "
                "change the results of all. Use instance, group or layer norm, or fixed statistics from public data"
            )
        if func is F.one_hot and kwargs.get("num_classes", args[1] if len(args) > 1 else -1) == -1:
            raise NotCapturable(
                f"{self.function_name} calls one_hot without a number of classes{user_line()}, so the shape would "
                "depend on the labels; pass num_classes: F.one_hot(labels, num_classes)"
            )
        generator = kwargs.pop("generator", None)
        if generator is not None and generator is not MARKER:
            raise NotCapturable(
                f"{self.function_name} draws from a generator of its own{user_line()}, which is not secret; draw "
                "without `generator=` (the draws then come from the secret), or from the generator that is passed"
            )
        return func(*args, **kwargs)


class _Locate(TorchDispatchMode):
    """Dispatch mode that raises an error at a given operator, to find the line of user code that calls it."""

    def __init__(self, violation: Violation) -> None:
        super().__init__()
        self.violation = violation

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is self.violation.operator:
            raise NotCapturable(user_line())
        return func(*args, **(kwargs or {}))


class _NoBackwardDraws(TorchDispatchMode):
    """Dispatch mode that refuses random draws in a backward pass, which would differ from those of the forward pass."""

    def __init__(self, function_name: str) -> None:
        super().__init__()
        self.function_name = function_name

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags and torch._C._current_graph_task_id() != -1:
            raise NotCapturable(
                f"{self.function_name} draws random numbers in the backward pass{user_line()}. torch.utils.checkpoint "
                "repeats the draws of dropout there; leave it out, or the dropout in it"
            )
        return func(*args, **(kwargs or {}))


def user_line(error: BaseException | None = None) -> str:
    """Return " (file.py:12: code)" for the innermost line outside PyTorch and this package, or "" if there is none."""
    frames = traceback.extract_stack(sys._getframe(1)) if error is None else traceback.extract_tb(error.__traceback__)
    for frame in reversed(frames):
        if not frame.filename.startswith(_OWN_FOLDERS):
            return f" ({Path(frame.filename).name}:{frame.lineno}: {frame.line})"
    return ""


class Stateless(nn.Module):
    """Module that calls a function which uses a network. If the call stores tensors in the network, an error is raised.

    Use it with `torch.func.functional_call`, so that the network has other parameters and buffers during the call.

    Args:
        network: network that the function uses; it becomes the submodule `network`.
        function: function that uses the network.
        function_name: name of the function in error messages.
    """

    def __init__(self, network: nn.Module, function: Callable[..., Any], function_name: str) -> None:
        super().__init__()
        self.network, self._function, self._function_name = network, function, function_name

    def names(self) -> list[str]:
        """Return the names of the network's parameters and buffers, in the same order as `state`."""
        return [n for n, _ in (*self.network.named_parameters(), *self.network.named_buffers())]

    def state(self) -> list[Tensor]:
        """Return the network's current parameters and buffers."""
        return [*self.network.parameters(), *self.network.buffers()]

    def at(self, state: Sequence[Tensor], *examples: Tensor) -> Any:
        """Return the function's result for other parameters and buffers of the network.

        Args:
            state: parameters and buffers, in the order in which the method `state` returns them.
            examples: arguments of the function.
        """
        new = dict(zip(map(id, self.state()), state))
        values = {  # every place of a shared tensor, but each module once: a layer may have several names
            f"network.{prefix}{'.' if prefix else ''}{name}": new[id(value)]
            for prefix, module in self.network.named_modules()
            for name, value in (*module._parameters.items(), *module._buffers.items())
            if value is not None
        }
        return torch.func.functional_call(self, values, examples, tie_weights=False)

    def forward(self, *examples: Tensor) -> Any:
        """Call the wrapped function, and return its result.

        All tensors that the call stored in the network are removed from it.

        Raises:
            BatchStatistics: the function stored a tensor in the network.
        """
        before = {(id(table), name): value for _, table, name, value in _attributes(self.network)}
        try:
            return self._function(*examples)
        finally:
            stored = []
            for label, table, name, value in list(_attributes(self.network)):
                old = before.get((id(table), name))
                if isinstance(value, Tensor) and value is not old:
                    stored.append(label)
                    if isinstance(old, Tensor):
                        table[name] = old
                    else:
                        del table[name]
                elif not isinstance(value, Tensor) and _contains_fake(value):
                    stored.append(label)
                    if isinstance(value, list | deque):
                        kept = [entry for entry in value if not _contains_fake(entry)]
                        value.clear()
                        value.extend(kept)
                    else:
                        del table[name]
            if stored:
                raise BatchStatistics(
                    f"{self._function_name}: a forward pass changes {stored[0]}, which would carry information past "
                    "the clip; store nothing about the examples"
                )


def _attributes(module: nn.Module) -> Iterator[tuple[str, dict[str, Any], str, Any]]:
    """Yield each attribute of a module and its submodules, such as its parameters and buffers."""
    for prefix, part in module.named_modules():
        for table in (part._parameters, part._buffers, vars(part)):
            for name, value in table.items():
                if name not in ("_modules", "_parameters", "_buffers", "_flat_weights"):
                    yield f"{prefix}.{name}" if prefix else name, table, name, value


def _contains_fake(value: Any, depth: int = 4) -> bool:
    if isinstance(value, Tensor):
        return isinstance(value, FakeTensor)
    if depth and isinstance(value, list | tuple | set | frozenset | deque):
        return any(_contains_fake(entry, depth - 1) for entry in value)
    return depth > 0 and isinstance(value, dict) and any(_contains_fake(e, depth - 1) for e in value.values())


def _comparable(state: Any) -> Any:
    if isinstance(state, dict):
        return [(name, _comparable(value)) for name, value in state.items()]
    return state.tobytes() if isinstance(state, np.ndarray) else state
