"""DP-SGD for a network's local training, on Opacus' per-example gradients, with Poisson batches and a ledger."""

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
from distillkit.privacy._clients import ALL_CLIENTS
from distillkit.privacy._public_noise import public_test_images
from distillkit.privacy.accounting.planning import resolve_sigma
from distillkit.privacy.events import Event
from distillkit.privacy.gradients._engines import GradientMode
from distillkit.privacy.gradients.per_example import (
    keeps_statistics,
    per_example_gradients,
    require_per_example,
)
from distillkit.privacy.gradients.private_gradient import PrivateGradient
from distillkit.privacy.ledger import Ledger
from distillkit.privacy.noise import Secret, as_secret
from distillkit.privacy.validation._arguments import ledger_or_new, refuse_half_precision, refuse_measured_normalization
from distillkit.privacy.validation._delta import refuse_large_delta
from distillkit.privacy.validation._gradient_check import choose_batch_sizes
from distillkit.privacy.validation._independence import require_independent_losses
from distillkit.privacy.validation._side_effects import forbid_side_effects
from distillkit.rng import derive
from distillkit.sets import LabeledImages, as_set

__all__ = ["train_private", "without_batch_norm"]

RowLoss = Callable[[Tensor, Tensor], Tensor]


def without_batch_norm(network: nn.Module) -> nn.Module:
    """A copy of `network` without layers that keep or use statistics of a batch, which private training refuses.

    For when `train_private` refuses a network as `BatchStatistics`. The replacements are those of Opacus' validator:
    batch norm becomes group norm (up to 32 groups), instance norm loses its running statistics. It is another network
    with fresh norm layers: train it from scratch, or fine-tune.

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
    ledger: Ledger | None = None,
    client: int | str = ALL_CLIENTS,
    round: int = 0,
    secret: Secret | int | None = None,
    chunk: int | None = None,
    progress: bool = True,
    gradients: GradientMode = "auto",
    public_statistics: bool = False,
) -> Ledger:
    """Train `network` in place so that its weights are differentially private, by DP-SGD.

    Every step draws records by Poisson sampling, clips the gradient of each, adds them up, adds noise and hands the
    result to an ordinary optimiser. All steps are charged to the ledger before the first.

    Paper: Abadi et al., "Deep learning with differential privacy" (CCS 2016), algorithm 1. Per-example gradients are
    Opacus' where its hooks serve; the batches and the noise come from `secret`, and so do the draws of `nn.Dropout`. It
    may be called again, round after round, with the same network and ledger: all steps compose.

    Before anything is charged, network and loss are tried on public noise (see `per_example_gradients`): what makes
    something else of an example when it stands among others is refused. That costs as much as a few steps.

    Args:
        network: any network without batch statistics; see `require_per_example`. The weights it comes with must be
            public, or released under the same ledger.
        images, labels: the private set, as for `condense_private`; N may be 0.
        size: the public number of records: gradients are divided by rate * size, not by the batch, and delta is
            compared with it.
        epsilon: for all steps of this call, from which sigma follows; or give `sigma`.
        sigma: noise standard deviation / clip; 0 adds no noise, which the ledger records as no guarantee.
        delta: below 1 / size; that of the ledger, if one is given.
        clip: the largest l2 norm of one example's gradient over all parameters; longer ones are scaled down to it.
        rate: probability with which a record takes part in a step; rate * size records are expected in one.
        steps: how many; all are charged before the first.
        lr: step length of plain SGD, > 0.
        optimizer: in place of plain SGD: `optimizer(parameters)` gives any `torch.optim` optimiser.
        loss: `loss(logits [n, K], labels)` gives losses [n], each of its own row alone. Default cross-entropy.
        ledger: what is charged; default a new one in memory.
        client, round: whose records these are and when, for the ledger.
        secret: where batches and noise come from; see `Secret`.
        chunk: the most examples whose gradients are held at once; default by device, image size and rate * size.
        progress: whether the steps show a bar where somebody watches.
        gradients: how those of single examples are found: "auto", "hooks" or "func"; see `per_example_gradients`.
        public_statistics: the set's normalisation was measured, but on public images.

    Returns:
        The ledger; `.guarantee(client)` is what now holds for the records.

    Raises:
        BudgetExhausted: before the first step; `.remaining` of the steps would do.
        BatchStatistics, NotSeparable, PrivateStatistics, PrivacyError, TypeError, ValueError: bad network, loss, data
            or options; before anything is charged.
    """
    real = as_set(images, labels)
    check.positive_int(size, "size")
    check.boolean(progress, "progress")
    check.positive_int(steps, "steps")
    check.real_number(rate, "rate", above=0.0, most=1.0)
    check.real_number(lr, "lr", above=0.0)
    sigma = resolve_sigma(epsilon, sigma, delta=delta, count=steps, rate=rate)
    refuse_large_delta(size, delta)
    if not check.boolean(public_statistics, "public_statistics"):
        refuse_measured_normalization(real.normalization, "train_private")
    refuse_half_precision(real.images, "the images")
    ledger = ledger_or_new(ledger, delta)
    secret = as_secret(secret)
    rows_of = loss if loss is not None else _cross_entropy
    trained = {n: p for n, p in network.named_parameters() if p.requires_grad}
    parameters = list(trained.values())
    public = _public_examples(real)
    part, sizes = choose_batch_sizes(real.images, rate * size, chunk)

    def losses(inputs: Tensor, targets: Tensor) -> Tensor:
        return rows_of(network(inputs), targets)

    with preserve_modes(network):
        network.train()
        require_per_example(network)
        _refuse_mixing_loss(network, rows_of, *public)
        with (
            per_example_gradients(network, losses, public=public, chunk=part, sizes=sizes, how=gradients) as rows_for,
            seeded_dropout(network, secret.generator()),
            bar(steps, "private training", progress=progress) as shown,
        ):
            step_of = torch.optim.SGD(parameters, lr=lr) if optimizer is None else optimizer(parameters)
            private = PrivateGradient(parameters, sigma=sigma, clip=clip, denominator=rate * size, secret=secret)
            ledger.assume("train_private")
            ledger.spend(Event("dp_sgd", sigma, rate, steps, client, round, seeded=secret.seeded))
            for _ in range(steps):
                for rows in secret.poisson(len(real), rate).to(real.images.device).split(part):
                    if len(rows):
                        private.add(rows_for(real.images.index_select(0, rows), real.labels.index_select(0, rows)))
                for parameter, gradient in zip(parameters, private.take()):
                    parameter.grad = gradient
                step_of.step()
                step_of.zero_grad(set_to_none=True)
                shown.update()
    return ledger


def _public_examples(like: LabeledImages) -> tuple[Tensor, Tensor]:
    """Six noise images, with labels of the set's kind."""
    classes = (torch.arange(6) * (like.num_classes - 1) // 5).to(like.labels.device)
    labels = classes if like.labels.ndim == 1 else F.one_hot(classes, like.labels.shape[1])
    return public_test_images(6, like, derive(0, "train_private")), labels.to(like.labels.dtype)


def _refuse_mixing_loss(network: nn.Module, loss: RowLoss, images: Tensor, labels: Tensor) -> None:
    what = f"the network {type(network).__name__}"
    with torch.no_grad(), no_dropout(network), forbid_side_effects(what, network, device=images.device):
        logits = network(images)
    drawn = torch.randn(logits.shape, generator=derive(0, "logits"), dtype=torch.float64)
    require_independent_losses(loss, drawn.to(logits), labels)


def _cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits, labels, reduction="none")
