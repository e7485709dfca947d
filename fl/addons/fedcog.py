"""FedCOG: clients use the global model to generate images of classes that they lack."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from distillkit._utils.options import NonNegative, NonNegativeInt, Positive, PositiveInt
from distillkit.generate import invert
from distillkit.generate._inversion_loss import Divergence
from distillkit.sets import LabeledImages
from fl.averaging import AddOn, AveragingServer, Local, Settings, Step
from fl.averaging.addon import slot_owner
from fl.batches import Batch
from fl.task import LabelTask

__all__ = ["FedCOG"]


@dataclass(frozen=True)
class FedCOG(AddOn):
    """FedCOG (Ye et al., "Fake it till make it: federated learning with consensus-oriented generation", ICLR 2024).

    Clients use the global model to generate images of the classes that they lack, and learn the global model's
    predictions on these images.

    From round `start_round` on, a client first generates up to `images` images of the classes that its data lack. With
    n_c images of class c in its data, it generates max n - n_c images of this class, where max n is the largest n_c
    (appendix A.1.1). The images are optimized until the global model assigns them to these classes, while the client's
    own last model does not (Eqs. 1-2). Then the client trains on

        N_real / (N_real + N_syn) * (the objective) + N_syn / (N_real + N_syn) * KL(global || local) on these images

    with N_syn = sum_c (max n - n_c) (appendix A.2.2). The global model's logits are stored with the images when they
    are generated. If `weight` is given, the client minimizes the objective + weight * KL instead (Eq. 3). The messages
    are those of FedAvg.

    The paper does not specify two cases. A client whose classes are balanced generates no images and trains as without
    FedCOG. It is counted as "FedCOG.balanced" among the round's "noted"; the authors' code divides 0 by 0 in this case.
    A client that takes part for the first time has no last model, so the disagreement is left out. It is counted as
    "FedCOG.first"; the authors' code uses a random network. In a multi-label task each generated image has one lacking
    class as its target, and the distillation is binary for each class.

    The variants of Table 5 are options: `steps=0` (row 1, Gaussian noise), `disagreement=0.0` (row 2) and
    `labels="hard"` (row 3: cross-entropy with the global model's predicted class, `hard_label` in the code).
    `targets="uniform"` is the basic strategy of section 4.1, which generates equally many images of all classes
    (`gen_complement` in the code, with two images of each class). `decoder` generates the images with a network
    (appendix A.4). `regenerate` is `double_gen` in the authors' code: the client generates again after half of the
    local steps, against the model in training.

    Deviations. `steps` is the paper's 100 (500 in the authors' code). The images are the best iterates with their own
    logits (the authors' code pairs the last images with the logits of other iterates). See `invert` for the formula of
    the disagreement.

    Args:
        start_round: first round with generation; the paper trains 50 rounds without generation.
        images: largest number of images that a client generates in a round; rounding may reduce it.
        steps, lr: options of Adam on the pixels.
        disagreement: weight of 1 - JS(global, last local), at least 0.
        divergence: formula of JS: "clamped" as in the authors' code, or "jensen_shannon".
        weight: lambda_kd, the weight of the distillation; 0 disables the add-on. None: the weights N_real and N_syn
            above.
        batch: number of generated images per step; default: the method's `batch`.
        labels: target of the distillation: the global model's logits ("soft"), or its predicted class ("hard").
        targets: classes to generate: those that a client lacks ("complement"), or equally many of all classes
            ("uniform").
        decoder: function `decoder((C, H, W), latent)` that returns the generator, such as `generate.SmallDecoder`; with
            a decoder, Adam's betas are .5 and .999, as in the authors' code. With None, the pixels themselves are
            optimized.
        latent: length of the decoder's latent vectors.
        regenerate: whether to generate a second time, after half of the local steps.
    """

    key = "FedCOG"
    disabled_at_zero = ("weight",)
    start_round: PositiveInt = 51
    images: PositiveInt = 256
    steps: NonNegativeInt = 100
    lr: Positive = 0.01
    disagreement: NonNegative = 0.1
    divergence: Divergence = "clamped"
    weight: NonNegative | None = None
    batch: PositiveInt | None = None
    labels: Literal["soft", "hard"] = "soft"
    targets: Literal["complement", "uniform"] = "complement"
    decoder: Callable[[tuple[int, int, int], int], nn.Module] | None = None
    latent: PositiveInt = 256
    regenerate: bool = False
    needs_previous = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.decoder is not None and not callable(self.decoder):
            raise TypeError(f"decoder must be called with a shape and a length, got {type(self.decoder).__name__}")
        if self.latent != 256 and self.decoder is None:
            raise ValueError(f"latent={self.latent} belongs to a decoder, but there is none: give one, or leave it out")

    @property
    def first_round(self) -> int:  # type: ignore[override]
        """The first round with generation: `start_round`."""
        return self.start_round

    def check(self, settings: Settings, addons: Sequence[AddOn]) -> None:
        """Refuse `regenerate` if another add-on makes the batches, because the number of steps must be known."""
        slot = slot_owner(addons, "batches")
        if self.regenerate and slot is not None:
            raise ValueError(
                f"FedCOG(regenerate=True) cannot tell half of the steps: {slot.name} makes the batches; give "
                "regenerate=False"
            )

    def start(self, server: AveragingServer) -> None:
        """Refuse uniform targets with fewer images than classes."""
        if self.targets == "uniform" and self.images < server.task.num_classes:
            raise ValueError(f"targets='uniform' needs images >= {server.task.num_classes} classes, got {self.images}")

    def extra_batches(self, local: Local) -> Iterator[Batch] | None:
        """Generate images of the lacking classes (section 4.1), and return their batches; None before `start_round`."""
        if local.round < self.start_round:
            return None
        counts = local.task.counts(local.data.labels)
        full = len(counts) * float(counts.max())
        share = float(counts.sum()) / full if full else 1.0
        targets = self._targets(local.task, counts)
        if not len(targets) or (share == 1 and self.weight is None):
            local.client.notes["FedCOG.balanced"] = 1
            return None
        if local.previous is None:
            local.client.notes["FedCOG.first"] = 1
        local.scratch(self)["weight"] = 1 - share if self.weight is None else self.weight
        local.weight *= share if self.weight is None else 1.0
        student = None if local.previous is None else local.at(local.previous)
        return self._batches(local, targets, self._generated(local, targets, student, "generate"))

    def _targets(self, task: LabelTask, counts: Tensor) -> Tensor:
        if self.targets == "complement":
            return task.complement(counts, self.images)
        labels = torch.arange(task.num_classes).repeat_interleave(self.images // task.num_classes)
        return labels if task.single_label else F.one_hot(labels, task.num_classes).float()

    def _generated(self, local: Local, targets: Tensor, student: nn.Module | None, purpose: str) -> LabeledImages:
        shape, options = local.data.shape, dict[str, Any]()
        if self.decoder is not None:
            decoder = partial(self.decoder, shape, self.latent)
            options = {"decoder": decoder, "latent": self.latent, "betas": (0.5, 0.999)}
        return invert(
            local.at(local.start), targets, shape=shape, student=student, steps=self.steps, lr=self.lr,
            disagreement=self.disagreement, divergence=self.divergence, normalization=local.data.normalization,
            generator=local.generator(self, purpose), progress=False, **options,
        )  # fmt: skip

    def _batches(self, local: Local, targets: Tensor, generated: LabeledImages) -> Iterator[Batch]:
        stream = local.stream(self, generated, batch=self.batch)
        half = local.planned_steps // 2 if self.regenerate else None
        while True:
            if local.steps == half:
                again = self._generated(local, targets, local.at(local.state()), "generate again")
                stream = local.stream(self, again, batch=self.batch)
            yield next(stream)

    def loss(self, step: Step) -> Tensor | None:
        """Return the weighted distillation from the stored logits (section 4.2), or from hard labels."""
        if not step.has_batch(self):
            return None
        task, targets, logits = step.local.task, step.batch_of(self).columns["logits"], step.output(self).logits
        if self.labels == "soft":
            distance = task.distill(logits, targets)
        else:
            distance = task.loss(
                logits, targets.argmax(1) if task.single_label else (targets > 0)[:, : task.num_classes]
            )
        return step.local.scratch(self)["weight"] * distance
