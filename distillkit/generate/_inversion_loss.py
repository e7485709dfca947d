"""Loss that network inversion (`invert`) minimizes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from distillkit import losses
from distillkit._utils import check
from distillkit._utils.batches import uses_batch_statistics
from distillkit._utils.options import NonNegative, check_options
from distillkit.networks._factory import frozen_copy

Divergence = Literal["clamped", "jensen_shannon"]
_DIVERGENCES: dict[Divergence, Callable[..., Tensor]] = {
    "clamped": losses.clamped_disagreement,
    "jensen_shannon": losses.jensen_shannon,
}


@dataclass
class InversionLoss:
    """Weighted sum of the loss terms of `invert`, computed for each image.

    Args:
        teacher: the network that should predict the targets, as a frozen copy (see `frozen_eval_copy`).
        student: network whose predictions should differ from the teacher's, or None.
        cross_entropy, total_variation, image_l2, batch_norm, disagreement: weights of the terms, at least 0. A weight
            of 0 omits the term.
        divergence: measure of the disagreement of teacher and student, "clamped" or "jensen_shannon"; see `invert`.
        prior: `BatchNormPrior` of the teacher, required if `batch_norm` is above 0. The loss must be computed inside
            the prior's `with` block.

    Raises:
        TypeError, ValueError: a weight is negative, or the divergence is unknown.
    """

    teacher: nn.Module
    student: nn.Module | None
    cross_entropy: NonNegative
    total_variation: NonNegative
    image_l2: NonNegative
    batch_norm: NonNegative
    disagreement: NonNegative
    divergence: Divergence
    prior: losses.BatchNormPrior | None = None

    def __post_init__(self) -> None:
        check_options(self)
        check.one_of(self.divergence, "divergence", tuple(_DIVERGENCES))

    def __call__(self, images: Tensor, targets: Tensor) -> Tensor:
        """Return one loss per image, [B]. The BatchNorm term is computed over the whole batch and added to each loss.

        Args:
            images: images in the normalized space, float [B, C, H, W].
            targets: class indices [B], or rows [B, K] in [0, 1] for a multi-label task.
        """
        logits = self.teacher(images)
        total = self.cross_entropy * _cross_entropy(logits, targets)
        if self.student is not None and self.disagreement:
            divergence = self._divergence(self.student(images), logits, binary=targets.ndim == 2)
            total = total + self.disagreement * (1 - divergence)
        if self.total_variation:
            total = total + self.total_variation * losses.total_variation(images, reduction="none")
        if self.image_l2:
            total = total + self.image_l2 * losses.image_l2(images, reduction="none")
        if self.prior is not None:
            total = total + self.batch_norm * self.prior.value()
        return total

    def _divergence(self, student: Tensor, teacher: Tensor, *, binary: bool) -> Tensor:
        measure = _DIVERGENCES[self.divergence]
        if binary:
            return measure(_binary_logits(student), _binary_logits(teacher), reduction="none").view_as(teacher).mean(1)
        return measure(student, teacher, reduction="none")

    @property
    def depends_on_batch(self) -> bool:
        """True if an image's loss depends on the other images of its batch."""
        return self.batch_norm > 0 or uses_batch_statistics(self.teacher) or uses_batch_statistics(self.student)

    @torch.no_grad()
    def count_logits(self, images: Tensor) -> int:
        """Return the number of logits K that the networks compute for two images [2, C, H, W].

        Raises:
            ValueError: a network does not accept the images, changes them in place or does not return logits [2, K],
                or student and teacher differ in K.
        """
        widths = []
        for name, network in (("teacher", self.teacher), ("student", self.student)):
            if network is not None:
                before = images.clone()
                try:
                    logits = network(images)
                except (RuntimeError, ValueError) as error:
                    raise ValueError(
                        f"{name} cannot take images of shape={tuple(images.shape[1:])}: {error}"
                    ) from error
                if not isinstance(logits, Tensor) or logits.ndim != 2 or len(logits) != len(images):
                    came = list(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
                    raise ValueError(f"{name} must give logits [B, K], got {came} for two images")
                if not torch.equal(images, before):
                    raise ValueError(f"{name} must not change its images in place; use operations without a trailing _")
                widths.append(logits.shape[1])
        if len(set(widths)) > 1:
            raise ValueError(f"student must have the teacher's {widths[0]} classes, got {widths[1]}")
        return widths[0]


def frozen_eval_copy(network: nn.Module, name: str) -> nn.Module:
    """Return a copy of a network in eval mode with frozen parameters. The network itself is not changed.

    Args:
        network: the network to copy.
        name: name of the argument, used in the error message.

    Raises:
        TypeError: `network` is not an `nn.Module`.
    """
    return frozen_copy(check.instance(network, nn.Module, name, "an nn.Module")).eval()


def _cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    if targets.ndim == 1:
        return F.cross_entropy(logits, targets, reduction="none")
    return F.binary_cross_entropy_with_logits(logits, targets, reduction="none").mean(1)


def _binary_logits(logits: Tensor) -> Tensor:
    """Convert logits [B, K] of K independent labels to two-class logits [B * K, 2] with the same probabilities."""
    return torch.stack([logits, torch.zeros_like(logits)], -1).flatten(0, 1)
