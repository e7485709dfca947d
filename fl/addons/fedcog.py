"""FedCOG: clients generate, from the global model, the images that their own data lack."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from distillkit import check
from distillkit.generate import invert
from distillkit.generate.objective import Divergence
from fl.addon import AddOn, Batch

if TYPE_CHECKING:
    from fl.local import Local, Step

__all__ = ["FedCOG"]


@dataclass(frozen=True)
class FedCOG(AddOn):
    """FedCOG (Ye et al., "Fake it till make it: federated learning with consensus-oriented generation", ICLR 2024).

    From round `start_round` on, a client first generates up to `images` images that the global model classifies as
    what its own classes lack, max_c n_c - n_c (appendix A.1.1), and that its own last model does not (Eqs. 1-2). Then
    it trains on

        N_real / (N_real + N_syn) * (the objective) + N_syn / (N_real + N_syn) * KL(global || local) on these images

    with N_syn = sum_c (max n - n_c) (appendix A.2.2), the global model's logits being those of the generation; or, with
    `weight`, on the objective + weight * KL (Eq. 3). Nothing else is sent than without it.

    What the paper leaves open: a client whose classes are balanced generates nothing and trains as without FedCOG
    (counted as "FedCOG.balanced" among the round's "noted"; the release divides 0 by 0); a client that takes part for
    the first time has no last model to disagree with, so that term is left out (counted as "FedCOG.first"; the release
    takes a random network). In a multi-label task each generated image is asked to show one lacking class, and the
    distillation is that of each class's yes-or-no answer.

    Deviations. `steps` is the paper's 100 (the release has 500). The images are the best iterates with their own
    logits (the release pairs the last images with logits of others). See `invert` for the disagreement.

    Args:
        start_round: the first round with generation; the paper trains 50 rounds without it.
        images: at most so many (fewer by rounding).
        steps, lr: Adam on the pixels.
        disagreement: weight of 1 - JS(global, last local).
        divergence: "clamped" as released, or "jensen_shannon".
        weight: lambda_kd, or None for the weights by counts. With 0 FedCOG is not installed.
        batch: generated images a step; default: the method's `batch`.
    """

    start_round: int = 51
    images: int = 256
    steps: int = 100
    lr: float = 0.01
    disagreement: float = 0.1
    divergence: Divergence = "clamped"
    weight: float | None = None
    batch: int | None = None
    previous = True

    def __post_init__(self) -> None:
        for name in ("start_round", "images"):
            check.positive_int(getattr(self, name), name)
        check.positive_int(self.steps, "steps", least=0)
        check.real_number(self.lr, "lr", above=0.0)
        check.real_number(self.disagreement, "disagreement", least=0.0)
        check.one_of(self.divergence, "divergence", ("clamped", "jensen_shannon"))
        if self.weight is not None:
            check.real_number(self.weight, "weight", least=0.0)
        if self.batch is not None:
            check.positive_int(self.batch, "batch")

    @property
    def off(self) -> bool:
        """No distillation."""
        return self.weight == 0

    def data(self, local: Local) -> Iterator[Batch] | None:
        """Generate what the set that is trained on lacks (section 4.1)."""
        if local.round < self.start_round:
            return None
        counts = local.task.counts(local.data.labels).cpu()
        targets = local.task.complement(counts, self.images)
        if not len(targets):
            local.client.notes["FedCOG.balanced"] = 1
            return None
        if local.previous is None:
            local.client.notes["FedCOG.first"] = 1
        generated = invert(
            local.at(local.start),
            targets,
            shape=local.data.shape,
            student=None if local.previous is None else local.at(local.previous),
            steps=self.steps,
            lr=self.lr,
            disagreement=self.disagreement,
            divergence=self.divergence,
            normalization=local.data.normalization,
            generator=local.generator(self, "generate"),
        )
        share = float(counts.sum()) / (len(counts) * float(counts.max()))
        local.of(self)["weight"] = 1 - share if self.weight is None else self.weight
        local.weight *= share if self.weight is None else 1.0
        return local.stream(self, generated, batch=self.batch)

    def loss(self, step: Step) -> Tensor | None:
        """Distillation from the stored logits (section 4.2)."""
        if self.name not in step.own:
            return None
        logits = step.of(self).columns["logits"]
        return step.local.of(self)["weight"] * step.local.task.distill(step.out(self).logits, logits)
