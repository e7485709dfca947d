"""Checks and rewrites of the graph of a traced function."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx

from distillkit.privacy.errors import BatchStatistics, NotCapturable, PrivacyError

__all__ = ["Draw", "Violation", "draws_as_inputs", "find_violation", "for_batches", "without_writes"]

aten = torch.ops.aten

_SMALL_MAP = 16
"""Largest number of output pixels of a convolution whose weight gradient is computed as a product of matrices."""

_RESIZING = ("resize", "resize_as", "_resize_output", "set")
"""Operators that change the memory of a tensor."""

_UNCHECKED = ("segment_reduce", "_segment_reduce_backward")
"""Operators whose integer inputs PyTorch does not compare with the size of a tensor."""

_GRIDS = {
    aten.grid_sampler_2d.default: 1,
    aten.grid_sampler_3d.default: 1,
    aten.grid_sampler_2d_backward.default: 2,
    aten.grid_sampler_3d_backward.default: 2,
}
"""Operators that read at the places of a grid -> position of the grid among the arguments."""

Draw = Callable[[int, torch.Generator], Tensor]
"""Function that draws a random input for n records from a generator."""


@dataclass(frozen=True)
class Violation:
    """Forbidden operator in a function that `capture` traces.

    Args:
        operator: the operator.
        kind: class of the exception to raise.
        why: text of the error message after the name of the traced function. "{line}" in this text is replaced by the
            line of the user's code.
    """

    operator: Any
    kind: type[PrivacyError]
    why: str

    def error(self, function_name: str, line: str) -> PrivacyError:
        """Return the exception to raise for this violation, an operator that a captured function may not use."""
        return self.kind(f"{function_name}{self.why.replace('{line}', line)}")


def constants(graph: GraphModule, modules: Sequence[nn.Module]) -> list[tuple[str, Tensor]]:
    """Return the tensors that occur in a graph as constants, with their names in `modules` or a description."""
    held = {id(t): n for m in modules for p, c in m.named_modules() for n, t in _tensors(p, c)}
    values = [getattr(graph, str(node.target)) for node in graph.graph.nodes if node.op == "get_attr"]
    return [(held.get(id(value), "a tensor outside it"), value) for value in values]


def find_violation(graph: GraphModule, names: Sequence[str], modules: Sequence[nn.Module]) -> Violation | None:
    """Return the first operator in a graph that is not allowed in captured functions, or None if all are allowed."""
    held = {id(t): n for m in modules for p, c in m.named_modules() for n, t in _tensors(p, c)}
    bases: dict[Node, str] = {}
    for place, node in enumerate(graph.graph.nodes):
        if node.op == "placeholder":
            bases[node] = names[place] if place < len(names) else "an argument"
        elif node.op == "get_attr":
            value = getattr(graph, node.target)
            if type(value) not in (Tensor, nn.Parameter):
                return Violation(
                    None,
                    NotCapturable,
                    f" uses a {type(value).__name__}, which cannot be captured; use plain tensors only",
                )
            bases[node] = held.get(id(value), "a tensor outside it")
        elif node.op == "call_function" and node.target is operator.getitem:
            if node.args[0] in bases:
                bases[node] = bases[node.args[0]]
        elif node.op == "call_function" and (found := _violation(node, bases)) is not None:
            return found
    return None


def _tensors(prefix: str, module: nn.Module) -> list[tuple[str, Tensor]]:
    named = {**module._parameters, **module._buffers, **vars(module)}
    return [(f"{prefix}.{n}" if prefix else n, t) for n, t in named.items() if isinstance(t, Tensor)]


def _violation(node: Node, bases: dict[Node, str]) -> Violation | None:
    target = node.target
    if (
        not isinstance(target, OpOverload)
        or target.namespace not in ("aten", "prims")
        or target._schema.name in torch.library._defs  # defined by a user
    ):
        return Violation(
            target, NotCapturable,
            f" uses the operator {target}{{line}}, which is none of PyTorch's tensor operators; use tensor operators "
            "only",
        )  # fmt: skip
    if torch.Tag.data_dependent_output in target.tags or _has_open_shape(node.meta.get("val")):
        return Violation(
            target, NotCapturable,
            f" reads values of an example or of a random draw ({target}){{line}}, and is not a fixed function of one "
            "record; keep values in tensors (torch.where) and shapes fixed",
        )  # fmt: skip
    values = node.meta.get("val")
    for value in values if isinstance(values, list | tuple) else [values]:
        if isinstance(value, Tensor) and value.is_floating_point() and value.dtype.itemsize < 4:
            return Violation(
                target, NotCapturable,
                f" computes in {value.dtype}{{line}}: its rounding errors can exceed the clip; leave autocast and half "
                "precision out",
            )  # fmt: skip
    trains = "batch_norm" in target.name() and _argument(node, target, "training", "train") is True
    if trains and isinstance(_argument(node, target, "running_mean"), Node):  # the schema does not declare this write
        return Violation(
            target, BatchStatistics,
            ": a forward pass changes running statistics{line}, which would carry information past the clip; store "
            "nothing about the examples",
        )  # fmt: skip
    if torch.Tag.nondeterministic_seeded in target.tags and _functional_name(target) not in _DRAWS:
        return Violation(
            target, NotCapturable,
            f" draws random numbers by {target}{{line}}, which cannot be drawn for each record; draw with torch.rand "
            "or torch.randn",
        )  # fmt: skip
    returned = {alias for r in target._schema.returns if r.alias_info for alias in r.alias_info.before_set}
    for argument in target._schema.arguments:
        given = _argument(node, target, argument.name)
        for one in given if isinstance(given, list | tuple) else (given,):
            if not (isinstance(one, Node) and one in bases and argument.alias_info):
                continue
            if argument.alias_info.is_write:
                return Violation(
                    target, BatchStatistics,
                    f": a forward pass changes {bases[one]}{{line}}, which would carry information past the clip; "
                    "store nothing about the examples",
                )  # fmt: skip
            if returned & argument.alias_info.before_set or "*" in argument.alias_info.after_set:
                bases[node] = bases[one]  # a view, or a list of views
    if _functional_name(target).split(".")[0] in _UNCHECKED:
        return Violation(
            target, NotCapturable,
            f" uses {target}{{line}}, which does not check its indices and may use the memory of other records; use "
            "sums over a mask, gather or scatter",
        )  # fmt: skip
    if _functional_name(target).split(".")[0] in _RESIZING:
        return Violation(
            target, NotCapturable,
            f" uses {target}{{line}}, which may read memory that holds no value; use reshape, expand or F.pad",
        )  # fmt: skip
    return None


def _argument(node: Node, target: OpOverload, *names: str) -> Any:
    """Return the value of an operator's argument with one of these `names`, or None if there is none."""
    for place, argument in enumerate(target._schema.arguments):
        if argument.name in names:
            return node.args[place] if place < len(node.args) else node.kwargs.get(argument.name)
    return None


def _has_open_shape(value: Any) -> bool:
    values = value if isinstance(value, list | tuple) else [value]
    return any(isinstance(v, Tensor) and not all(type(side) is int for side in v.shape) for v in values)


def without_writes(graph: GraphModule, inputs: Sequence[Tensor], function_name: str) -> GraphModule:
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
    for node in [n for n in graph.graph.nodes if n.op == "call_function" and _is_empty(n.target)]:
        shape, kind = _shaped(node)
        with graph.graph.inserting_before(node):
            node.replace_all_uses_with(graph.graph.call_function(aten.zeros.default, (shape,), kind))
    graph.graph.eliminate_dead_code()
    for target in {node.target for node in graph.graph.nodes if node.op == "get_attr"}:
        constant = getattr(graph, target).detach().clone()
        delattr(graph, target)
        setattr(graph, target, constant)
    graph.recompile()
    return graph


def _writes(graph: GraphModule) -> bool:
    return any(isinstance(n.target, OpOverload) and n.target._schema.is_mutable for n in graph.graph.nodes)


def _is_empty(target: Any) -> bool:
    return isinstance(target, OpOverload) and target._schema.name.startswith(("aten::empty", "aten::new_empty"))


def _functional_name(target: OpOverload) -> str:
    return target.name().split("::")[1].replace("_.", ".").removesuffix("_")


def _shaped(node: Node) -> tuple[list[int], dict[str, Any]]:
    value = node.meta["val"]
    return list(value.shape), {"dtype": value.dtype, "device": value.device}


def _uniform(node: Node, low: float = 0.0, high: float = 1.0) -> Draw:
    shape, kind = _shaped(node)
    return lambda n, g: (torch.rand(n, *shape, generator=g, dtype=kind["dtype"]) * (high - low) + low).to(
        kind["device"]
    )


def _normal(node: Node, mean: float = 0.0, std: float = 1.0) -> Draw:
    shape, kind = _shaped(node)
    return lambda n, g: (torch.randn(n, *shape, generator=g, dtype=kind["dtype"]) * std + mean).to(**kind)


def _coin(node: Node, p: float) -> Draw:
    shape, kind = _shaped(node)
    return lambda n, g: (torch.rand(n, *shape, generator=g) < p).to(**kind)


def _integer(node: Node, low: int, high: int) -> Draw:
    shape, kind = _shaped(node)
    return lambda n, g: torch.randint(low, high, (n, *shape), generator=g, dtype=kind["dtype"]).to(**kind)


_DRAWS: dict[str, Callable[[Node], Draw]] = {
    "rand": _uniform,
    "rand_like": _uniform,
    "randn": _normal,
    "randn_like": _normal,
    "uniform": lambda node: _uniform(node, *node.args[1:3]),  # type: ignore[arg-type]
    "normal": lambda node: _normal(node, *node.args[1:3]),  # type: ignore[arg-type]
    "normal_functional": lambda node: _normal(node, *node.args[1:3]),  # type: ignore[arg-type]
    "bernoulli": _uniform,
    "bernoulli.p": lambda node: _coin(node, node.args[1]),  # type: ignore[arg-type]
    "bernoulli.float": lambda node: _coin(node, *(node.args[1:2] or (0.5,))),  # type: ignore[arg-type]
    "randint": lambda node: _integer(node, 0, node.args[0]),  # type: ignore[arg-type]
    "randint.low": lambda node: _integer(node, *node.args[:2]),  # type: ignore[arg-type]
    "randint_like": lambda node: _integer(node, 0, node.args[1]),  # type: ignore[arg-type]
    "randint_like.low_dtype": lambda node: _integer(node, *node.args[1:3]),  # type: ignore[arg-type]
}
"""Random operators, by name without a trailing underscore -> function of the node that returns the draw."""


def draws_as_inputs(graph: GraphModule) -> list[Draw]:
    """Replace each random operator of a graph by an additional input, whose random values are drawn outside the graph.

    Return one function per additional input, which draws the values of this input.
    """
    last = [node for node in graph.graph.nodes if node.op == "placeholder"][-1]
    found = []
    for node in list(graph.graph.nodes):
        if node.op == "call_function" and torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
            found.append(_DRAWS[_functional_name(node.target)](node))
            with graph.graph.inserting_after(last):
                last = graph.graph.placeholder(f"draw_{len(found)}")
            last.meta["val"] = node.meta["val"]
            new = last
            if node.target is aten.bernoulli.default:
                with graph.graph.inserting_before(node):
                    below = graph.graph.call_function(aten.lt.Tensor, (last, node.args[0]))
                    new = graph.graph.call_function(aten._to_copy.default, (below,), {"dtype": node.meta["val"].dtype})
            node.replace_all_uses_with(new)
            graph.graph.erase_node(node)
    graph.recompile()
    return found


def for_batches(graph: GraphModule, function_name: str) -> None:
    """Replace operators of a graph, in place, by equivalent operators that vmap can batch, or can batch faster."""
    for node in list(graph.graph.nodes):
        if node.target is aten.view.default:
            node.target = aten.reshape.default
        elif node.target is aten.embedding.default:
            _replace_embedding(graph, node)
        elif node.target in (aten.as_strided.default, aten.as_strided_scatter.default):
            _replace_strided(graph, node, function_name)
        elif node.target in _GRIDS:
            _replace_grid(graph, node)
        elif node.target is aten.convolution_backward.default:
            _replace_weight_gradient(graph, node)
        elif node.target is aten.native_group_norm_backward.default:
            _replace_scale_gradient(graph, node)
    graph.graph.eliminate_dead_code()
    graph.recompile()


def _replace_strided(graph: GraphModule, node: Node, function_name: str) -> None:
    """Replace an `as_strided` operator by operators whose result depends on values alone, and not on the memory layout.

    Autograd inserts `as_strided`, too.
    """
    out: Tensor = node.meta["val"]
    scatter = node.target is aten.as_strided_scatter.default
    source, _, strides, *offset = node.args[1:] if scatter else node.args
    given: Tensor = source.meta["val"]  # type: ignore[union-attr]
    before = _memory_order(list(given.shape), list(strides if scatter else given.stride()))  # type: ignore[arg-type]
    after = _memory_order(list(out.shape), list(out.stride()))
    moved = any(start not in (None, given.storage_offset()) for start in offset)
    if before is None or after is None or given.numel() != out.numel() or moved:
        _replace_strided_by_index(graph, node, function_name)
        return
    with graph.graph.inserting_before(node):
        flat = graph.graph.call_function(aten.permute.default, (source, before))
        shaped = graph.graph.call_function(aten.reshape.default, (flat, [out.shape[i] for i in after]))
        back = sorted(range(len(after)), key=after.__getitem__)
        new = graph.graph.call_function(aten.permute.default, (shaped, back))
    new.meta["val"] = out
    node.replace_all_uses_with(new)
    graph.graph.erase_node(node)


def _replace_strided_by_index(graph: GraphModule, node: Node, function_name: str) -> None:
    arguments: list[Any] = list(node.args)
    source = arguments.pop(0)
    values = [arguments.pop(0)] if node.target is aten.as_strided_scatter.default else []
    sizes, strides, offset = (*arguments, None)[:3]
    given: Tensor = source.meta["val"]
    order = _memory_order(list(given.shape), list(given.stride()))
    index = torch.tensor(0 if offset is None else offset - given.storage_offset())
    for size, stride in zip(sizes, strides):
        index = index[..., None] + stride * torch.arange(size)
    inside = bool(((index >= 0) & (index < given.numel())).all())
    if order is None or not inside or (values and len(index.unique()) < index.numel()):
        raise NotCapturable(
            f"{function_name} uses as_strided to read memory outside a tensor, or to write twice to a place; use "
            "slices, unfold or expand"
        )
    graph.register_buffer(name := f"_places_{node.name}", index.flatten().to(given.device), persistent=False)
    call = graph.graph.call_function
    with graph.graph.inserting_before(node):
        places = graph.graph.get_attr(name)
        flat = call(aten.reshape.default, (call(aten.permute.default, (source, order)), [-1]))
        if values:
            written = call(aten.scatter.src, (flat, 0, places, call(aten.reshape.default, (values[0], [-1]))))
            shaped = call(aten.reshape.default, (written, [given.shape[i] for i in order]))
            new = call(aten.permute.default, (shaped, [order.index(i) for i in range(len(order))]))
        else:
            new = call(aten.reshape.default, (call(aten.index_select.default, (flat, 0, places)), list(sizes)))
    new.meta["val"] = node.meta["val"]
    node.replace_all_uses_with(new)
    graph.graph.erase_node(node)


def _replace_embedding(graph: GraphModule, node: Node) -> None:
    """Replace an embedding lookup by an operator that checks that the indices are in range.

    In a batch, an index out of range could otherwise read the rows of other records.
    """
    table, indices = node.args[:2]
    with graph.graph.inserting_before(node):
        flat = graph.graph.call_function(aten.reshape.default, (indices, [-1]))
        rows = graph.graph.call_function(aten.index_select.default, (table, 0, flat))
        new = graph.graph.call_function(aten.reshape.default, (rows, list(node.meta["val"].shape)))
    new.meta["val"] = node.meta["val"]
    node.replace_all_uses_with(new)
    graph.graph.erase_node(node)


def _replace_grid(graph: GraphModule, node: Node) -> None:
    """Let a grid sampler use place 0 where its grid is not finite, where PyTorch accesses memory outside the image."""
    place = _GRIDS[node.target]  # type: ignore[index]
    with graph.graph.inserting_before(node):
        grid = graph.graph.call_function(aten.nan_to_num.default, (node.args[place], 0.0, 0.0, 0.0))
    grid.meta["val"] = node.args[place].meta["val"]  # type: ignore[union-attr]
    node.update_arg(place, grid)


def _replace_weight_gradient(graph: GraphModule, node: Node) -> None:
    """Let the graph compute a convolution's weight gradient as a matrix product, if the feature maps are small.

    For small feature maps, the matrix product is faster.
    """
    upstream, images, weight, _, stride, padding, dilation, transposed, _, groups, mask = node.args
    maps, shape = upstream.meta["val"].shape, weight.meta["val"].shape  # type: ignore[union-attr]
    if len(maps) != 4 or transposed or groups != 1 or not mask[1] or maps[2] * maps[3] > _SMALL_MAP:  # type: ignore[index]
        return
    call = graph.graph.call_function
    with graph.graph.inserting_before(node):
        columns = call(aten.im2col.default, (images, list(shape[2:]), dilation, padding, stride))
        rows = call(aten.reshape.default, (upstream, [maps[0], maps[1], maps[2] * maps[3]]))
        product = call(aten.bmm.default, (rows, call(aten.transpose.int, (columns, 1, 2))))
        whole = product if maps[0] == 1 else call(aten.sum.dim_IntList, (product, [0]))
        new = call(aten.reshape.default, (whole, list(shape)))
    new.meta["val"] = weight.meta["val"]  # type: ignore[union-attr]
    for user in list(node.users):
        if user.args[1] == 1:
            user.replace_all_uses_with(new)
    node.args = (*node.args[:-1], [mask[0], False, mask[2]])  # type: ignore[index]


def _replace_scale_gradient(graph: GraphModule, node: Node) -> None:
    """Let the graph compute the gradients of a group norm's scale and shift from sums over the pixels of each channel.

    Let x be the input of the group norm, and g the gradient of the loss with respect to its output. For each channel,
    the graph computes the sum of g and the sum of g * x. PyTorch's kernel does the same.
    """
    upstream, maps, mean, rstd, _, n, channels, pixels, groups, mask = node.args
    call = graph.graph.call_function
    with graph.graph.inserting_before(node):
        up, seen = (call(aten.reshape.default, (t, [n, channels, pixels])) for t in (upstream, maps))
        shift = call(aten.sum.dim_IntList, (up, [2]))
        product = call(aten.sum.dim_IntList, (call(aten.mul.Tensor, (up, seen)), [2]))
        shape = [n, groups, channels // groups]  # type: ignore[operator]
        grouped = call(aten.reshape.default, (shift, shape))
        centred = call(
            aten.sub.Tensor,
            (
                call(aten.reshape.default, (product, shape)),
                call(aten.mul.Tensor, (grouped, call(aten.reshape.default, (mean, [n, groups, 1])))),
            ),
        )
        scaled = call(aten.mul.Tensor, (centred, call(aten.reshape.default, (rstd, [n, groups, 1]))))
        scale = call(aten.sum.dim_IntList, (call(aten.reshape.default, (scaled, [n, channels])), [0]))
        new = {1: scale, 2: call(aten.sum.dim_IntList, (shift, [0]))}
    for user in list(node.users):
        if user.args[1] in new:
            user.replace_all_uses_with(new[user.args[1]])  # type: ignore[index]
    node.args = (*node.args[:-1], [mask[0], False, False])  # type: ignore[index]


def _memory_order(sizes: list[int], strides: list[int]) -> list[int] | None:
    """Return a tensor's dimensions by decreasing stride; None if the tensor does not fill one memory block exactly."""
    order = sorted(
        range(len(sizes)), key=lambda i: (strides[i] if sizes[i] > 1 else float("inf"), sizes[i]), reverse=True
    )
    expected = 1
    for i in reversed(order):
        if sizes[i] > 1 and strides[i] != expected:
            return None
        expected *= sizes[i]
    return order
