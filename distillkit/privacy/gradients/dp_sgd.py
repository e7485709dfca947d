"""DP-SGD for a network: Poisson batches, clipped per-example gradients and noise, charged to a ledger."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from distillkit._utils import check
from distillkit._utils.eval_mode import preserve_modes, train_mode
from distillkit._utils.progress import bar
from distillkit._utils.user_warnings import without_warnings
from distillkit.networks._base import require_network
from distillkit.privacy.accounting.planning import resolve_sigma
from distillkit.privacy.errors import NotCapturable, PrivacyError
from distillkit.privacy.gradients.opacus_gradients import OpacusGradients, clipped_gradients, note_opacus
from distillkit.privacy.gradients.per_example import ExampleGradients, tracks_statistics
from distillkit.privacy.gradients.private_gradient import PrivateGradient
from distillkit.privacy.ledger import Account, Ledger
from distillkit.privacy.secret import Secret
from distillkit.privacy.validation._arguments import (
    open_account,
    refuse_derived,
    refuse_half_precision,
    refuse_large_delta,
    refuse_measured_normalization,
    refuse_tiles,
)
from distillkit.privacy.validation._independence import require_independent_losses
from distillkit.privacy.validation._private_records import (
    Untouched,
    active_records,
    apart_from_records,
    declare_records,
)
from distillkit.rng import derive
from distillkit.sets import LabeledImages, as_set
from distillkit.sets._devices import on_device

RowLoss = Callable[[Tensor, Tensor], Tensor]


def without_batch_norm(network: nn.Module) -> nn.Module:
    """Return a copy of `network` without layers that keep or use statistics of a batch.

    Use the copy when `train_private` raises `BatchStatistics` for a network. As in Opacus' `ModuleValidator.fix`, batch
    norm becomes group norm (up to 32 groups), and instance norm loses its running statistics. The copy has newly
    initialized norm layers, so train the copy from scratch or fine-tune it.

    Args:
        network: network to copy; it is not changed.

    Raises:
        TypeError: `network` is not an `nn.Module`.
    """
    from opacus.validators import ModuleValidator

    twin = copy.deepcopy(require_network(network))
    for name, module in list(twin.named_modules()):
        if not tracks_statistics(module):
            continue
        kind = next(kind for kind in type(module).__mro__ if kind in ModuleValidator.FIXERS)
        fixed = ModuleValidator.FIXERS[kind](module).to(next(module.parameters(), torch.empty(0)))
        if not name:
            return fixed
        parent, _, child = name.rpartition(".")
        setattr(twin.get_submodule(parent), child, fixed)
    return twin


@on_device(trains="network")
@apart_from_records()
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
    gradients: str = "captured",
    chunk: int | None = None,
    device: torch.device | str | None = None,
    progress: bool = True,
) -> Ledger:
    """Train `network` in place by DP-SGD, so that its weights are differentially private.

    Every step draws records by Poisson sampling, clips each record's gradient, sums the clipped gradients, adds noise
    and passes the result to an ordinary optimizer. All steps are charged to the ledger before the first step. You may
    call the function again, for instance once per round, with the same network and ledger: the steps of all calls
    compose.

    Paper: Abadi et al., "Deep learning with differential privacy" (CCS 2016), algorithm 1. Batches, noise, dropout and
    all other random draws come from the operating system's entropy, or from the `Secret` of the account that you pass
    as `ledger`.

    Before anything is charged, the gradient of one record's loss is captured as a fixed graph of tensor operators (see
    `per_example_gradients`). A network or loss that is not a fixed function of one record is refused. The code of the
    network and the loss never runs on records, so hooks in this code, or branches that depend on values, cannot weaken
    the guarantee (code that replaces functions of PyTorch or of this package can). Only the parameters of `network`
    change. A record whose gradient is not finite, or for which an operator fails, counts as zero.

    Args:
        network: network without batch statistics; see `require_per_example`. Its initial weights and buffers must be
            public, or released under the same ledger. It is trained in training mode, except that norm layers in eval
            mode stay in it. So `network.eval()` before the call fine-tunes a network with public running statistics.
        images, labels: the private set: a `LabeledImages` alone; or images, float [N, C, H, W], and their labels. The
            set may be empty.
        size: public number of records. The noised gradient sum is divided by rate * size, not by the batch size, and
            delta is compared with `size`.
        epsilon: target for all steps of this call, from which sigma is computed. Give either `epsilon` or `sigma`.
        sigma: noise standard deviation / clip; 0 adds no noise, and the ledger then records that no guarantee holds.
        delta: target delta, below 1 / size, and equal to the delta of a given ledger.
        clip: largest l2 norm of one record's gradient over all parameters; longer gradients are scaled down to this
            norm.
        rate: sample rate: the probability with which each record takes part in a step; the expected batch size is
            rate * size.
        steps: number of steps; all are charged before the first step.
        lr: learning rate of plain SGD, > 0.
        optimizer: function that takes the parameters and returns a `torch.optim` optimizer, which replaces plain SGD.
        loss: function of (logits [n, K], labels) that returns n losses, each of which depends on its own row alone.
            Training evaluates it on one row. Default: cross-entropy.
        ledger: ledger to charge; or an `Account`, which combines a ledger with the client, the round and the source of
            batches and noise. Default: a new ledger in memory.
        gradients: how clipped gradients are computed. `"captured"` as above, for every network. `"opacus"` runs the
            network on batches, with the hooks of Opacus' `GradSampleModule`; `"opacus-ghost"` does the same with ghost
            clipping, which is fastest for large linear layers. The guarantee then assumes more, which the ledger's
            remarks state.
        chunk: maximum number of records whose gradients are in memory at once; the default depends on device, network
            and rate * size.
        device: device that computes, or "auto"; the network returns to its own. Default: nothing moves.
        progress: whether to show a progress bar on a terminal.

    Returns:
        The ledger. `.guarantee()` returns the guarantee that now holds for the records; with an `Account`, call
        `.guarantee(client)` with the account's client.

    Raises:
        BudgetExhausted: the ledger's budget does not allow all steps. No step was taken. `.remaining` is the number of
            steps that are still allowed.
        PrivacyError: the guarantee cannot be given. The error is one of the subclasses BatchStatistics, NotCapturable,
            NotSeparable, PrivateStatistics and NotAccountable; its message gives the remedy.
        TypeError, ValueError: the images, the labels or an option are invalid.
    """
    with without_warnings():  # sanity checks of pixels depend on the records
        empty = isinstance(labels, Tensor) and labels.ndim == 1 and not len(labels)
        real = as_set(images, labels, num_classes=1 if empty else None)
    check.with_values(require_network(network))
    check.positive_int(size, "size")
    check.boolean(progress, "progress")
    steps, rate = check.positive_int(steps, "steps"), check.real_number(rate, "rate", above=0.0, most=1.0)
    check.learning_rate(lr)
    sigma = resolve_sigma(epsilon, sigma, delta=delta, count=steps, rate=rate)
    refuse_large_delta(size, delta)
    refuse_derived(real.info)
    refuse_tiles(real)
    refuse_measured_normalization(real.normalization, "train_private")
    refuse_half_precision(real.images, "the images")
    if optimizer is not None:
        check.callable_with(optimizer, "optimizer", ["parameters"], "partial(torch.optim.Adam, lr=0.001)", classes=True)
    account = open_account(ledger, delta)
    secret = account.secret
    row_loss = loss if loss is not None else _cross_entropy
    parameters = [p for p in network.parameters() if p.requires_grad]
    declare_records(*real, *real.columns.values())
    records = active_records()
    records.refuse_reachable((network, row_loss), "the network or its loss")
    records.refuse_state(network, f"the network {type(network).__name__}")

    columns = 0  # of the logits: a number of classes that was found in the labels would depend on one record

    def losses(network: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
        nonlocal columns
        outputs = network(inputs)
        if isinstance(outputs, Tensor) and outputs.ndim == 2:
            columns = outputs.shape[1]
        elif loss is None and not isinstance(outputs, Tensor):
            raise NotCapturable(
                f"the network {type(network).__name__} returns a {type(outputs).__name__} instead of logits; pass a "
                "loss that takes it: loss=lambda out, y: F.cross_entropy(out.logits, y, reduction='none')"
            )
        return row_loss(outputs, targets)

    with preserve_modes(network):
        train_mode(network)
        source = clipped_gradients(gradients, network, losses, (real.images, real.labels))
        if loss is not None and columns:
            _check_loss(loss, real, columns)
        if loss is None and isinstance(images, LabeledImages) and images.classes_given and columns < images.num_classes:
            raise ValueError(
                f"network must return {images.num_classes} logits, one per class of the images, got {columns}; build "
                f"it for {images.num_classes} classes"
            )
        if loss is None:
            _require_gradient(source, parameters, real, type(network).__name__)
    chunk = source.chunk_size(rate * size, chunk)
    with Untouched(records, "the optimizer", shape=False):
        update = torch.optim.SGD(parameters, lr=lr) if optimizer is None else optimizer(parameters)
    if not isinstance(update, torch.optim.Optimizer):
        raise TypeError(f"optimizer must return a torch.optim optimizer, got a {type(update).__name__}")
    known, own = {id(p) for p in parameters}, {id(p) for group in update.param_groups for p in group["params"]}
    if not own or not own <= known:
        raise ValueError(
            "optimizer must return an optimizer of the parameters that it is called with, got one of "
            f"{len(own)} parameters, {len(own - known)} of them others"
        )
    if isinstance(update, torch.optim.LBFGS):
        raise TypeError("optimizer must step by one noised gradient, but LBFGS evaluates the loss; use SGD or Adam")
    largest = min(torch.finfo(p.dtype).max for p in parameters)
    for group in update.param_groups:
        for name in ("lr", "momentum", "dampening", "weight_decay", "eps"):
            if not abs(value := float(group.get(name) or 0.0)) <= largest:
                raise ValueError(f"{name} must be finite and at most {largest:.2g} for these parameters, got {value:g}")
    private = PrivateGradient(parameters, sigma=sigma, clip=clip, denominator=rate * size, secret=secret)
    account.ledger.assume("train_private")
    note_opacus(account.ledger, gradients)
    account.spend("dp_sgd", sigma, rate=rate, count=steps)
    draws = secret.generator()
    with bar(steps, "private training", progress=progress) as shown:
        for _ in range(steps):
            for rows in secret.poisson(len(real), rate).to(real.images.device).split(chunk):
                images, targets = real.images.index_select(0, rows), real.labels.index_select(0, rows)
                source.add_to(private, images, targets, generator=draws)
            for parameter, gradient in zip(parameters, private.take()):
                parameter.grad = gradient
            with Untouched(records, "the optimizer", shape=False):
                _step(update)
            shown.update()
    return account.ledger


def _require_gradient(
    source: ExampleGradients | OpacusGradients, parameters: Sequence[nn.Parameter], like: LabeledImages, name: str
) -> None:
    """Refuse a network whose gradient is zero or not finite for images of uniform noise in [0, 1]."""
    images = torch.rand(2, *like.shape, generator=derive(0, "trial of a gradient")).to(like.images)
    labels = torch.zeros(2, dtype=torch.int64) if like.labels.ndim == 1 else torch.eye(2, like.labels.shape[1])
    trial = PrivateGradient(parameters, sigma=0.0, clip=math.inf, denominator=1.0, secret=Secret(0))
    source.add_to(trial, images, labels.to(like.labels), generator=derive(0, "draws of a trial"))
    if not any(bool(gradient.any()) for gradient in trial.take()):
        raise PrivacyError(
            f"the network {name} has no finite gradient for noise images, so it would learn from noise alone; check "
            "that it returns finite logits, and that no detach or torch.no_grad stands between them and its parameters"
        )


def _step(update: torch.optim.Optimizer) -> None:
    """Take one step of the optimizer. All steps are charged already, so an error says so."""
    try:
        update.step()
    except PrivacyError:
        raise
    except Exception as error:
        raise PrivacyError(
            f"the optimizer {type(update).__name__} failed after all steps were charged: {error}; change its options "
            "or its step"
        ) from error
    update.zero_grad(set_to_none=True)


def _check_loss(loss: RowLoss, like: LabeledImages, outputs: int) -> None:
    """Refuse a loss whose value for an example depends on the other examples in the batch.

    The check uses six random rows of logits, with as many columns as the network has outputs. A loss that takes other
    outputs than logits fails here and is not checked: its capture on one record guarantees as much, and names the
    errors of any loss.
    """
    rows = None if like.labels.ndim == 1 else like.labels.shape[1]
    classes = (torch.arange(6) * ((outputs if rows is None else rows) - 1) // 5).to(like.labels.device)
    labels = classes if rows is None else F.one_hot(classes, rows)
    logits = torch.randn(6, outputs, generator=derive(0, "logits"), dtype=torch.float64).to(like.images)
    try:
        require_independent_losses(loss, logits, labels.to(like.labels.dtype))
    except PrivacyError:
        raise
    except Exception:
        pass


def _cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits, labels, reduction="none")
