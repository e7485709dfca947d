"""Capture of a function of one record, which is traced once and then evaluated on many records together."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node, Proxy, Transformer

from distillkit.privacy.capture._pytorch import DeviceContext, dispatch_modes, function_modes
from distillkit.privacy.capture._tracing import DRAWS, MARKER, Draw, draws, functional_name, trace
from distillkit.privacy.errors import BatchStatistics, NotCapturable, PrivacyError
from distillkit.privacy.validation._independence import is_own_augmentation
from distillkit.privacy.validation._private_records import active_records, holds_fake
from distillkit.rng import derive

aten = torch.ops.aten

_REDUCED = ("tf32", "bf16")

_SMALL_MAP = 16
"""Largest number of output pixels of a convolution whose weight gradient is computed as a product of matrices."""


def capture(
    function: Callable[..., Sequence[Tensor]],
    shared: Sequence[Tensor],
    examples: Sequence[Tensor],
    *,
    function_name: str,
    names: Sequence[str] = (),
    modules: Sequence[nn.Module] = (),
) -> CapturedFunction:
    """Capture a function of one record as a fixed graph of tensor operators, so that no user code runs on records.

    Everything besides the arguments is fixed when the function is captured: attributes, counters, clocks, closures and
    the train or eval mode of modules. Random draws become inputs of the graph and are drawn independently for every
    record.

    Args:
        function: function of the list `shared` and the tensors of one record, which returns a sequence of tensors of
            fixed shapes.
        shared: tensors that are the same for all records, such as parameters. Their values may change between calls.
        examples: tensors of n records, [n, ...]. Their shapes, dtypes and device are used, but not their values. A
            function that reads these tensors in another way than through its arguments is refused.
        function_name: name of the function in error messages.
        names: names of the `shared` tensors in error messages.
        modules: modules that the function uses.

    Raises:
        BatchStatistics: the function uses the statistics of a batch, or writes to a tensor that it did not create.
        NotCapturable: the function is not a fixed function of one record; the message names the line and the remedy.
    """
    one = [e.new_empty(e.shape[1:]) for e in examples]
    require_plain([*shared, *examples], function_name)
    graph = trace(function, shared, one, function_name=function_name, names=names, modules=modules, records=examples)
    return CapturedFunction(graph, shared, one, function_name)


class CapturedFunction:
    """Traced function of one record that can be evaluated on many records. `capture` creates objects of this class.

    Row i of a result depends only on record i and on the shared tensors, which are the same for all records. If an
    operator fails for a record, the record's rows are zero, because an error could reveal private values.

    Attributes:
        batched: whether records are evaluated together instead of one by one.
        activations, largest: number of values computed for one record, in total and in the largest tensor; used to
            estimate memory.
    """

    def __init__(self, graph: GraphModule, shared: Sequence[Tensor], one: Sequence[Tensor], function_name: str) -> None:
        self._constants = graph.meta["constants"]
        self._draws = _draws_as_inputs(graph)
        graph = _ForBatches(graph, function_name).transform()
        graph.graph.eliminate_dead_code()
        graph.recompile()
        self._forward, self._function_name = graph.forward, function_name
        nodes = [n.meta.get("val") for n in graph.graph.nodes if n.op == "call_function"]
        sizes = [v.numel() for v in nodes if isinstance(v, Tensor)]
        self.activations, self.largest = sum(sizes), max(sizes, default=0)
        self._like, self._shared = [(e.shape, e.dtype) for e in one], [(t.shape, t.dtype) for t in shared]
        with torch.no_grad():
            self.batched = True
            self._outputs: list[Tensor] = []
            self._try(shared, one)

    def _try(self, shared: Sequence[Tensor], one: Sequence[Tensor]) -> None:
        """Test on two records of noise whether the function can be evaluated on several records together.

        The attribute `batched` is set to True if the results are the same as when the records are evaluated one by one.
        """
        for noise in (1.0, 0.0):  # an operator may fail for some values
            generator = derive(0, "capture")
            drawn = [noise * torch.randn(2, *e.shape, generator=generator) for e in one]
            inputs = [d.to(e) if e.is_floating_point() else torch.zeros_like(d).to(e) for d, e in zip(drawn, one)]
            inputs += self.draw(2, generator)
            try:
                single = [torch.stack(r) for r in zip(*(self._evaluate_one(shared, inputs, i) for i in range(2)))]
                break
            except Exception as error:
                failure = f"{type(error).__name__}: {str(error).splitlines()[0]}"
        else:
            raise NotCapturable(f"{self._function_name} fails on a noise record: {failure}")
        if any(row.layout != torch.strided for row in single):
            raise NotCapturable(
                f"{self._function_name} has sparse gradients, as of nn.Embedding(sparse=True); use dense ones"
            )
        self._outputs = [row[:0] for row in single]
        try:
            together = self._evaluate(shared, inputs)
            wanted = torch.cat([row.flatten() for row in single])
            self.batched = bool((torch.cat([r.flatten() for r in together]) - wanted).norm() <= 1e-3 * wanted.norm())
        except Exception:  # no batching rule
            self.batched = False

    def refuse_records(self) -> None:
        """Refuse constants that hold the declared records, if the function was captured for other records."""
        active_records().refuse(self._constants, self._function_name)

    @property
    def draws(self) -> bool:
        """True if the function draws random numbers."""
        return bool(self._draws)

    def draw(self, count: int, generator: torch.Generator) -> list[Tensor]:
        """Draw the random numbers that the function needs for `count` records: one tensor [count, ...] per draw."""
        return [draw(count, generator) for draw in self._draws]

    def __call__(
        self,
        shared: Sequence[Tensor],
        *examples: Tensor,
        generator: torch.Generator | None = None,
        common: bool = False,
    ) -> list[Tensor]:
        """Evaluate the function on n records.

        Args:
            shared: current values of the tensors that are the same for all records, such as parameters.
            examples: tensors of the n records, with n rows each.
            generator: source of the random draws; required if the function draws.
            common: whether all records use the same random draws, which then do not depend on n.

        Returns:
            The function's results, with n rows each.
        """
        require_alike(examples, self._like, self._function_name)
        require_unchanged(shared, self._shared, self._function_name)
        count = len(examples[0])
        require_plain([*shared, *examples], self._function_name)
        if self._draws and generator is None:
            raise ValueError(f"{self._function_name} draws random numbers: pass generator=secret.generator()")
        if not count:
            return [row.clone() for row in self._outputs]
        draws = self.draw(1 if common else count, generator) if generator is not None else []
        inputs = [*examples, *(draw.expand(count, *draw.shape[1:]) for draw in draws)]
        values = [t.detach().clone() for t in shared]
        with torch.no_grad():
            if self.batched:
                try:
                    return self._evaluate(values, inputs)
                except Exception:  # one record fails: evaluate the records one by one, so that only its rows are zero
                    pass
            rows = [self._row(values, inputs, i) for i in range(count)]
            return [torch.cat(column) for column in zip(*rows)]

    def _row(self, shared: Sequence[Tensor], inputs: Sequence[Tensor], i: int) -> list[Tensor]:
        """Evaluate the function on record i alone. Each returned tensor has a first dimension of length 1.

        If the function can be evaluated on batches, record i is copied to fill a batch with as many rows as `inputs`.
        The rounding errors are then the same as for the batch of all records. If the evaluation fails, the result
        consists of zeros.
        """
        try:
            if self.batched:
                return [row[:1] for row in self._evaluate(shared, [e[i : i + 1].expand_as(e) for e in inputs])]
            return [row[None] for row in self._evaluate_one(shared, inputs, i)]
        except torch.OutOfMemoryError:
            raise
        except Exception:  # the error depends on the record's values, so neither the error nor its message may be shown
            return [row.new_zeros((1, *row.shape[1:])) for row in self._outputs]

    def _evaluate(self, shared: Sequence[Tensor], inputs: Sequence[Tensor]) -> list[Tensor]:
        places = (*[None] * len(shared), *[0] * len(inputs))
        return list(torch.func.vmap(self._forward, places)(*shared, *inputs))

    def _evaluate_one(self, shared: Sequence[Tensor], inputs: Sequence[Tensor], i: int) -> list[Tensor]:
        return list(self._forward(*shared, *(e[i] for e in inputs)))


def require_plain(tensors: Sequence[Tensor], function_name: str) -> None:
    """Check that operators on the tensors run PyTorch's code only, in the tensors' precision, and with gradients.

    Raises:
        NotCapturable, PrivacyError: as `require_no_own_code`; or the caller has activated inference mode, autocast, or
            matrix products with fewer bits (`torch.set_float32_matmul_precision`).
    """
    require_no_own_code(tensors, function_name)
    if torch.is_inference_mode_enabled():
        raise PrivacyError(f"{function_name}: inference mode is active, in which gradients are zero; leave its block")
    reduced = next((name for name, on in _reduced_precision(tensors) if on), None)
    if reduced:
        raise PrivacyError(
            f"{function_name}: {reduced} is active, whose rounding errors can exceed the clip; compute in full float32"
        )


def require_no_own_code(tensors: Sequence[Tensor], function_name: str) -> None:
    """Check that operators on the tensors run no code of the caller.

    Raises:
        NotCapturable: a tensor is of a subclass of `Tensor` other than `nn.Parameter`.
        PrivacyError: the caller has activated a torch mode (`TorchFunctionMode` or `TorchDispatchMode`).
    """
    if any(type(t) not in (Tensor, nn.Parameter) for t in tensors):
        kind = next(type(t).__name__ for t in tensors if type(t) not in (Tensor, nn.Parameter))
        raise NotCapturable(f"{function_name}: a {kind} is not a plain tensor and may run code of its own; convert it")
    functions = [mode for mode in function_modes() if type(mode) is not DeviceContext]
    if dispatch_modes() or functions:
        raise PrivacyError(
            f"{function_name}: a torch mode of the caller is active, which would see private records; leave its `with` "
            "block"
        )


def require_alike(examples: Sequence[Tensor], like: Sequence[tuple[torch.Size, torch.dtype]], name: str) -> None:
    """Check that examples have the shapes and dtypes `like` of one record, and equal numbers of rows."""
    kinds = [(e.shape[1:], e.dtype) for e in examples]
    if kinds != list(like) or len({len(e) for e in examples}) > 1:
        wanted, got = (", ".join(f"{k} {list(s)}" for s, k in found) for found in (like, kinds))
        rows = [len(e) for e in examples]
        raise ValueError(f"{name} takes equal numbers of records of {wanted}, got {rows} records of {got}")


def require_unchanged(shared: Sequence[Tensor], like: Sequence[tuple[torch.Size, torch.dtype]], name: str) -> None:
    """Check that parameters and buffers have the shapes and dtypes `like`, with which `name` was captured."""
    for tensor, (shape, dtype) in zip(shared, like, strict=True):
        if (tensor.shape, tensor.dtype) != (shape, dtype):
            raise ValueError(
                f"{name} was captured with a parameter or buffer of {dtype} {list(shape)} that is {tensor.dtype} "
                f"{list(tensor.shape)} now; capture it again after such a change"
            )


def _reduced_precision(tensors: Sequence[Tensor]) -> Iterator[tuple[str, bool]]:
    """Yield each setting of PyTorch that computes with fewer bits than the tensors have, and whether it is active."""
    for kind in {t.device.type for t in tensors}:
        yield f"torch.autocast({kind!r})", torch.is_autocast_enabled(kind)
    backends: Any = torch.backends
    for kind in ("matmul", "conv"):
        precision = getattr(backends.mkldnn, kind).fp32_precision
        yield f"torch.backends.mkldnn.{kind}.fp32_precision", precision in _REDUCED
    yield "torch.backends.cuda.matmul.fp32_precision", backends.cuda.matmul.fp32_precision in _REDUCED


def captured_augmentation(
    augment: Callable[..., Tensor], like: Tensor, *, siamese: bool = False
) -> Callable[[Tensor, torch.Generator], Tensor]:
    """Return an augmentation that can be applied to private images without running user code on them.

    The augmentations of this package treat every image separately and are used directly. Any other augmentation is
    captured on one image, and its random draws become inputs of the captured graph.

    Args:
        augment: function of images [N, C, H, W] and a generator. It is called with `siamese=True` if `siamese` is True.
        like: image with the shape, dtype and device of a private image; its values are not used.
        siamese: whether all images share the same random draws.

    Raises:
        BatchStatistics, NotCapturable: the augmentation is refused; the message gives the remedy.
    """
    options = {"siamese": True} if siamese else {}
    if is_own_augmentation(augment):
        return lambda images, generator: augment(images, generator, **options)
    function_name = f"the augmentation {getattr(augment, '__name__', type(augment).__name__)}"

    def one(shared: list[Tensor], image: Tensor) -> list[Tensor]:
        out = augment(image[None], MARKER, **options)
        if not isinstance(out, Tensor) or out.shape != (1, *image.shape):
            came = list(out.shape) if isinstance(out, Tensor) else type(out).__name__
            raise BatchStatistics(
                f"{function_name} turns 1 image into {came}; return one image of the same shape for each"
            )
        return [out[0]]

    captured = capture(one, [], [like], function_name=function_name)
    if kept := holds_fake(augment):
        raise BatchStatistics(
            f"{function_name} keeps a tensor of an image ({kept}), which it could use for other images; store nothing"
        )
    return lambda images, generator: captured([], images, generator=generator, common=siamese)[0]


def _draws_as_inputs(graph: GraphModule) -> list[Draw]:
    """Replace each random operator of a graph by an additional input, whose random values are drawn outside the graph.

    Return one function per additional input, which draws the values of this input.
    """
    last = [node for node in graph.graph.nodes if node.op == "placeholder"][-1]
    found: list[Draw] = []
    for node in draws(graph):
        draw, given = DRAWS[functional_name(node.target)]  # type: ignore[arg-type]
        found.append(draw(node, *node.args[given]))
        with graph.graph.inserting_after(last):
            new = last = graph.graph.placeholder(f"draw_{len(found)}")
        last.meta["val"] = node.meta["val"]
        if node.target is aten.bernoulli.default:
            with graph.graph.inserting_before(node):
                below = graph.graph.call_function(aten.lt.Tensor, (last, node.args[0]))
                new = graph.graph.call_function(aten._to_copy.default, (below,), {"dtype": node.meta["val"].dtype})
        node.replace_all_uses_with(new)
        graph.graph.erase_node(node)
    return found


class _ForBatches(Transformer):
    """Copy of a graph with operators that vmap can batch, or can batch faster, and that read no other record's memory.

    Every rule takes the node of an operator and the arguments in the copy, and returns the result in the copy.
    """

    def __init__(self, graph: GraphModule, function_name: str) -> None:
        super().__init__(graph)
        self._function_name = function_name
        self._outputs: dict[tuple[Any, ...], Proxy] = {}  # of getitem, by its arguments
        self._rules: dict[Any, Callable[..., Proxy]] = {
            aten.view.default: lambda node, source, shape: self._op(aten.reshape.default, source, shape),
            aten.embedding.default: self._embedding,
            aten.as_strided.default: self._strided,
            aten.as_strided_scatter.default: self._strided,
            aten.grid_sampler_2d.default: self._grid_sample,
            aten.grid_sampler_3d.default: self._grid_sample,
            aten.grid_sampler_2d_backward.default: self._grid_sample,
            aten.grid_sampler_3d_backward.default: self._grid_sample,
            aten.convolution_backward.default: self._convolution_backward,
            aten.native_group_norm_backward.default: self._group_norm_backward,
        }

    def run_node(self, n: Node) -> Any:
        """Copy a node of the graph, or what replaces it."""
        if n.target is operator.getitem and n.args in self._outputs:
            return self._outputs[n.args]
        rule = self._rules.get(n.target)
        if rule is None:
            result = super().run_node(n)
        else:
            args, kwargs = self.fetch_args_kwargs_from_env(n)
            result = rule(n, *args, **kwargs)
        if isinstance(result, Proxy):
            result.node.meta["val"] = n.meta.get("val")
        return result

    def _op(self, target: Any, *args: Any) -> Proxy:
        return self.tracer.create_proxy("call_function", target, args, {})

    def _strided(self, node: Node, *args: Any) -> Proxy:
        """Replace `as_strided` by operators whose result depends on values alone, and not on the memory layout.

        Autograd inserts `as_strided`, too.
        """
        scatter = node.target is aten.as_strided_scatter.default
        strides, offset = (*args[2 + scatter :], None)[:2]
        out: Tensor = node.meta["val"]
        given: Tensor = node.args[scatter].meta["val"]  # type: ignore[union-attr]
        before = _memory_order(given.shape, strides if scatter else given.stride())
        after = _memory_order(out.shape, out.stride())
        moved = offset not in (None, given.storage_offset())
        if before is None or after is None or given.numel() != out.numel() or moved:
            return self._strided_by_index(node, *args)
        flat = self._op(aten.permute.default, args[scatter], before)
        shaped = self._op(aten.reshape.default, flat, [out.shape[i] for i in after])
        return self._op(aten.permute.default, shaped, sorted(range(len(after)), key=after.__getitem__))

    def _strided_by_index(self, node: Node, source: Proxy, *args: Any) -> Proxy:
        *values, sizes, strides, offset = args if type(args[-1]) is int or args[-1] is None else (*args, None)
        given: Tensor = node.args[0].meta["val"]  # type: ignore[union-attr]
        order = _memory_order(given.shape, given.stride())
        index = torch.tensor(0 if offset is None else offset - given.storage_offset())
        for size, stride in zip(sizes, strides):
            index = index[..., None] + stride * torch.arange(size)
        inside = bool(((index >= 0) & (index < given.numel())).all())
        if order is None or not inside or (values and len(index.unique()) < index.numel()):
            raise NotCapturable(
                f"{self._function_name} uses as_strided to read memory outside a tensor, or to write twice to a place; "
                "use slices, unfold or expand"
            )
        name = f"_places_{node.name}"
        self.module.register_buffer(name, index.flatten().to(given.device), persistent=False)
        places = self.tracer.create_proxy("get_attr", name, (), {})
        flat = self._op(aten.reshape.default, self._op(aten.permute.default, source, order), [-1])
        if not values:
            return self._op(aten.reshape.default, self._op(aten.index_select.default, flat, 0, places), list(sizes))
        written = self._op(aten.scatter.src, flat, 0, places, self._op(aten.reshape.default, values[0], [-1]))
        shaped = self._op(aten.reshape.default, written, [given.shape[i] for i in order])
        return self._op(aten.permute.default, shaped, sorted(range(len(order)), key=order.__getitem__))

    def _embedding(self, node: Node, table: Proxy, indices: Proxy, *args: Any, **kwargs: Any) -> Proxy:
        """Look rows up by an operator that checks the indices, which could otherwise read the rows of other records."""
        rows = self._op(aten.index_select.default, table, 0, self._op(aten.reshape.default, indices, [-1]))
        return self._op(aten.reshape.default, rows, list(node.meta["val"].shape))

    def _grid_sample(self, node: Node, *args: Any, **kwargs: Any) -> Any:
        """Use place 0 where a grid is not finite, where PyTorch accesses memory outside the image."""
        place = 2 if "backward" in str(node.target) else 1
        grid = self._op(aten.nan_to_num.default, args[place], 0.0, 0.0, 0.0)
        args = (*args[:place], grid, *args[place + 1 :])
        return self.tracer.create_proxy("call_function", node.target, args, kwargs)

    def _convolution_backward(self, node: Node, *args: Any) -> Proxy:
        """Compute the weight gradient as a product of matrices if the feature maps are small, where this is faster."""
        upstream, images, _, _, stride, padding, dilation, transposed, _, groups, mask = args
        maps, shape = node.args[0].meta["val"].shape, node.args[2].meta["val"].shape  # type: ignore[union-attr]
        if len(maps) == 4 and not transposed and groups == 1 and mask[1] and maps[2] * maps[3] <= _SMALL_MAP:
            columns = self._op(aten.im2col.default, images, list(shape[2:]), dilation, padding, stride)
            rows = self._op(aten.reshape.default, upstream, [maps[0], maps[1], maps[2] * maps[3]])
            product = self._op(aten.bmm.default, rows, self._op(aten.transpose.int, columns, 1, 2))
            whole = product if maps[0] == 1 else self._op(aten.sum.dim_IntList, product, [0])
            gradient = self._op(aten.reshape.default, whole, list(shape))
            gradient.node.meta["val"] = node.args[2].meta["val"]  # type: ignore[union-attr]
            self._outputs[node, 1] = gradient
            args = (*args[:-1], [mask[0], False, mask[2]])
        return self._op(node.target, *args)

    def _group_norm_backward(self, node: Node, *args: Any) -> Proxy:
        """Compute the gradients of scale and shift from sums over the pixels of a channel, as PyTorch's kernel does.

        Let x be the input, and g the gradient of the loss with respect to the output: the sums of g and of g * x.
        """
        upstream, maps, mean, rstd, _, n, channels, pixels, groups, mask = args
        reshape = partial(self._op, aten.reshape.default)
        up, seen = (reshape(t, [n, channels, pixels]) for t in (upstream, maps))
        shift = self._op(aten.sum.dim_IntList, up, [2])
        product = self._op(aten.sum.dim_IntList, self._op(aten.mul.Tensor, up, seen), [2])
        shape = [n, groups, channels // groups]
        offset = self._op(aten.mul.Tensor, reshape(shift, shape), reshape(mean, [n, groups, 1]))
        centred = self._op(aten.sub.Tensor, reshape(product, shape), offset)
        scaled = self._op(aten.mul.Tensor, centred, reshape(rstd, [n, groups, 1]))
        scale = self._op(aten.sum.dim_IntList, reshape(scaled, [n, channels]), [0])
        self._outputs[node, 1], self._outputs[node, 2] = scale, self._op(aten.sum.dim_IntList, shift, [0])
        return self._op(node.target, *args[:-1], [mask[0], False, False])


def _memory_order(sizes: Sequence[int], strides: Sequence[int]) -> list[int] | None:
    """Return a tensor's dimensions by decreasing stride; None if the tensor does not fill one memory block exactly."""
    order = sorted(range(len(sizes)), key=strides.__getitem__, reverse=True)
    expected = 1
    for i in reversed(order):
        if sizes[i] > 1 and strides[i] != expected:
            return None
        expected *= sizes[i]
    return order
