"""DP-SGD for a model's local training, on Opacus' per-example gradients, with Poisson batches and a ledger."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from distillkit import check
from distillkit.chunks import chunk_size
from distillkit.privacy.errors import BatchStatistics, NotSeparable, PrivacyError
from distillkit.privacy.events import EVERYONE, Event
from distillkit.privacy.gradient import PrivateGradient
from distillkit.privacy.guards import ledger_at, refuse_large_delta
from distillkit.privacy.ledger import Ledger
from distillkit.privacy.noise import Secret, as_secret
from distillkit.privacy.planning import plan
from distillkit.sets import LabeledImages, as_set

__all__ = ["per_example_gradients", "require_per_example", "train_private", "without_batch_norm"]

RowLoss = Callable[[Tensor, Tensor], Tensor]


def require_per_example(model: nn.Module) -> None:
    """Refuse a model in which examples of a batch meet, or whose layers Opacus has no per-example gradient for.

    Raises:
        BatchStatistics: batch norm, or running statistics; the message names the layers.
        PrivacyError: another layer that Opacus refuses, or no trainable parameter.
    """
    from opacus.validators import ModuleValidator

    found = [name or type(m).__name__ for name, m in model.named_modules() if _keeps_statistics(m)]
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
    training, model.training = model.training, True
    try:
        errors = ModuleValidator.validate(model, strict=False)
    finally:
        model.training = training
    if errors:
        raise PrivacyError(f"Opacus refuses {type(model).__name__}: {'; '.join(str(e) for e in errors)}")


def without_batch_norm(model: nn.Module) -> nn.Module:
    """A copy of `model` with the replacements of Opacus' validator: batch norm becomes group norm (up to 32 groups),
    instance norm loses its running statistics.

    It is another model with fresh norm layers: train it from scratch, or fine-tune.
    """
    from opacus.validators import ModuleValidator

    twin = copy.deepcopy(model)
    for name, module in list(twin.named_modules()):
        if not _keeps_statistics(module):
            continue
        fixed = ModuleValidator.FIXERS[type(module)](module).to(next(module.parameters(), torch.empty(0)))
        if not name:
            return fixed
        parent, _, child = name.rpartition(".")
        setattr(twin.get_submodule(parent), child, fixed)
    return twin


def _keeps_statistics(module: nn.Module) -> bool:
    batch = isinstance(module, nn.modules.batchnorm._BatchNorm)
    return batch or (isinstance(module, nn.modules.instancenorm._InstanceNorm) and module.track_running_stats)


@contextmanager
def per_example_gradients(model: nn.Module) -> Iterator[Callable[[Tensor], list[Tensor]]]:
    """Within this context, `gradients(losses)` gives the gradient of every example's loss, and leaves no trace.

        with per_example_gradients(model) as gradients:
            losses = F.cross_entropy(model(images.requires_grad_()), labels, reduction="none")
            grads = gradients(losses)

    (PyTorch warns about Opacus' hooks if the images ask for no gradient; the result is the same.)

    Yields a function of the losses [n] of one forward pass, of which only the sum matters; it returns, for each
    parameter that asks for a gradient and in the order of `model.parameters()`, a tensor [n, *parameter.shape]. The
    model must be in training mode.

    Raises:
        BatchStatistics, PrivacyError: see `require_per_example`; or, from the function, a parameter of which Opacus'
            hooks saw nothing.
    """
    from opacus.grad_sample import GradSampleModule

    require_per_example(model)
    wrapped = GradSampleModule(model, loss_reduction="sum")
    named = {n: p for n, p in model.named_parameters() if p.requires_grad}
    parameters = list(named.values())

    def gradients(losses: Tensor) -> list[Tensor]:
        if losses.ndim != 1:
            raise NotSeparable(f"the loss must give one value for each example [n], got shape {list(losses.shape)}")
        wrapped.zero_grad(set_to_none=True)
        losses.sum().backward()
        grads = [p.grad_sample for p in parameters]  # type: ignore[attr-defined]
        unseen = [n for (n, p), g in zip(named.items(), grads) if g is None and p.grad is not None]
        wrapped.zero_grad(set_to_none=True)
        if unseen:
            raise PrivacyError(
                f"parameter {unseen[0]} has a gradient but none per example: use it in its module's forward alone, "
                "called once for each batch"
            )
        return [p.new_zeros((len(losses), *p.shape)) if g is None else g for p, g in zip(parameters, grads)]

    try:
        yield gradients
    finally:
        wrapped.remove_hooks()
        for module in model.modules():
            for name in ("activations", "max_batch_len"):
                if hasattr(module, name):
                    delattr(module, name)
        for parameter in model.parameters():
            for name in ("grad_sample", "_forward_counter", "_current_grad_sample"):
                if hasattr(parameter, name):
                    delattr(parameter, name)


def train_private(
    model: nn.Module,
    images: Tensor | LabeledImages,
    labels: Tensor | None = None,
    *,
    size: int,
    epsilon: float | None = None,
    sigma: float | None = None,
    delta: float = 1e-5,
    clip: float = 1.0,
    rate: float = 0.05,
    steps: int = 100,
    lr: float = 0.1,
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] | None = None,
    loss: RowLoss | None = None,
    ledger: Ledger | None = None,
    client: int | str = EVERYONE,
    round: int = 0,
    secret: Secret | int | None = None,
    chunk: int | None = None,
) -> Ledger:
    """Train `model` in place by DP-SGD: Poisson batches, clipped examples, noise, and a ledger that is charged first.

    Paper: Abadi et al., "Deep learning with differential privacy" (CCS 2016), algorithm 1. Per-example gradients and
    clipping are Opacus'; the batches and the noise come from `secret`. It may be called again, round after round, with
    the same model and ledger: all steps compose.

    Args:
        model: any network without batch statistics; see `require_per_example`. The weights it comes with must be
            public, or released under the same ledger.
        images, labels: the private set, as for `condense_private`; N may be 0.
        size: the public number of records: gradients are divided by rate * size, not by the batch, and delta is
            compared with it.
        epsilon: for all steps of this call, from which sigma follows; or give `sigma`.
        sigma: noise standard deviation / clip.
        delta: below 1 / size; that of the ledger, if one is given.
        clip: l2 norm of one example's gradient over all parameters.
        rate: probability with which a record takes part in a step.
        steps: all are charged before the first.
        lr: of plain SGD.
        optimizer: instead, `optimizer(parameters)` gives any `torch.optim` optimiser.
        loss: losses [n] of logits [n, K] and labels. Default cross-entropy.
        ledger: default a new one.
        client, round: for the ledger.
        secret: where batches and noise come from; see `Secret`.
        chunk: examples whose gradients are held at once; default by device and size.

    Returns:
        The ledger.

    Raises:
        BudgetExhausted: before the first step; `.fits` of the steps would do.
        BatchStatistics, NotSeparable, PrivacyError, TypeError, ValueError: bad model, loss, data or options.
    """
    real = as_set(images, labels)
    check.positive_int(size, "size")
    check.positive_int(steps, "steps")
    check.real_number(rate, "rate", above=0.0, most=1.0)
    if (epsilon is None) == (sigma is None):
        raise PrivacyError("give either epsilon, from which sigma follows, or sigma")
    if sigma is None:
        assert epsilon is not None
        sigma = plan(epsilon, delta, count=steps, rate=rate).sigma
    refuse_large_delta(size, delta)
    ledger = ledger_at(ledger, delta)
    secret = as_secret(secret)
    rows_of = loss if loss is not None else _cross_entropy
    parameters = [p for p in model.parameters() if p.requires_grad]
    step_of = torch.optim.SGD(parameters, lr=lr) if optimizer is None else optimizer(parameters)
    part = chunk_size(real.images, chunk) if len(real) else 1
    modes = {module: module.training for module in model.modules()}
    model.train()
    try:
        with per_example_gradients(model) as gradients:
            private = PrivateGradient(parameters, sigma=sigma, clip=clip, denominator=rate * size, secret=secret)
            ledger.assume("train_private")
            ledger.spend(Event("dp_sgd", sigma, rate, steps, client, round, seeded=secret.seeded))
            for _ in range(steps):
                for rows in secret.poisson(len(real), rate).to(real.images.device).split(part):
                    if len(rows):
                        logits = model(real.images.index_select(0, rows).requires_grad_())
                        private.add(gradients(rows_of(logits, real.labels.index_select(0, rows))))
                for parameter, gradient in zip(parameters, private.take()):
                    parameter.grad = gradient
                step_of.step()
                step_of.zero_grad(set_to_none=True)
    finally:
        for module, mode in modes.items():
            module.training = mode
    return ledger


def _cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits, labels, reduction="none")
