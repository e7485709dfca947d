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

    Use it when `train_private` refuses a network with `BatchStatistics`. Layers are replaced as by Opacus' validator:
    batch norm becomes group norm (up to 32 groups), and instance norm loses its running statistics. The copy has fresh
    norm layers: train it from scratch, or fine-tune it.

    Args:
        network: network to copy; it is not changed.
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

    Every step draws records by Poisson sampling, clips each record's gradient, sums the clipped gradients, adds noise
    and passes the result to an ordinary optimiser. All steps are charged to the ledger before the first. You may call
    the function again, for instance once per round, with the same network and ledger: the steps of all calls compose.

    Paper: Abadi et al., "Deep learning with differential privacy" (CCS 2016), algorithm 1. Opacus' hooks compute the
    per-example gradients if they support the network. Batches, noise and the masks of `nn.Dropout` are drawn from the
    account's `Secret`.

    Before anything is charged, the network and the loss are checked on public noise (see `per_example_gradients`):
    either is refused if its result for an example depends on the rest of the batch. The check costs as much as a few
    steps.

    Args:
        network: network without batch statistics; see `require_per_example`. Its initial weights must be public, or
            released under the same ledger.
        images, labels: private set, as for `condense_private`; N may be 0.
        size: public number of records. Gradients are divided by rate * size, not by the batch size, and delta is
            compared with `size`.
        epsilon: target for all steps of this call, from which sigma is computed. Give either `epsilon` or `sigma`.
        sigma: noise standard deviation / clip; 0 adds no noise, and the ledger then records that no guarantee holds.
        delta: target delta, below 1 / size, and equal to the delta of a given ledger.
        clip: largest l2 norm of one example's gradient over all parameters; longer gradients are scaled down to this
            norm.
        rate: sample rate: the probability with which each record takes part in a step; the expected batch size is
            rate * size.
        steps: number of steps; all are charged before the first.
        lr: learning rate of plain SGD, > 0.
        optimizer: function of the parameters that returns a `torch.optim` optimiser, which replaces plain SGD.
        loss: function of (logits [n, K], labels) that returns n losses, each of which depends on its own row alone.
            Default: cross-entropy.
        ledger: ledger to charge, or an `Account`, which also sets the client, the round and the source of batches and
            noise. Default: a new ledger in memory.
        chunk: maximum number of examples whose gradients are in memory at once; the default depends on device, image
            size and rate * size.
        gradients: method that computes per-example gradients: "auto", "hooks" or "func"; see `mode` of
            `per_example_gradients`.
        progress: whether to show a progress bar on a terminal.

    Returns:
        The ledger; `.guarantee(client)` returns the guarantee that now holds for the records.

    Raises:
        BudgetExhausted: the budget does not allow all steps; none was taken. `.remaining` is the number of steps that
            are still allowed.
        PrivacyError: one of its subclasses, with a remedy in the message: BatchStatistics, NotSeparable,
            PrivateStatistics, NotAccountable.
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
    """Return six noise images, with labels in the set's format."""
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
