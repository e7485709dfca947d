"""Engines for per-example gradients: Opacus' hooks, vmap of grad, or a loop over the examples."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from distillkit.networks._layers import InstanceNorm
from distillkit.privacy.errors import NotSeparable, PrivacyError

if TYPE_CHECKING:
    from opacus.grad_sample import GradSampleModule

__all__ = ["ExampleGradients", "GradientMode", "Losses", "UnsupportedLayer", "folded_batch_message"]

GradientMode = Literal["auto", "hooks", "func"]
"""Engines that may compute per-example gradients: any, Opacus' hooks alone, or torch.func (else a loop)."""

Losses = Callable[..., Tensor]
"""`losses(images, labels, ...)` returns the loss of each of n examples, float [n]."""


class UnsupportedLayer(Exception):
    """Signal that the hooks do not support a parameter, so that the next engine is used. Never reaches a user."""


def folded_batch_message(parameter: str, rows: int, examples: int) -> str:
    """Return the error message for a network that folds the views or patches of an example into the batch.

    Args:
        parameter: name of a parameter of the first such layer.
        rows: number of rows of that layer's input.
        examples: number of examples in the batch.
    """
    return (
        f"the layer of parameter {parameter} gets {rows} rows for {examples} examples: the network folds views or "
        "patches of an example into the batch (or uses another batch dimension), and each would be clipped separately. "
        "Keep one row for each example in every layer, or request gradients of whole examples: gradients='func'"
    )


class ExampleGradients:
    """Function object that computes per-example gradients; `per_example_gradients` creates it.

    Called with n <= chunk examples, the object returns n rows for each parameter. The check on public examples chooses
    the engine; the methods `by_...` are the engines.

    Args:
        network: the network, in training mode.
        losses: function that evaluates `network` and returns the loss of each example.
        trained, chunk: see the attributes.

    Attributes:
        engine: name of the engine: "hooks", "vmap" or "loop".
        trained: trained parameters by name, in the order of the returned tensors.
        chunk: maximum number of examples per call.
    """

    def __init__(self, network: nn.Module, losses: Losses, trained: dict[str, nn.Parameter], chunk: int) -> None:
        self.network, self.losses, self.trained, self.chunk = network, losses, trained, chunk
        self.engine = ""
        self._wrapped: nn.Module | None = None

    def __call__(self, *examples: Tensor) -> list[Tensor]:
        """Compute the gradients of n examples: for each parameter of `trained`, a tensor [n, *parameter.shape].

        Args:
            examples: the arguments of `losses`, for instance images and labels, with n rows each.

        Raises:
            ValueError: there are more than `chunk` examples.
        """
        count = len(examples[0])
        if count > self.chunk:
            raise ValueError(f"at most {self.chunk} examples at once, got {count}; split them")
        if not count:
            return [p.new_zeros((0, *p.shape)) for p in self.trained.values()]
        if self.engine == "hooks":
            filled = torch.arange(self.chunk, device=examples[0].device) % count
            return [rows[:count] for rows in self.by_hooks(*(e.index_select(0, filled) for e in examples))]
        return self.by_vmap(*examples) if self.engine == "vmap" else self.by_loop(*examples)

    def loss_rows(self, *examples: Tensor) -> Tensor:
        """Return the losses of n `examples`, float [n].

        Raises:
            NotSeparable: the user's function returns another shape.
        """
        losses = self.losses(*examples)
        if losses.shape != (len(examples[0]),):
            raise NotSeparable(f"the loss must give one value for each example [n], got shape {list(losses.shape)}")
        return losses

    def alone(self, *examples: Tensor) -> list[Tensor]:
        """Compute the gradient of the summed losses of all `examples` by autograd; with one example, its reference row.

        The result is a tensor of the parameter's shape for each parameter, zero if the loss does not depend on it.
        """
        total = self.loss_rows(*examples).sum()
        parameters = list(self.trained.values())
        if not total.requires_grad:
            return [torch.zeros_like(p) for p in parameters]
        grads = torch.autograd.grad(total, parameters, allow_unused=True)
        return [torch.zeros_like(p) if g is None else g for p, g in zip(parameters, grads)]

    def by_loop(self, *examples: Tensor) -> list[Tensor]:
        """Compute the rows with one backward pass per example: slow, but correct for every network."""
        rows = [self.alone(*(e[i : i + 1] for e in examples)) for i in range(len(examples[0]))]
        return [torch.stack(column) for column in zip(*rows)]

    def by_vmap(self, *examples: Tensor) -> list[Tensor]:
        """Compute the rows of `examples` by one call of torch.func's `vmap(grad)`, with batches of one."""
        call = _Call(self.network, self.loss_rows)

        def loss(values: dict[str, Tensor], *one: Tensor) -> Tensor:
            rows: Tensor = torch.func.functional_call(call, values, tuple(e.unsqueeze(0) for e in one))
            return rows.sum()

        values = {f"network.{n}": p.detach() for n, p in self.trained.items()}
        batched = torch.func.vmap(torch.func.grad(loss), (None, *[0] * len(examples)), randomness="different")
        with sdpa_kernel(SDPBackend.MATH):  # the fused kernels have no batching rule
            found: dict[str, Tensor] = batched(values, *(e.detach() for e in examples))
        return [found[name] for name in values]

    def by_hooks(self, *examples: Tensor) -> list[Tensor]:
        """Compute the rows of `examples` by one backward pass, in which Opacus' hooks collect them.

        Raises:
            UnsupportedLayer: the hooks miss a parameter that has a gradient.
            PrivacyError: the hooks collect more or fewer rows than there are examples.
        """
        self._begin()
        images, *rest = examples
        count, parameters = len(images), list(self.trained.values())
        if images.is_floating_point():  # otherwise PyTorch warns about the hooks
            images = images.detach().requires_grad_()
        try:
            self.loss_rows(images, *rest).sum().backward()
            grads = [getattr(p, "grad_sample", None) for p in parameters]
            for (name, parameter), rows in zip(self.trained.items(), grads):
                if (rows is None and parameter.grad is not None) or isinstance(rows, list):
                    raise UnsupportedLayer(name)
                if rows is not None and len(rows) != count:
                    raise PrivacyError(folded_batch_message(name, len(rows), count))
        finally:
            for parameter in parameters:
                parameter.grad = None
        return [p.new_zeros((count, *p.shape)) if g is None else g for p, g in zip(parameters, grads)]

    def unknown_to_hooks(self) -> str:
        """Return the name of a trained parameter for whose layer Opacus has no rule, or "" if there is none."""
        known = _opacus().GRAD_SAMPLERS
        ours = {id(p): n for n, p in self.trained.items()}
        for module in self.network.modules():
            for parameter in module.parameters(recurse=False):
                if id(parameter) in ours and type(module) not in known:
                    return ours[id(parameter)]
        return ""

    def _begin(self) -> None:
        if self._wrapped is None:
            self._wrapped = _opacus()(self.network, loss_reduction="sum", strict=False)
        for module in self.network.modules():  # a layer whose output is not used keeps its activations
            if "activations" in vars(module):
                vars(module)["activations"] = []
        for parameter in self.trained.values():
            parameter.grad_sample, parameter._forward_counter = None, 0  # type: ignore[attr-defined]
            vars(parameter).pop("_current_grad_sample", None)

    def close(self) -> None:
        """Remove everything that Opacus attached to the network; `by_hooks` may be called again."""
        if self._wrapped is None:
            return
        self._wrapped.remove_hooks()  # type: ignore[operator]
        self._wrapped = None
        for module in self.network.modules():
            for name in ("activations", "max_batch_len"):
                if hasattr(module, name):
                    delattr(module, name)
        for parameter in self.network.parameters():
            for name in ("grad_sample", "_forward_counter", "_current_grad_sample"):
                vars(parameter).pop(name, None)


def _opacus() -> type[GradSampleModule]:
    """Return Opacus' hook class, with our instance norm registered as a group norm (hooks match exact types)."""
    from opacus.grad_sample import GradSampleModule

    rules = GradSampleModule.GRAD_SAMPLERS
    rules.setdefault(InstanceNorm, rules[nn.GroupNorm])
    return GradSampleModule


class _Call(nn.Module):
    """Module that contains the network and calls a function that uses it."""

    def __init__(self, network: nn.Module, function: Losses) -> None:
        super().__init__()
        self.network, self._function = network, function

    def forward(self, *examples: Tensor) -> Tensor:
        return self._function(*examples)
