"""DP-SGD on the clients: Poisson batches, clipped per-example gradients and noise, charged to a ledger."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from weakref import WeakKeyDictionary

import torch

from distillkit._utils import check
from distillkit._utils.user_warnings import warn
from distillkit.privacy import ExampleGradients, PrivateGradient, per_example_gradients, require_per_example
from distillkit.privacy.gradients._per_example_engines import GradientMode
from distillkit.privacy.validation._arguments import refuse_half_precision, refuse_large_delta
from distillkit.privacy.validation._gradient_check import choose_batch_sizes
from distillkit.sets import LabeledImages
from fl._options import NonNegative, PositiveInt, Rate
from fl.addons._per_example import public_examples, refuse_mixing_parts, unsound
from fl.averaging import AddOn, AveragingServer, Local, Settings, Step
from fl.batches import Batch, Phase, batch_at
from fl.message import Tensors
from fl.networks import Networks

__all__ = ["DPSGD"]

_ENGINES: WeakKeyDictionary[Networks, dict[tuple[object, ...], str]] = WeakKeyDictionary()
"""Engines of the gradient checks that passed in this process, so that no check is repeated in every round."""
_LOCK = threading.Lock()


@dataclass(frozen=True, kw_only=True)
class DPSGD(AddOn):
    """DP-SGD (Abadi et al., "Deep learning with differential privacy", CCS 2016, Algorithm 1) as the clients' training.

    It bounds what anyone can learn about a single record from everything that a client sends.

    In each step every record of the client takes part with probability `rate`. The gradient of each record is clipped
    to the norm `clip` over all trained parameters, and the step follows

        (sum of clipped gradients + N(0, (sigma clip)^2)) / (rate size)

    plus the gradient of terms that read no private data (a proximal pull). Everything after it is post-processing:
    momentum, weight decay, Adam, SCAFFOLD's correction, averages, server steps, distillation on the server. One record
    of one client is protected, against the server and everyone else. Clients hold different records, so epsilon is the
    largest of any client. The ledger is charged for a phase's steps before the first of them draws.

    Before the first round (and before a client is charged, where its process has not done so) every phase's gradients
    are tried on public noise with the parameters that it trains; see `privacy.per_example_gradients`.

    For sigma at a given epsilon use `privacy.plan_noise(epsilon, delta, rate=rate, count=steps a round *
    rounds).sigma`.

    Deviations. The denominator is public, where the algorithm divides by the lot size: the size of the drawn lot, which
    may be empty, is private. `epochs` are passes in expectation, round(epochs / rate) steps (never fewer than one),
    whatever the client has; the method's `batch` is not used. Batches, noise, augmentation and dropout are drawn from
    `client.secret`: with public draws a record would shift the draws of the records after it.

    Args:
        sigma: noise standard deviation / clip; 0 means no noise and no guarantee.
        rate: probability with which a record takes part in a step.
        size: *public* number of records, which is assumed for every client.
        clip: largest l2 norm of one record's gradient; infinity only with sigma 0.
        chunk: largest number of records whose gradients are in memory at the same time; the default depends on device,
            image size and rate * size.
        gradients: computation of the records' gradients, "auto", "hooks" or "func"; see
            `privacy.per_example_gradients`.
    """

    key = "DPSGD"
    sigma: NonNegative
    rate: Rate
    size: PositiveInt
    clip: float = 1.0
    chunk: PositiveInt | None = None
    gradients: GradientMode = "auto"
    data_access = "none"
    private = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.sigma == 0:
            warn("DPSGD(sigma=0) adds no noise: nothing is guaranteed, and the history's epsilon is None")
        if self.sigma or not (isinstance(self.clip, float) and self.clip == math.inf):
            check.real_number(self.clip, "clip", above=0.0)

    def check(self, settings: Settings, addons: Sequence[AddOn]) -> None:
        """Refuse add-ons and options that would leak private data beside the noised gradient."""
        for addon in addons:
            if why := unsound(addon):
                raise ValueError(f"DPSGD cannot be combined with {addon.name}, which {why}; leave it out")
        if settings.weights != "uniform":
            raise ValueError("DPSGD needs weights='uniform': how many records a client has is private, got 'samples'")
        for name in settings.networks.names:
            try:
                require_per_example(settings.networks.draw(name, 2, torch.Generator()))
            except ValueError as error:
                raise type(error)(f"DPSGD: {error}") from error

    def start(self, server: AveragingServer) -> None:
        """Refuse an augmentation or objective that mixes the examples of a batch, by a trial on public noise.

        Raises:
            BatchStatistics, NotSeparable: the augmentation or the objective mixes examples.
            NotAccountable: delta is too large for `size` records.
        """
        if server.ledger is not None:
            refuse_large_delta(self.size, server.ledger.delta)
            server.ledger.assume("DPSGD")
        refuse_mixing_parts(server, server.generator(self.key))

    def dry_run(self, local: Local) -> None:
        """Try the gradients of an architecture in every phase on public noise.

        Raises:
            BatchStatistics, NotSeparable, PrivacyError: a gradient row depends on more than one record.
        """
        for phase in local.settings.phases:
            local.net.train()
            with self._collecting(local, phase):
                pass

    @contextmanager
    def _collecting(self, local: Local, phase: Phase) -> Iterator[ExampleGradients]:
        data, settings, moved = local.data, local.settings, local.trained_parameters(phase)
        refuse_half_precision(data.images, "a client's set")
        like = data.images[:0]
        chunk, sizes = choose_batch_sizes(like, self.rate * self.size, self.chunk)
        names = sorted(data.columns)

        def losses(images: torch.Tensor, labels: torch.Tensor, *columns: torch.Tensor) -> torch.Tensor:
            batch = Batch(images, labels, dict(zip(names, columns)))
            return Step.example_loss(local, batch, moved).expand(len(images))  # n times the mean: only the sum counts

        with _LOCK:
            checked = _ENGINES.setdefault(settings.networks, {})
        key = (self, local.architecture, phase, chunk, like.shape, like.type())
        with per_example_gradients(
            local.net, losses, public=public_examples(local), chunk=chunk, sizes=sizes, trained=moved,
            mode=self.gradients, engine=checked.get(key),
        ) as gradients:  # fmt: skip
            checked[key] = gradients.engine
            yield gradients

    def batches(self, local: Local, data: LabeledImages, phase: Phase) -> Iterator[Batch]:
        """Yield Poisson batches, each record with probability `rate`, after charging the ledger for the whole phase."""
        client, settings, moved = local.client, local.settings, local.trained_parameters(phase)
        steps = max(1, round(phase.epochs / self.rate)) if phase.steps is None else phase.steps
        private = PrivateGradient(
            list(moved.values()), sigma=self.sigma, clip=self.clip, denominator=self.rate * self.size,
            secret=client.secret,
        )  # fmt: skip
        with self._collecting(local, phase) as gradients:
            local.scratch(self).update(gradients=gradients, private=private)
            client.spend("dp_sgd", self.sigma, rate=self.rate, count=steps)
            local.dropout.set_state(client.secret.generator().get_state())
            draws = client.secret.generator()
            for _ in range(steps):
                batch = batch_at(data, client.secret.poisson(len(data), self.rate))
                if settings.augment is not None and len(batch.images):
                    batch = replace(batch, images=settings.augment(batch.images, draws))
                yield batch

    def gradient(self, step: Step, compute: Callable[[], Tensors]) -> Tensors:
        """Return the clipped and noised gradient of the examples, plus that of the terms that read no private data."""
        scratch, batch = step.local.scratch(self), step.batch
        private: PrivateGradient = scratch["private"]
        gradients: ExampleGradients = scratch["gradients"]
        tensors = [batch.images, batch.labels, *(batch.columns[n] for n in sorted(batch.columns))]
        for parts in zip(*(tensor.split(gradients.chunk) for tensor in tensors)):
            private.add(gradients(*parts))
        public = step.public_gradient()
        noised = dict(zip(step.trained, private.take(), strict=True))
        return {n: g + public[n] if n in public else g for n, g in noised.items()}
