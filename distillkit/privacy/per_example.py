"""The gradient of each example of a batch: by Opacus' hooks where they serve, else by torch.func."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from distillkit import check
from distillkit.privacy.errors import BatchStatistics, NotSeparable, PrivacyError
from distillkit.privacy.gradient import refuse_half_precision
from distillkit.privacy.trial import Unserved, folds, tried

__all__ = ["ExampleGradients", "Ways", "per_example_gradients", "require_per_example"]

Losses = Callable[..., Tensor]
Ways = Literal["auto", "hooks", "func"]


def require_per_example(model: nn.Module) -> None:
    """Refuse a model in which examples of a batch meet by design, or in which there is nothing to train.

    What cannot be read off its layers is tried when it is trained; see `per_example_gradients`.

    Raises:
        BatchStatistics: batch norm, or running statistics; the message names the layers.
        PrivacyError: no parameter asks for a gradient, or one is in half precision.
    """
    found = [name or type(m).__name__ for name, m in model.named_modules() if keeps_statistics(m)]
    if found:
        raise BatchStatistics(
            f"layers {', '.join(found)} of {type(model).__name__} keep or use statistics of the batch, which no "
            "per-example clip bounds; take norm='instance' or 'group', or convert a copy: without_batch_norm(model)"
        )
    if not any(p.requires_grad for p in model.parameters()):
        raise PrivacyError(
            f"{type(model).__name__} has no parameter that asks for a gradient, so there is nothing to train; set "
            "requires_grad on those that shall learn"
        )
    for name, parameter in model.named_parameters():
        refuse_half_precision(parameter, f"parameter {name}")


def keeps_statistics(module: nn.Module) -> bool:
    """Whether a layer uses or remembers statistics of the batch."""
    batch = isinstance(module, nn.modules.batchnorm._BatchNorm)
    return batch or (isinstance(module, nn.modules.instancenorm._InstanceNorm) and module.track_running_stats)


@contextmanager
def per_example_gradients(
    model: nn.Module,
    losses: Losses,
    *,
    public: Sequence[Tensor],
    chunk: int,
    sizes: Sequence[int] = (),
    trained: Mapping[str, nn.Parameter] | None = None,
    how: Ways = "auto",
    engine: str | None = None,
) -> Iterator[ExampleGradients]:
    """Within this context, `gradients(images, labels)` gives the gradient of every example's loss; no trace is left.

        def losses(images, labels):
            return F.cross_entropy(model(images), labels, reduction="none")
        with per_example_gradients(model, losses, public=(noise, some_labels), chunk=16) as gradients:
            rows = gradients(images, labels)     # for each trained parameter [n, *shape], n <= 16

    Before it is handed out it is *tried* on `public`, in the mode the model is in, with these very parameters: the law
    is that row i is the gradient of example i's loss alone, for every parameter, and stays what it is when the other
    examples are replaced; that no global random state is read or moved; that a forward pass changes no tensor of the
    model. `nn.Dropout` is set aside for it (it multiplies by draws of a generator that the caller hides), all else runs
    as it will. With hooks every forward pass has exactly `chunk` examples, a short batch is filled up with copies that
    are dropped: so the batch size that is tried is the only one that is ever used, `sizes` are tried besides.

    There are three ways. Opacus' hooks serve networks whose parameters all belong to layers that Opacus knows. A
    network with parameters of its own (a class token, a position embedding), `nn.MultiheadAttention`, weights that are
    used outside their layer: these go through torch.func (vmap of grad), or if that fails through one example after the
    other. The cost, in ordinary steps of the same 64 records on a CPU core (`tests/benchmarks/bench_per_example.py`):
    a ConvNet-3 of width 64 takes 2.5 by hooks, 1.9 by vmap, 2.5 by the loop; a ViT of four layers, width 64, 1.9 by
    vmap, 3.5 by the loop; ResNet-18, whose ordinary step at 32x32 is short for its 11 million weights, 31 and 23.

    Args:
        model: in training mode.
        losses: losses [n] of tensors with n rows each (images, labels, ...), by `model`; only their sum counts.
        public: such tensors of a few examples (two at least) that owe nothing to private data.
        chunk: the most examples at once, a public number.
        trained: the parameters that are trained, by their names in the model; all others are frozen meanwhile.
            Default: all that ask for a gradient.
        how: "auto"; "hooks" or "func" to allow one way alone. Hooks see a view or patch that is folded into the batch
            as an example of its own, and clip each: such a network is refused, and "func" is its remedy.
        engine: the outcome of a former trial of the same code (`gradients.engine`), which is then not repeated.

    Raises:
        BatchStatistics, NotSeparable, PrivacyError: the law does not hold; the message says of what, and the remedy.
    """
    require_per_example(model)
    check.positive_int(chunk, "chunk")
    check.one_of(how, "how", ("auto", "hooks", "func"))
    chosen = {n: p for n, p in model.named_parameters() if p.requires_grad} if trained is None else dict(trained)
    if not chosen:
        raise PrivacyError("no parameter is trained, so there is nothing to take gradients of")
    frozen = [p for n, p in model.named_parameters() if p.requires_grad and n not in chosen]
    for parameter in frozen:
        parameter.requires_grad_(False)
    gradients = ExampleGradients(model, losses, chosen, chunk)
    try:
        gradients.engine = tried(gradients, public, sizes, how) if engine is None else engine
        yield gradients
    finally:
        gradients.close()
        for parameter in frozen:
            parameter.requires_grad_(True)


class ExampleGradients:
    """What `per_example_gradients` yields: called with n examples, n <= chunk, it gives n rows for each parameter.

    Attributes:
        engine: "hooks", "vmap" or "loop".
        trained: the parameters, by name, in the order of the rows.
        chunk: the most examples at once.
    """

    def __init__(self, model: nn.Module, losses: Losses, trained: dict[str, nn.Parameter], chunk: int) -> None:
        self.model, self.losses, self.trained, self.chunk = model, losses, trained, chunk
        self.engine = ""
        self._wrapped: nn.Module | None = None

    def __call__(self, *examples: Tensor) -> list[Tensor]:
        """The gradients, for each parameter [n, *parameter.shape]."""
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
        """The losses [n]."""
        losses = self.losses(*examples)
        if losses.shape != (len(examples[0]),):
            raise NotSeparable(f"the loss must give one value for each example [n], got shape {list(losses.shape)}")
        return losses

    def alone(self, *examples: Tensor) -> list[Tensor]:
        """The gradient of the sum of the losses, by autograd."""
        total = self.loss_rows(*examples).sum()
        parameters = list(self.trained.values())
        if not total.requires_grad:
            return [torch.zeros_like(p) for p in parameters]
        grads = torch.autograd.grad(total, parameters, allow_unused=True)
        return [torch.zeros_like(p) if g is None else g for p, g in zip(parameters, grads)]

    def by_loop(self, *examples: Tensor) -> list[Tensor]:
        """One example after the other."""
        rows = [self.alone(*(e[i : i + 1] for e in examples)) for i in range(len(examples[0]))]
        return [torch.stack(column) for column in zip(*rows)]

    def by_vmap(self, *examples: Tensor) -> list[Tensor]:
        """One call of `vmap(grad)`: every example is a batch of one."""
        call = _Call(self.model, self.loss_rows)

        def loss(values: dict[str, Tensor], *one: Tensor) -> Tensor:
            rows: Tensor = torch.func.functional_call(call, values, tuple(e.unsqueeze(0) for e in one))
            return rows.sum()

        values = {f"model.{n}": p.detach() for n, p in self.trained.items()}
        batched = torch.func.vmap(torch.func.grad(loss), (None, *[0] * len(examples)), randomness="different")
        with sdpa_kernel(SDPBackend.MATH):  # the fused ones have no batching rule
            found: dict[str, Tensor] = batched(values, *(e.detach() for e in examples))
        return [found[name] for name in values]

    def by_hooks(self, *examples: Tensor) -> list[Tensor]:
        """One backward pass, in which Opacus' hooks collect the rows.

        Raises:
            Unserved: hooks see nothing of a parameter that has a gradient.
            PrivacyError: they see more or fewer rows than examples.
        """
        self._begin()
        images, *rest = examples
        count, parameters = len(images), list(self.trained.values())
        if images.is_floating_point():  # else PyTorch warns about the hooks
            images = images.detach().requires_grad_()
        try:
            self.loss_rows(images, *rest).sum().backward()
            grads = [getattr(p, "grad_sample", None) for p in parameters]
            for (name, parameter), rows in zip(self.trained.items(), grads):
                if (rows is None and parameter.grad is not None) or isinstance(rows, list):
                    raise Unserved(name)
                if rows is not None and len(rows) != count:
                    raise PrivacyError(folds(name, len(rows), count))
        finally:
            for parameter in parameters:
                parameter.grad = None
        return [p.new_zeros((count, *p.shape)) if g is None else g for p, g in zip(parameters, grads)]

    def unknown_to_hooks(self) -> str:
        """The name of a trained parameter whose layer Opacus has no rule for, or ""."""
        from opacus.grad_sample import GradSampleModule

        known = GradSampleModule.GRAD_SAMPLERS
        ours = {id(p): n for n, p in self.trained.items()}
        for module in self.model.modules():
            for parameter in module.parameters(recurse=False):
                if id(parameter) in ours and type(module) not in known:
                    return ours[id(parameter)]
        return ""

    def _begin(self) -> None:
        from opacus.grad_sample import GradSampleModule

        if self._wrapped is None:
            self._wrapped = GradSampleModule(self.model, loss_reduction="sum", strict=False)
        for module in self.model.modules():  # a layer whose output is not used leaves its activations behind
            if "activations" in vars(module):
                vars(module)["activations"] = []
        for parameter in self.trained.values():
            parameter.grad_sample, parameter._forward_counter = None, 0  # type: ignore[attr-defined]
            vars(parameter).pop("_current_grad_sample", None)

    def close(self) -> None:
        """Remove what Opacus put on the model."""
        if self._wrapped is None:
            return
        self._wrapped.remove_hooks()  # type: ignore[operator]
        self._wrapped = None
        for module in self.model.modules():
            for name in ("activations", "max_batch_len"):
                if hasattr(module, name):
                    delattr(module, name)
        for parameter in self.model.parameters():
            for name in ("grad_sample", "_forward_counter", "_current_grad_sample"):
                vars(parameter).pop(name, None)


class _Call(nn.Module):
    """A function of the model as a module that holds the model."""

    def __init__(self, model: nn.Module, function: Losses) -> None:
        super().__init__()
        self.model, self._function = model, function

    def forward(self, *examples: Tensor) -> Tensor:
        return self._function(*examples)
