"""Tracing of a function of one record on fake tensors, and refusal of functions that cannot be captured."""

from __future__ import annotations

import operator
import random
import sys
import threading
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import GraphModule, Node
from torch.nn.attention import SDPBackend, sdpa_kernel

from distillkit.networks._dropout import undraw_dropout
from distillkit.privacy.capture._pytorch import (
    FakeTensor,
    OpOverload,
    TorchDispatchMode,
    chooses_by_values,
    current_backward,
    make_fx,
    traceable,
    user_operators,
)
from distillkit.privacy.errors import BatchStatistics, NotCapturable, PrivacyError
from distillkit.privacy.validation._private_records import PrivateRecords, Untouched, active_records

aten = torch.ops.aten

MARKER = torch.Generator()
"""Generator that a traced function may draw from. Its draws become inputs of the captured function."""

_LOCK = threading.RLock()
_OWN_FOLDERS = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]), "<")
_FUSED = ("mkldnn", "scaled_dot_product")
"""Operators that vmap cannot batch. PyTorch has equivalents that it can batch."""

_ATTEMPTS = 3
"""Number of traces before a change of the global random state, which other threads use, too, is a function's own."""

_RESIZING = ("resize", "resize_as", "_resize_output", "set")
"""Operators that change the memory of a tensor."""

_UNCHECKED = ("segment_reduce", "_segment_reduce_backward")
"""Operators whose integer inputs PyTorch does not compare with the size of a tensor."""

Draw = Callable[[int, torch.Generator], Tensor]
"""Function that draws a random input for n records from a generator."""

Violation = tuple[type[PrivacyError], str]
"""Class of the exception for a forbidden operator, and its message, in which "{line}" stands for the user's line."""


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

    The graph computes the same results, but none of its operators writes to an existing tensor. The entry "constants"
    of its `meta` lists the tensors that occur in it as constants, with their names.
    """
    zeros = [torch.zeros(e.shape, dtype=e.dtype, device=e.device) for e in examples]
    private = active_records().joined(records)
    private.refuse(((names[i] if i < len(names) else "an argument", t) for i, t in enumerate(shared)), function_name)
    private.refuse_reachable(function, function_name)
    values = [t.detach() for t in shared]
    run = partial(_trace, function, values, zeros, function_name, modules, private)
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
        held = {id(t): label for module in modules for label, _, _, t in _attributes(module) if isinstance(t, Tensor)}
        constants = [getattr(graph, str(node.target)) for node in graph.graph.nodes if node.op == "get_attr"]
        named = [(held.get(id(value), "a tensor outside it"), value) for value in constants]
        private.refuse(named, function_name)
        _refuse_operators(graph, names, held, run, function_name)
        if draws(graph):
            run(within=_Before(partial(_refuse_backward_draws, function_name)))
        graph = _without_writes(graph, [*values, *zeros], function_name)
        graph.meta["constants"] = named
        return graph


def _trace(
    function: Callable[..., Sequence[Tensor]],
    shared: list[Tensor],
    examples: list[Tensor],
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
            stack.enter_context(traceable())
            for module in modules:
                stack.enter_context(undraw_dropout(module))
            for _ in range(_ATTEMPTS):
                before = _global_draws()
                graph = make_fx(call, tracing_mode="fake", _allow_non_fake_inputs=True)(*shared, *examples)
                if _global_draws() == before:
                    return graph
    except PrivacyError:
        raise
    except Exception as error:
        if chooses_by_values(error):
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
            layer._flat_weights = [getattr(layer, name) for name in layer._flat_weights_names]
    random.setstate(python)
    np.random.set_state(numpy)  # noqa: NPY002
    raise NotCapturable(
        f"{function_name} draws from the global random state of NumPy or of `random`, so its draws would be the same "
        "for all records; draw with torch, without a generator, or from the generator that is passed"
    )


def _global_draws() -> tuple[Any, ...]:
    """Return the global random states of Python and NumPy, in a form that can be compared."""
    numpy: dict[str, Any] = np.random.get_state(legacy=False)  # noqa: NPY002
    key, position = numpy["state"]["key"].tobytes(), numpy["state"]["pos"]
    return random.getstate(), key, position, numpy["has_gauss"]


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


class _Before(TorchDispatchMode):
    """Dispatch mode that calls `look` with every operator before it runs."""

    def __init__(self, look: Callable[[Any], None]) -> None:
        super().__init__()
        self.look = look

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.look(func)
        return func(*args, **(kwargs or {}))


def _refuse_backward_draws(function_name: str, func: Any) -> None:
    if torch.Tag.nondeterministic_seeded in func.tags and current_backward() != -1:
        raise NotCapturable(
            f"{function_name} draws random numbers in the backward pass{user_line()}. torch.utils.checkpoint repeats "
            "the draws of dropout there; leave it out, or the dropout in it"
        )


def draws(graph: GraphModule) -> list[Node]:
    """Return the random operators of a graph."""
    random_numbers = torch.Tag.nondeterministic_seeded
    return [node for node in graph.graph.nodes if random_numbers in getattr(node.target, "tags", ())]


def functional_name(target: OpOverload) -> str:
    """Return an operator's name and overload without the underscore of operators that write."""
    return target.name().split("::")[1].replace("_.", ".").removesuffix("_")


def _refuse_operators(
    graph: GraphModule, names: Sequence[str], held: dict[int, str], run: Callable[..., GraphModule], function_name: str
) -> None:
    """Refuse a graph with an operator that captured functions may not use; `run` traces again to find its line."""
    bases: dict[Node, str] = {}
    for place, node in enumerate(graph.graph.nodes):
        if node.op == "placeholder":
            bases[node] = names[place] if place < len(names) else "an argument"
        elif node.op == "get_attr":
            value = getattr(graph, node.target)
            if type(value) not in (Tensor, nn.Parameter):
                kind = type(value).__name__
                raise NotCapturable(f"{function_name} uses a {kind}, which cannot be captured; use plain tensors only")
            bases[node] = held.get(id(value), "a tensor outside it")
        elif node.op == "call_function" and node.target is operator.getitem:
            if node.args[0] in bases:
                bases[node] = bases[node.args[0]]
        elif node.op == "call_function" and (found := _violation(node, bases)) is not None:
            error, why = found
            line = _line_of(node.target, run)
            raise error(f"{function_name}{why.replace('{line}', line)}")


def _line_of(target: Any, run: Callable[..., GraphModule]) -> str:
    """Return the line of the user's code that calls an operator, as `user_line` does."""

    def look(func: Any) -> None:
        if func is target:
            raise NotCapturable(user_line())

    try:
        run(within=_Before(look))
    except NotCapturable as error:
        return str(error)
    return ""


def _violation(node: Node, bases: dict[Node, str]) -> Violation | None:
    target = node.target
    if (
        not isinstance(target, OpOverload)
        or target.namespace != "aten"
        or target._schema.name in user_operators  # defined by a user
    ):
        return NotCapturable, (
            f" uses the operator {target}{{line}}, which is none of PyTorch's tensor operators; use tensor operators "
            "only"
        )
    found = node.meta.get("val")
    values = [v for v in (found if isinstance(found, list | tuple) else [found]) if isinstance(v, Tensor)]
    open_shape = any(type(side) is not int for value in values for side in value.shape)
    if torch.Tag.data_dependent_output in target.tags or open_shape:
        return NotCapturable, (
            f" reads values of an example or of a random draw ({target}){{line}}, and is not a fixed function of one "
            "record; keep values in tensors (torch.where) and shapes fixed"
        )
    for value in values:
        if value.is_floating_point() and value.dtype.itemsize < 4:
            return NotCapturable, (
                f" computes in {value.dtype}{{line}}: its rounding errors can exceed the clip; leave autocast and half "
                "precision out"
            )
    trains = "batch_norm" in target.name() and _argument(node, target, "training", "train") is True
    if trains and isinstance(_argument(node, target, "running_mean"), Node):  # the schema does not declare this write
        return BatchStatistics, (
            ": a forward pass changes running statistics{line}, which would carry information past the clip; store "
            "nothing about the examples"
        )
    if torch.Tag.nondeterministic_seeded in target.tags and functional_name(target) not in DRAWS:
        return NotCapturable, (
            f" draws random numbers by {target}{{line}}, which cannot be drawn for each record; draw with torch.rand "
            "or torch.randn"
        )
    returned = {alias for r in target._schema.returns if r.alias_info for alias in r.alias_info.before_set}
    for argument in target._schema.arguments:
        given = _argument(node, target, argument.name)
        for one in given if isinstance(given, list | tuple) else (given,):
            if not (isinstance(one, Node) and one in bases and argument.alias_info):
                continue
            if argument.alias_info.is_write:
                return BatchStatistics, (
                    f": a forward pass changes {bases[one]}{{line}}, which would carry information past the clip; "
                    "store nothing about the examples"
                )
            if returned & argument.alias_info.before_set or "*" in argument.alias_info.after_set:
                bases[node] = bases[one]  # a view, or a list of views
    name = functional_name(target).split(".")[0]
    if name in _UNCHECKED:
        return NotCapturable, (
            f" uses {target}{{line}}, which does not check its indices and may use the memory of other records; use "
            "sums over a mask, gather or scatter"
        )
    if name in _RESIZING:
        return NotCapturable, (
            f" uses {target}{{line}}, which may read memory that holds no value; use reshape, expand or F.pad"
        )
    return None


def _argument(node: Node, target: OpOverload, *names: str) -> Any:
    """Return the value of an operator's argument with one of these `names`, or None if there is none."""
    for place, argument in enumerate(target._schema.arguments):
        if argument.name in names:
            return node.args[place] if place < len(node.args) else node.kwargs.get(argument.name)
    return None


def _without_writes(graph: GraphModule, inputs: Sequence[Tensor], function_name: str) -> GraphModule:
    """Return an equivalent graph without operators that write to a tensor. Its constants are copies of the originals.

    Operators that create uninitialized tensors, such as `torch.empty`, are replaced by operators that fill them with
    zeros.
    """
    if _writes(graph):
        raw = graph
        functional = torch.func.functionalize(lambda *given: raw.forward(*given), remove="mutations")
        refusal = BatchStatistics(
            f"{function_name} writes to a tensor that it did not create, which would carry information past the clip; "
            "store nothing about the examples"
        )
        try:
            graph = make_fx(functional, tracing_mode="fake", _allow_non_fake_inputs=True)(*inputs)
        except RuntimeError as error:  # a write to a constant, through a view
            raise refusal from error
        if _writes(graph):  # a write to an input
            raise refusal
    for node in list(graph.graph.nodes):
        if isinstance(node.target, OpOverload) and functional_name(node.target).startswith(("empty", "new_empty")):
            value = node.meta["val"]
            kind = {"dtype": value.dtype, "device": value.device}
            with graph.graph.inserting_before(node):
                node.replace_all_uses_with(graph.graph.call_function(aten.zeros.default, (list(value.shape),), kind))
    graph.graph.eliminate_dead_code()
    for target in {node.target for node in graph.graph.nodes if node.op == "get_attr"}:
        constant = getattr(graph, target).detach().clone()
        delattr(graph, target)
        setattr(graph, target, constant)
    graph.recompile()
    return graph


def _writes(graph: GraphModule) -> bool:
    return any(isinstance(n.target, OpOverload) and n.target._schema.is_mutable for n in graph.graph.nodes)


def _kind(node: Node) -> tuple[list[int], dict[str, Any]]:
    value = node.meta["val"]
    return list(value.shape), {"dtype": value.dtype, "device": value.device}


def _uniform(node: Node, low: Any = 0.0, high: Any = 1.0) -> Draw:
    shape, kind = _kind(node)
    return lambda n, g: (torch.rand(n, *shape, generator=g, dtype=kind["dtype"]) * (high - low) + low).to(**kind)


def _normal(node: Node, mean: Any = 0.0, std: Any = 1.0) -> Draw:
    shape, kind = _kind(node)
    return lambda n, g: (torch.randn(n, *shape, generator=g, dtype=kind["dtype"]) * std + mean).to(**kind)


def _coin(node: Node, p: Any) -> Draw:
    shape, kind = _kind(node)
    return lambda n, g: (torch.rand(n, *shape, generator=g) < p).to(**kind)


def _integer(node: Node, *bounds: Any) -> Draw:
    shape, kind = _kind(node)
    low, high = (0, *bounds)[-2:]
    return lambda n, g: torch.randint(low, high, (n, *shape), generator=g, dtype=kind["dtype"]).to(**kind)


DRAWS: dict[str, tuple[Callable[..., Draw], slice]] = {
    "rand": (_uniform, slice(0)),
    "rand_like": (_uniform, slice(0)),
    "randn": (_normal, slice(0)),
    "randn_like": (_normal, slice(0)),
    "uniform": (_uniform, slice(1, 3)),
    "normal": (_normal, slice(1, 3)),
    "normal_functional": (_normal, slice(1, 3)),
    "bernoulli": (_uniform, slice(0)),
    "bernoulli.p": (_coin, slice(1, 2)),
    "bernoulli.float": (_coin, slice(1, 2)),
    "randint": (_integer, slice(0, 1)),
    "randint.low": (_integer, slice(0, 2)),
    "randint_like": (_integer, slice(1, 2)),
    "randint_like.low_dtype": (_integer, slice(1, 3)),
}
"""Random operators, by `functional_name` -> how to draw their values, and which arguments state the range."""


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
                replaced = value is not before.get((id(table), name))
                if replaced if isinstance(value, Tensor) else _contains_fake(value):
                    stored.append(label)
                    if not replaced and isinstance(value, list | deque | set | dict):
                        _remove_fake(value)
                    elif (id(table), name) in before:
                        table[name] = before[id(table), name]
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


def held_beside_state(module: nn.Module) -> list[Any]:
    """Return what a module holds besides its parameters and buffers, and what the containers among it contain."""
    held: list[Any] = []
    for part in module.modules():
        for name, value in vars(part).items():
            if name not in ("_parameters", "_buffers", "_flat_weights"):
                inner = value.values() if isinstance(value, dict) else value
                held += [value, *(inner if isinstance(value, dict | list | tuple | set | deque) else ())]
                held += [value._version] if isinstance(value, Tensor) else []
    return held


def _remove_fake(value: Any) -> None:
    """Remove the entries that contain a fake tensor from a list, deque, set or dictionary."""
    kept = [entry for entry in (value.items() if isinstance(value, dict) else value) if not _contains_fake(entry)]
    value.clear()
    (value.extend if isinstance(value, list | deque) else value.update)(kept)


def _contains_fake(value: Any, depth: int = 4) -> bool:
    if isinstance(value, Tensor):
        return isinstance(value, FakeTensor)
    if depth and isinstance(value, list | tuple | set | frozenset | deque):
        return any(_contains_fake(entry, depth - 1) for entry in value)
    return depth > 0 and isinstance(value, dict) and any(_contains_fake(e, depth - 1) for e in value.values())
