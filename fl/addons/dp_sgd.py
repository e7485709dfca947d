"""DP-SGD on the clients: Poisson batches, clipped per-example gradients, noise, and accounting in a ledger."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch
from torch import nn

from distillkit._utils import check
from distillkit._utils.eval_mode import train_mode
from distillkit._utils.options import NonNegative, PositiveInt, Rate
from distillkit._utils.user_warnings import warn
from distillkit.privacy import ExampleGradients, PrivateGradient, per_example_gradients, require_per_example
from distillkit.privacy.accounting._ranges import check_clip, check_sigma
from distillkit.privacy.capture._captured_function import CapturedFunction, captured_augmentation
from distillkit.privacy.errors import PrivacyError
from distillkit.privacy.gradients.opacus_gradients import GRADIENTS, OpacusGradients, clipped_gradients, note_opacus
from distillkit.privacy.validation._arguments import refuse_derived, refuse_half_precision, refuse_large_delta
from distillkit.privacy.validation._private_records import apart_from_records, declare_records
from distillkit.sets import LabeledImages
from fl.addons._per_example import refuse_mixing_objective, unsound
from fl.averaging import AddOn, AveragingServer, Local, Settings, Step
from fl.batches import Batch, Phase, batch_at
from fl.message import Tensors
from fl.networks import Networks
from fl.task import Classification, MultiLabel

_CAPTURED: WeakKeyDictionary[Networks, dict[tuple[object, ...], CapturedFunction]] = WeakKeyDictionary()
"""Cache of the gradients captured in this process, so that they are not captured again in every round."""
_LOCK = threading.Lock()


class _NoColumn(PrivacyError):
    """A loss term reads a column that the set lacks."""


class _Columns(dict[str, torch.Tensor]):
    def __missing__(self, name: str) -> torch.Tensor:
        raise _NoColumn(f"a loss term reads the column {name!r}, but the set has the columns {sorted(self) or 'none'}")


@dataclass(frozen=True, kw_only=True)
class DPSGD(AddOn):
    """DP-SGD (Abadi et al., "Deep learning with differential privacy", CCS 2016, Algorithm 1) as the clients' training.

    DP-SGD limits the information about a single record in everything that a client sends.

    In each step, every record (image with its label) of the client takes part with probability `rate`. The gradient of
    each record is clipped to the norm `clip` over all trained parameters. The gradient of the step is

        (sum of clipped gradients + N(0, (sigma clip)^2)) / (rate size)

    plus the gradient of the add-ons' terms that read no private data, such as FedProx's. All further computations are
    post-processing: momentum, weight decay, Adam, SCAFFOLD's correction, averages, server steps, distillation on the
    server. The guarantee protects one record of one client against the server and everyone else. Clients hold different
    records, so the run's epsilon is the largest epsilon of any client. The ledger is charged for all steps of a
    training phase (option `phases` of `FedAvg`) before the first step draws its records.

    Before a client is charged, its process captures the gradient computation of one record as a fixed graph, once for
    each phase (see `privacy.per_example_gradients`). Only these graphs run on records, not the Python code of the
    network, the objective, the augmentation or another add-on. Other add-ons receive no records: the arguments `local`
    and `step` of their hooks hold an empty set. If the gradient of a record cannot be computed or is not finite, zero
    is used instead.

    To choose sigma for a given epsilon, use `privacy.plan_noise(epsilon, delta, rate=rate, count=count).sigma`, where
    `count` is the number of steps in a round times the number of rounds.

    Deviations. The algorithm divides by the lot size; here the denominator is the public number rate * size, because
    the size of a drawn lot is private. The method's `epochs` mean expected passes: every client takes round(epochs /
    rate) steps, at least one. The method's `batch` is not used. Batches, noise, augmentation and dropout are drawn from
    `client.secret` instead of the run's seed.

    Args:
        sigma: noise multiplier, that is, the noise's standard deviation divided by `clip`. 0 means no noise and no
            guarantee.
        rate: probability with which a record takes part in a step.
        size: number of records that is assumed for every client. It must not depend on private data.
        clip: largest l2 norm of one record's gradient. It may be infinite only if sigma is 0.
        gradients: how clipped gradients are computed: `"captured"`, or by Opacus' `"opacus"` or `"opacus-ghost"`, which
            run the network on batches; see `privacy.train_private`. With Opacus, the objective is evaluated on the
            logits of one record after another, and add-ons may have no loss terms on records.
        chunk: largest number of records whose gradients are in memory at the same time. The default depends on the
            device, the network and rate * size.
    """

    sigma: NonNegative
    rate: Rate
    size: PositiveInt
    clip: float = 1.0
    gradients: str = "captured"
    chunk: PositiveInt | None = None
    data_access = "none"
    private = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if check_sigma(self.sigma) == 0:
            warn("DPSGD(sigma=0) adds no noise: nothing is guaranteed, and the history's epsilon is None")
        check.one_of(self.gradients, "gradients", GRADIENTS)
        check_clip(self.clip, infinite=not self.sigma)

    def check(self, settings: Settings, addons: Sequence[AddOn]) -> None:
        """Refuse add-ons and options that would leak private data in addition to the noised gradient."""
        for addon in addons:
            if why := unsound(addon):
                raise ValueError(f"DPSGD cannot be combined with {addon.name}, which {why}; leave it out")
            if self.gradients != "captured" and addon.data_access == "example":
                raise ValueError(
                    f"DPSGD(gradients={self.gradients!r}) trains on the objective alone, but {addon.name} reads "
                    "private examples (data_access = 'example'); use gradients='captured', or leave the add-on out"
                )
        for name in settings.networks.names:
            try:
                require_per_example(settings.networks.draw(name, 2, torch.Generator()))
            except ValueError as error:
                raise type(error)(f"DPSGD: {error}") from error

    def start(self, server: AveragingServer) -> None:
        """Refuse an objective that mixes the examples of a batch, and a delta of the ledger that is too large for
        `size`.

        Raises:
            NotSeparable, NotAccountable: the reason, as above.
        """
        if server.ledger is not None:
            refuse_large_delta(self.size, server.ledger.delta)
            server.ledger.assume("DPSGD")
            note_opacus(server.ledger, self.gradients)
        refuse_mixing_objective(server, server.generator(self.key))

    def dry_run(self, local: Local) -> None:
        """Capture the gradient computation of every training phase, and the augmentation, as fixed graphs of operators.

        This is done on noise images before round 1, to detect errors early.

        Raises:
            BatchStatistics, NotCapturable, NotSeparable, PrivacyError: the network, the objective, the augmentation or
                a loss term of an add-on cannot be captured as a fixed function of one record.
        """
        for phase in local.settings.phases:
            train_mode(local.net)
            with contextlib.suppress(_NoColumn):  # only clients know their columns: captured there, before the charge
                self._gradients(local, local.data, phase)
        if local.settings.augment is not None:
            captured_augmentation(local.settings.augment, local.data.images)

    @apart_from_records(content=False)
    def _gradients(self, local: Local, like: LabeledImages, phase: Phase) -> ExampleGradients | OpacusGradients:
        refuse_half_precision(like.images, "a client's set")
        moved, names = local.trained_parameters(phase), sorted(like.columns)
        tensors = [like.images, like.labels, *(like.columns[n] for n in names)]
        declare_records(*tensors)

        if self.gradients != "captured":
            objective = local.settings.objective_of(local.task)

            def of_rows(
                network: nn.Module, images: torch.Tensor, labels: torch.Tensor, *_: torch.Tensor
            ) -> torch.Tensor:
                rows = [objective(logits[None], label[None]) for logits, label in zip(network(images), labels)]
                return local.weight * torch.stack(rows)

            return clipped_gradients(self.gradients, local.net, of_rows, tensors, trained=moved)

        def losses(images: torch.Tensor, labels: torch.Tensor, *columns: torch.Tensor) -> torch.Tensor:
            batch = Batch(images, labels, _Columns(zip(names, columns)))
            return Step.example_loss(local, batch, moved).expand(len(images))

        if any(term.data_access == "example" for term in local.terms):  # these terms may use values of this round
            with torch.no_grad():  # values that a term prepares at its first call must not be traced
                losses(*(t.new_zeros(1, *t.shape[1:]) for t in tensors))
            return per_example_gradients(local.net, losses, tensors, trained=moved)
        with _LOCK:
            known = _CAPTURED.setdefault(local.settings.networks, {})
        kinds = tuple((t.shape[1:], t.dtype, t.device) for t in tensors)
        task = local.task if type(local.task) in (Classification, MultiLabel) else local.task.loss  # by identity
        key = (local.architecture, phase, local.weight, like.num_classes, kinds, task)
        if key not in known:
            known[key] = per_example_gradients(local.net, losses, tensors, trained=moved).captured
        known[key].refuse_records()  # captured for another client
        return ExampleGradients(local.net, moved, known[key])

    def batches(self, local: Local, data: LabeledImages, phase: Phase) -> Iterator[Batch]:
        """Charge the ledger for all steps of the phase, then draw records and compute their noised gradient in each
        step.

        The yielded batches are empty: `gradient` returns the gradient, so no other code sees the records.
        """
        client, settings, moved = local.client, local.settings, local.trained_parameters(phase)
        refuse_derived(data.info, "a client's images")
        steps = max(1, round(phase.epochs / self.rate)) if phase.steps is None else phase.steps
        private = PrivateGradient(
            list(moved.values()), sigma=self.sigma, clip=self.clip, denominator=self.rate * self.size,
            secret=client.secret,
        )  # fmt: skip
        gradients = self._gradients(local, data, phase)
        augment = None if settings.augment is None else captured_augmentation(settings.augment, data.images)
        client.spend("dp_sgd", self.sigma, rate=self.rate, count=steps)
        chunk, draws = gradients.chunk_size(self.rate * self.size, self.chunk), client.secret.generator()
        for _ in range(steps):
            for rows in client.secret.poisson(len(data), self.rate).split(chunk):
                batch = batch_at(data, rows)
                images = batch.images if augment is None else augment(batch.images, draws)
                columns = [batch.columns[n] for n in sorted(batch.columns)]
                gradients.add_to(private, images, batch.labels, *columns, generator=draws)
            local.scratch(self)["noised"] = private.take()
            yield batch_at(data, torch.zeros(0, dtype=torch.int64))

    def gradient(self, step: Step, compute: Callable[[], Tensors]) -> Tensors:
        """Return the noised gradient of the drawn records plus that of terms that read no private data."""
        noised = dict(zip(step.trained, step.local.scratch(self)["noised"], strict=True))
        public = step.public_gradient()
        return {n: g + public[n] if n in public else g for n, g in noised.items()}
