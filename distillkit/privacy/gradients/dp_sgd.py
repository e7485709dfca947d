"""DP-SGD for a network: Poisson batches, clipped per-example gradients and noise, charged to a ledger."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from distillkit._utils import check
from distillkit._utils.eval_mode import preserve_modes
from distillkit._utils.progress import bar
from distillkit.networks._dropout import no_dropout, seeded_dropout
from distillkit.privacy._public_noise import public_test_images
from distillkit.privacy.accounting.planning import resolve_sigma
from distillkit.privacy.gradients._per_example_engines import GradientMode
from distillkit.privacy.gradients.per_example import keeps_statistics, per_example_gradients, require_per_example
from distillkit.privacy.gradients.private_gradient import PrivateGradient
from distillkit.privacy.ledger import Account, Ledger
from distillkit.privacy.validation._arguments import (
    open_account,
    refuse_half_precision,
    refuse_large_delta,
    refuse_measured_normalization,
)
from distillkit.privacy.validation._gradient_check import choose_batch_sizes
from distillkit.privacy.validation._independence import require_independent_losses
from distillkit.privacy.validation._side_effects import forbid_side_effects
from distillkit.rng import derive
from distillkit.sets import LabeledImages, as_set

__all__ = ["train_private", "without_batch_norm"]

RowLoss = Callable[[Tensor, Tensor], Tensor]


def without_batch_norm(network: nn.Module) -> nn.Module:
    """Return a copy of `network` without layers that keep or use statistics of a batch.

    Use it when `train_private` refuses a network with `BatchStatistics`. The replacements are those of Opacus'
    validator: batch norm becomes group norm (up to 32 groups), and instance norm loses its running statistics. The copy
    has fresh norm layers: train it from scratch, or fine-tune it.

    Args:
        network: any network; it is not changed.
    """
    from opacus.validators import ModuleValidator

    twin = copy.deepcopy(network)
    for name, module in list(twin.named_modules()):
        if not keeps_statistics(module):
            continue
        fixed = ModuleValidator.FIXERS[type(module)](module).to(next(module.parameters(), torch.empty(0)))
        if not name:
            return fixed
        parent, _, child = name.rpartition(".")
        setattr(twin.get_submodule(parent), child, fixed)
    return twin


def train_private(
    network: nn.Module,
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
    ledger: Ledger | Account | None = None,
    chunk: int | None = None,
    gradients: GradientMode = "auto",
    progress: bool = True,
) -> Ledger:
    """Train `network` in place by DP-SGD, so that its weights are differentially private.

    Every step draws records by Poisson sampling, clips the gradient of each, sums them, adds noise and passes the
    result to an ordinary optimiser. All steps are charged to the ledger before the first. Call it again, round after
    round, with the same network and ledger: all steps compose.

    Paper: Abadi et al., "Deep learning with differential privacy" (CCS 2016), algorithm 1. Per-example gradients are
    Opacus' where its hooks support the network. Batches, noise and the masks of `nn.Dropout` are drawn from the secret.

    Before anything is charged, network and loss are checked on public noise (see `per_example_gradients`): a network or
    loss that treats an example differently in another batch is refused. The check costs as much as a few steps.

    Args:
        network: any network without batch statistics; see `require_per_example`. Its initial weights must be public, or
            released under the same ledger.
        images, labels: the private set, as for `condense_private`; N may be 0.
        size: the public number of records: gradients are divided by rate * size, not by the batch size, and delta is
            compared with it.
        epsilon: for all steps of this call; sigma follows from it. Or give `sigma`.
        sigma: noise standard deviation / clip; 0 adds no noise, which the ledger records as no guarantee.
        delta: below 1 / size, and equal to that of a given ledger.
        clip: the largest l2 norm of one example's gradient over all parameters; longer ones are scaled down to it.
        rate: the probability with which a record takes part in a step (sample rate); a step expects rate * size.
        steps: number of steps; all are charged before the first.
        lr: learning rate of plain SGD, > 0.
        optimizer: replaces plain SGD: `optimizer(parameters)` returns any `torch.optim` optimiser.
        loss: `loss(logits [n, K], labels)` returns losses [n], each of its own row alone. Default: cross-entropy.
        ledger: the ledger to charge, or an `Account` that also names client, round and the source of batches and noise.
            Default: a new ledger in memory.
        chunk: the most examples whose gradients are in memory at once; default by device, image size and rate * size.
        gradients: how per-example gradients are computed: "auto", "hooks" or "func"; see `per_example_gradients`.
        progress: whether to show a progress bar on a terminal.

    Returns:
        The ledger; `.guarantee(client)` is the guarantee that now holds for the records.

    Raises:
        BudgetExhausted: before the first step; `.remaining` of the steps are still allowed.
        PrivacyError: one of its kinds, with the remedy: BatchStatistics, NotSeparable, PrivateStatistics,
            NotAccountable.
        TypeError, ValueError: invalid images, labels or options.
    """
    real = as_set(images, labels)
    check.positive_int(size, "size")
    check.boolean(progress, "progress")
    check.positive_int(steps, "steps")
    check.real_number(rate, "rate", above=0.0, most=1.0)
    check.real_number(lr, "lr", above=0.0)
    sigma = resolve_sigma(epsilon, sigma, delta=delta, count=steps, rate=rate)
    refuse_large_delta(size, delta)
    refuse_measured_normalization(real.normalization, "train_private")
    refuse_half_precision(real.images, "the images")
    account = open_account(ledger, delta)
    secret = account.secret
    row_loss = loss if loss is not None else _cross_entropy
    parameters = [p for p in network.parameters() if p.requires_grad]
    public = _public_examples(real)
    chunk, sizes = choose_batch_sizes(real.images, rate * size, chunk)

    def losses(inputs: Tensor, targets: Tensor) -> Tensor:
        return row_loss(network(inputs), targets)

    with preserve_modes(network):
        network.train()
        require_per_example(network)
        _check_loss(network, row_loss, *public)
        with (
            per_example_gradients(network, losses, public=public, chunk=chunk, sizes=sizes, mode=gradients) as rows_of,
            seeded_dropout(network, secret.generator()),
            bar(steps, "private training", progress=progress) as shown,
        ):
            update = torch.optim.SGD(parameters, lr=lr) if optimizer is None else optimizer(parameters)
            private = PrivateGradient(parameters, sigma=sigma, clip=clip, denominator=rate * size, secret=secret)
            account.ledger.assume("train_private")
            account.spend("dp_sgd", sigma, rate=rate, count=steps)
            for _ in range(steps):
                for rows in secret.poisson(len(real), rate).to(real.images.device).split(chunk):
                    if len(rows):
                        private.add(rows_of(real.images.index_select(0, rows), real.labels.index_select(0, rows)))
                for parameter, gradient in zip(parameters, private.take()):
                    parameter.grad = gradient
                update.step()
                update.zero_grad(set_to_none=True)
                shown.update()
    return account.ledger


def _public_examples(like: LabeledImages) -> tuple[Tensor, Tensor]:
    """Return six noise images, with labels of the set's kind."""
    classes = (torch.arange(6) * (like.num_classes - 1) // 5).to(like.labels.device)
    labels = classes if like.labels.ndim == 1 else F.one_hot(classes, like.labels.shape[1])
    return public_test_images(6, like, derive(0, "train_private")), labels.to(like.labels.dtype)


def _check_loss(network: nn.Module, loss: RowLoss, images: Tensor, labels: Tensor) -> None:
    what = f"the network {type(network).__name__}"
    with torch.no_grad(), no_dropout(network), forbid_side_effects(what, network, device=images.device):
        logits = network(images)
    drawn = torch.randn(logits.shape, generator=derive(0, "logits"), dtype=torch.float64)
    require_independent_losses(loss, drawn.to(logits), labels)


def _cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits, labels, reduction="none")
