"""Capture of a function of one record, which is traced once and then evaluated on many records together."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from distillkit.privacy.capture._graph import draws_as_inputs, for_batches
from distillkit.privacy.capture._private_records import active_records
from distillkit.privacy.capture._tracing import trace
from distillkit.privacy.errors import NotCapturable, PrivacyError
from distillkit.rng import derive

__all__ = ["CapturedFunction", "capture", "require_plain"]

_REDUCED = ("tf32", "bf16")


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

    def __init__(
        self, graph: torch.fx.GraphModule, shared: Sequence[Tensor], one: Sequence[Tensor], function_name: str
    ) -> None:
        self._draws = draws_as_inputs(graph)
        for_batches(graph, function_name)
        self._constants = graph.meta["constants"]
        self._forward, self._shared, self._function_name = graph.forward, len(shared), function_name
        nodes = [n.meta.get("val") for n in graph.graph.nodes if n.op == "call_function"]
        sizes = [v.numel() for v in nodes if isinstance(v, Tensor)]
        self.activations, self.largest = sum(sizes), max(sizes, default=0)
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
    """Check that operators on the tensors run PyTorch's code only, and no code of the caller.

    Raises:
        NotCapturable: a tensor is of a subclass of `Tensor` other than `nn.Parameter`.
        PrivacyError: the caller has activated a torch mode (`TorchFunctionMode` or `TorchDispatchMode`), inference
            mode, autocast, or matrix products with fewer bits (`torch.set_float32_matmul_precision`).
    """
    if any(type(t) not in (Tensor, nn.Parameter) for t in tensors):
        kind = next(type(t).__name__ for t in tensors if type(t) not in (Tensor, nn.Parameter))
        raise NotCapturable(f"{function_name}: a {kind} is not a plain tensor and may run code of its own; convert it")
    functions = [mode for mode in _get_current_function_mode_stack() if type(mode) is not DeviceContext]
    if _get_current_dispatch_mode_stack() or functions:
        raise PrivacyError(
            f"{function_name}: a torch mode of the caller is active, which would see private records; leave its `with` "
            "block"
        )
    if torch.is_inference_mode_enabled():
        raise PrivacyError(f"{function_name}: inference mode is active, in which gradients are zero; leave its block")
    reduced = next((name for name, on in _reduced_precision(tensors) if on), None)
    if reduced:
        raise PrivacyError(
            f"{function_name}: {reduced} is active, whose rounding errors can exceed the clip; compute in full float32"
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
