"""FedCOG: clients use the global model to generate images of classes that they lack."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from distillkit._utils.options import LearningRate, NonNegative, NonNegativeInt, PositiveInt
from distillkit.generate import LatentDecoder, invert
from distillkit.generate._inversion_loss import Divergence
from distillkit.networks import build
from distillkit.rng import derive
from distillkit.sets import LabeledImages
from fl.averaging import AddOn, AveragingServer, Local, Settings, Step
from fl.averaging.addon import slot_owner
from fl.batches import Batch
from fl.task import LabelTask


@dataclass(frozen=True)
class FedCOG(AddOn):
    """FedCOG (Ye et al., "Fake it till make it: federated learning with consensus-oriented generation", ICLR 2024).

    Clients use the global model to generate images of the classes of which they have few, and learn the global model's
    predictions on these images.

    From round `start_round` on, a client first generates up to `images` images to balance its classes. With n_c images
    of class c in its data, it generates images of this class in proportion to max n - n_c, where max n is the largest
    n_c (appendix A.1.1). The pixels are optimized so that the global model assigns the images to these classes, but the
    client's last model (the one that it trained most recently) does not (Eqs. 1-2). Then the client minimizes

        N_real / (N_real + N_syn) * (objective on its own images) + N_syn / (N_real + N_syn) * KL(global || local)

    where the KL divergence is between the two models' predictions on the generated images, N_real is the number of the
    client's images, and N_syn = sum_c (max n - n_c) (appendix A.2.2). The global model's logits are computed once, when
    the images are generated. If `weight` is given, the client minimizes the objective + weight * KL instead (Eq. 3).
    The messages are those of FedAvg.

    The paper does not specify two cases. A client whose classes are balanced generates no images and trains as without
    FedCOG; the authors' code divides 0 by 0 in this case. A client that takes part for the first time has no last
    model, so the disagreement of the two models is not part of the loss on the pixels; the authors' code uses a random
    network. The column "noted" of the history counts both cases, as "FedCOG.balanced" and "FedCOG.first". In a
    multi-label task, each generated image has one class as its target, and KL is the mean of one binary KL divergence
    per class.

    The variants of Table 5 are options: `steps=0` (row 1, Gaussian noise), `disagreement=0.0` (row 2) and
    `labels="hard"` (row 3: cross-entropy with the global model's predicted class, `hard_label` in the code).
    `targets="uniform"` is the basic strategy of section 4.1, which generates equally many images of all classes. In the
    authors' code, this basic strategy is called `gen_complement`, and generates two images of each class. `decoder`
    generates the images with a network (appendix A.4). With `regenerate` (`double_gen` in the authors' code), the
    client generates images again after half of the local steps. The current local model then takes the place of the
    client's last model.

    Deviations. The default of `steps` is the paper's 100; the authors' code uses 500. Each generated image is the one
    with the lowest loss among all steps of the optimization, and the client learns the global model's logits for this
    image. The authors' code takes the images of the last step, but the logits for the images of an earlier step. See
    `distillkit.generate.invert` for the formula of the disagreement.

    Args:
        start_round: first round in which clients generate images; the paper trains without them for 50 rounds.
        images: largest number of images that a client generates in a round; rounding may reduce it.
        steps, lr: number of steps and learning rate of Adam on the pixels.
        disagreement: weight, at least 0, of 1 - JS in the loss on the pixels. JS is the Jensen-Shannon divergence
            between the predictions of the global model and of the client's last model.
        divergence: formula of JS, "clamped" (the authors' code) or "jensen_shannon".
        weight: lambda_kd, the weight of the distillation; 0 disables the add-on. None: the real and the generated
            images are weighted by N_real and N_syn, as in the formula above.
        batch: number of generated images per step of the local training; default: the method's `batch`.
        labels: target of the distillation: the global model's logits ("soft"), or its predicted class ("hard").
        targets: classes of the generated images: those that balance the client's classes ("complement"), or equally
            many images of all classes ("uniform").
        decoder: function `decoder((C, H, W), latent)` that returns a generator network, such as
            `distillkit.generate.SmallDecoder`. Adam then optimizes this network, with betas .5 and .999, as in the
            authors' code. None: the pixels themselves are optimized.
        latent: length of the decoder's latent vectors.
        regenerate: whether to generate a second time, after half of the local steps.
    """

    disabled_at_zero = ("weight",)
    start_round: PositiveInt = 51
    images: PositiveInt = 256
    steps: NonNegativeInt = 100
    lr: LearningRate = 0.01
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
            raise TypeError(f"decoder must be a function of a shape and a length, got {type(self.decoder).__name__}")
        if self.latent != 256 and self.decoder is None:
            raise ValueError(f"latent={self.latent} belongs to a decoder, but there is none: give one, or leave it out")

    @property
    def first_round(self) -> int:  # type: ignore[override]
        """First round in which clients generate images: the option `start_round`."""
        return self.start_round

    def check(self, settings: Settings, addons: Sequence[AddOn]) -> None:
        """Refuse the option `regenerate` if another add-on makes the batches.

        With `regenerate`, a client generates images again after half of its steps. If another add-on makes the batches,
        the number of steps is unknown.
        """
        slot = slot_owner(addons, "batches")
        if self.regenerate and slot is not None:
            raise ValueError(
                f"FedCOG(regenerate=True) needs the number of steps, but {slot.name} makes the batches; give "
                "regenerate=False"
            )

    def start(self, server: AveragingServer) -> None:
        """Refuse a decoder that makes no network, and `targets="uniform"` with fewer `images` than classes.

        `images` is the largest number of images that a client generates in a round, and "uniform" means equally many of
        each class.
        """
        if self.decoder is not None:
            try:
                build(partial(self.decoder, server.shape, self.latent), derive(0, "trial decoder"))
            except Exception as error:
                raise ValueError(
                    f"FedCOG: decoder must make a network from the shape {server.shape} and the length {self.latent}: "
                    f"{error}"
                ) from error
        if self.targets == "uniform" and self.images < server.task.num_classes:
            raise ValueError(f"targets='uniform' needs images >= {server.task.num_classes} classes, got {self.images}")

    def extra_batches(self, local: Local) -> Iterator[Batch] | None:
        """Generate images that balance the client's classes (section 4.1), and return an iterator over their batches.

        The result is None before `start_round` and for a client that generates no images.
        """
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
            decoder = LatentDecoder(partial(self.decoder, shape, self.latent), self.latent)
            options = {"parametrize": decoder, "betas": (0.5, 0.999)}
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
        """Return the weighted distillation loss on a batch of generated images (section 4.2 of the paper).

        The targets are the global model's logits for these images, which are stored with the images. If the option
        `labels` is "hard", the targets are the classes that these logits predict.
        """
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
