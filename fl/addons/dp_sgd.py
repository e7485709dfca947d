"""DP-SGD on the clients: Poisson batches, clipped per-example gradients and noise, charged to a ledger."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

import torch

from distillkit import check
from distillkit.chunks import chunk_size
from distillkit.privacy import PrivateGradient, per_example_gradients, require_per_example
from distillkit.privacy.guards import refuse_large_delta
from distillkit.sets import LabeledImages
from fl.addon import AddOn, Batch
from fl.local import rows
from fl.message import Tensors
from fl.method import Server
from fl.per_example import require_examples_apart, unsound

if TYPE_CHECKING:
    from fl.core import Core
    from fl.local import Local, Phase, Step

__all__ = ["DPSGD"]


@dataclass(frozen=True, kw_only=True)
class DPSGD(AddOn):
    """DP-SGD (Abadi et al., "Deep learning with differential privacy", CCS 2016, Algorithm 1) as the clients' training.

    In a step every record of the client takes part with probability `rate`, each one's gradient is clipped to the norm
    `clip` over all parameters in training, and the step follows

        (sum of clipped gradients + N(0, (sigma clip)^2)) / (rate size)

    plus the gradient of terms that read no private data (a proximal pull). All that follows is post-processing:
    momentum, weight decay, Adam, SCAFFOLD's correction, averages, server steps, distillation on the server. One record
    of one client is protected, against the server and everybody else. Clients own different records, so epsilon is the
    largest of any client. The ledger is charged for a phase's steps before the first of them draws.

    sigma for a wanted epsilon: `privacy.plan(epsilon, delta, rate=rate, count=steps a round * rounds).sigma`.

    Deviations. The denominator is public, where the algorithm divides by the lot size: the size of the lot that was
    drawn, empty at times, is private. `epochs` are passes in expectation, round(epochs / rate) steps (never fewer than
    one), whatever the client has; the method's `batch` is not used. Batches, noise, augmentation and dropout are
    drawn from `client.secret`: were these draws public, a record would shift the draws of those after it.

    Args:
        sigma: noise standard deviation / clip; 0 means no noise and no guarantee.
        rate: probability with which a record takes part in a step.
        size: a *public* number of records that a client is taken to have, the same for all.
        clip: l2 norm of one record's gradient; infinity only with sigma 0.
        chunk: records whose gradients are held at once; default by device and image size.
    """

    sigma: float
    rate: float
    size: int
    clip: float = 1.0
    chunk: int | None = None
    reads: Literal["nothing", "example", "batch"] = "nothing"
    private = True

    def __post_init__(self) -> None:
        check.real_number(self.sigma, "sigma", least=0.0)
        check.real_number(self.rate, "rate", above=0.0, most=1.0)
        check.positive_int(self.size, "size")
        if self.clip != float("inf") or self.sigma:
            check.real_number(self.clip, "clip", above=0.0)
        if self.chunk is not None:
            check.positive_int(self.chunk, "chunk")

    def check(self, method: Core) -> None:
        """Refuse whatever would let private data out beside the noised gradient."""
        for addon in method.addons:
            if why := unsound(addon):
                raise ValueError(f"DPSGD cannot be combined with {addon.name}, which {why}")
        if method.weights != "uniform":
            raise ValueError("DPSGD needs weights='uniform': how many records a client has is private")
        for name in method.networks:
            try:
                require_per_example(method.templates.draw(name, 2, torch.Generator()))
            except ValueError as error:
                raise type(error)(f"DPSGD: {error}") from error

    def start(self, server: Server) -> None:
        """Try network, augmentation and objective on public noise: none may mix the examples of a batch.

        Raises:
            BatchStatistics, NotSeparable, NotAccountable: one does; or delta is too large for `size` records.
        """
        core: Core = server.method
        if server.ledger is not None:
            refuse_large_delta(self.size, server.ledger.delta)
            server.ledger.assume("DPSGD")
        require_examples_apart(core, server, server.generator(self.name))

    def batches(self, local: Local, data: LabeledImages, phase: Phase) -> Iterator[Batch]:
        """Poisson batches, after they are paid for."""
        client, method, moved = local.client, local.method, local.moved(phase)
        steps = max(1, round(phase.epochs / self.rate)) if phase.steps is None else phase.steps
        private = PrivateGradient(
            list(moved.values()), sigma=self.sigma, clip=self.clip, denominator=self.rate * self.size,
            secret=client.secret,
        )  # fmt: skip
        client.spend("dp_sgd", self.sigma, rate=self.rate, count=steps)
        local.dropout.set_state(client.secret.generator().get_state())
        draws = client.secret.generator()
        asking = [n for n, p in local.net.named_parameters() if p.requires_grad]
        places = [asking.index(n) for n in moved]
        with per_example_gradients(local.net) as gradients:
            local.of(self).update(gradients=gradients, private=private, places=places)
            for _ in range(steps):
                batch = rows(data, client.secret.poisson(len(data), self.rate), client.device)
                if method.augment is not None and len(batch.images):
                    batch = replace(batch, images=method.augment(batch.images, draws))
                yield batch

    def gradient(self, step: Step, compute: Callable[[], Tensors]) -> Tensors:
        """The noised gradient of the examples, plus that of what is public."""
        scratch, images = step.local.of(self), step.batch.images
        private: PrivateGradient = scratch["private"]
        for part in torch.arange(len(images), device=images.device).split(chunk_size(images, self.chunk)):
            if len(part):
                losses = step.example_loss(part).expand(len(part))  # the mean, n times: only their sum counts
                grads = scratch["gradients"](losses)
                private.add([grads[i] for i in scratch["places"]])
        public = step.public_gradient()
        noised = dict(zip(step.moved, private.take(), strict=True))
        return {n: g + public[n] if n in public else g for n, g in noised.items()}
