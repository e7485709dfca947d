"""Classification tasks: loss, class counts, distillation and metrics for the labels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from distillkit._utils import check
from distillkit.generate import complement_targets
from distillkit.losses import binary_distillation, knowledge_distillation

__all__ = ["Classification", "LabelTask", "MultiLabel", "clients_accuracy"]


class LabelTask(Protocol):
    """Interface between a task and federated methods, so that methods do not depend on the form of the labels.

    `Classification` and `MultiLabel` implement this interface; pass them as `simulate(..., task=...)`. A task is
    immutable, and it is the same on the server and on every client. K is the task's number of classes. A network may
    have more outputs, K' >= K, if an add-on has additional classes.

    Attributes:
        single_label: whether an image has exactly one class, and labels are indices.
    """

    single_label: ClassVar[bool]

    @property
    def num_classes(self) -> int:
        """The number of classes, K."""

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the training loss: the mean loss of `logits` [N, K'] of images with these `labels`."""

    def counts(self, labels: Tensor) -> Tensor:
        """Return the number of images of each class, int64 [K], for images with these `labels`."""

    def complement(self, counts: Tensor, total: int) -> Tensor:
        """Return labels of additional images that would balance a client's classes; FedCOG generates such images.

        A client with `counts` images of each class (int64 [K]) gets at most `total` labels, and no labels if its
        classes are balanced.
        """

    def distill(self, student_logits: Tensor, teacher_logits: Tensor) -> Tensor:
        """Return the mean distillation loss between a student and a teacher on the same images, on the scale of `loss`.

        Args:
            student_logits, teacher_logits: float [N, K'].
        """

    def sums(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return a test's results as sums that add up over batches and clients.

        Args:
            logits: float [N, K'].
            labels: labels of these images, in the task's form.

        Returns:
            float64 [3 + 3K]: the count, the number of correct predictions, the summed loss, then the true positives,
            false positives and false negatives of each class (K values each).
        """

    def check_sums(self, sums: Tensor) -> None:
        """Raise ValueError if no test set could give these `sums`, float64 [3 + 3K], which come from clients."""

    def metrics(self, sums: Tensor) -> dict[str, float]:
        """Return the test metrics computed from these `sums`, by name, including `accuracy` and `loss`."""


def _counts(sums: Tensor) -> tuple[float, float, float, float, float]:
    """Return a test's count, correct predictions, and tp, fp and fn summed over classes; refuse impossible values."""
    counts = torch.cat([sums[:2], sums[3:]])
    if bool((counts < 0).any() | (counts != counts.floor()).any() | (counts > 2**53).any()) or float(sums[2]) < 0:
        raise ValueError("counts must be whole numbers of at least 0, and the loss at least 0")
    count, correct = (float(v) for v in sums[:2])
    if not count > 0 or correct > count:
        raise ValueError(f"{correct:g} of {count:g} cannot be right")
    tp, fp, fn = (float(v) for v in sums[3:].view(3, -1).sum(1))
    return count, correct, tp, fp, fn


@dataclass(frozen=True)
class Classification:
    """Task with one class per image: cross-entropy; accuracy is the share of images whose class has the largest logit.

    A network may have more than K outputs (virtual classes). An image predicted as a virtual class counts as wrong.

    Args:
        num_classes: K; labels are indices in [0, K), int64 [N].

    Raises:
        TypeError, ValueError: `num_classes` is not a positive integer.
    """

    single_label: ClassVar[bool] = True
    num_classes: int

    def __post_init__(self) -> None:
        check.positive_int(self.num_classes, "num_classes")

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the mean cross-entropy of `logits` [N, K'] at `labels`, indices [N] or probabilities [N, K']."""
        return F.cross_entropy(logits, labels)

    def counts(self, labels: Tensor) -> Tensor:
        """Return the number of images of each class, int64 [K], for images with these `labels` (indices, int64 [N])."""
        return torch.bincount(labels, minlength=self.num_classes)

    def complement(self, counts: Tensor, total: int) -> Tensor:
        """Return the classes of at most `total` new images that even out `counts` (`generate.complement_targets`).

        The number of images of a class is proportional to the difference between its count and that of the largest
        class.
        """
        return complement_targets(counts, total=total)

    def distill(self, student_logits: Tensor, teacher_logits: Tensor) -> Tensor:
        """Return KL(teacher || student) of the softmax over all outputs, averaged over the images.

        Args:
            student_logits, teacher_logits: float [N, K'].
        """
        return knowledge_distillation(student_logits, teacher_logits)

    def sums(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the test sums of `logits` [N, K'] for images with these `labels` [N]: float64 [3 + 3K].

        The sums are: images, correct images, summed cross-entropy, then true positives, false positives and false
        negatives by class. The prediction of an image is the class of its largest logit.
        """
        predicted, k = logits.argmax(1), self.num_classes
        right = predicted == labels
        tp = torch.bincount(labels[right], minlength=k)
        fp = torch.bincount(predicted[~right & (predicted < k)], minlength=k)
        fn = torch.bincount(labels[~right], minlength=k)
        loss = F.cross_entropy(logits.double(), labels, reduction="sum").cpu()
        head = torch.stack([torch.tensor(float(len(labels)), dtype=torch.float64), right.sum().double().cpu(), loss])
        return torch.cat([head, torch.cat([tp, fp, fn]).double().cpu()])

    def check_sums(self, sums: Tensor) -> None:
        """Check that `sums` count each image as either a true positive or a false negative of its class."""
        count, correct, tp, fp, fn = _counts(sums)
        if tp != correct or fn != count - correct or fp > fn:
            raise ValueError(f"of {count:g} images {correct:g} are right, but tp, fp, fn sum to {tp:g}, {fp:g}, {fn:g}")

    def metrics(self, sums: Tensor) -> dict[str, float]:
        """Return `accuracy` (a fraction) and `loss` (mean cross-entropy) of `sums`."""
        return {"accuracy": float(sums[1] / sums[0]), "loss": float(sums[2] / sums[0])}


@dataclass(frozen=True)
class MultiLabel:
    """Task with any number of classes per image, with labels as rows of 0 and 1, and binary cross-entropy as loss.

    A class is predicted if its logit is above 0.

    `accuracy` is the share of correct decisions among all pairs of image and class. Precision, recall and F1 are
    averaged over classes (`c_`) and computed overall (`o_`), as the FLAIR benchmark reports them; 0/0 counts as 0.

    Args:
        num_classes: K; labels are rows [N, K].

    Raises:
        TypeError, ValueError: `num_classes` is not a positive integer.
    """

    single_label: ClassVar[bool] = False
    num_classes: int

    def __post_init__(self) -> None:
        check.positive_int(self.num_classes, "num_classes")

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the binary cross-entropy of `logits` [N, K'] at `labels` [N, K], averaged over images and classes."""
        return F.binary_cross_entropy_with_logits(logits[:, : self.num_classes], labels.to(logits.dtype))

    def counts(self, labels: Tensor) -> Tensor:
        """Return the number of images that have each class, int64 [K], for images with these `labels` [N, K]."""
        return (labels > 0.5).sum(0)

    def complement(self, counts: Tensor, total: int) -> Tensor:
        """Return label rows of at most `total` new images that even out `counts`. Each row has one class.

        The number of images of a class is proportional to the difference between its count and that of the most
        frequent class.
        """
        return F.one_hot(complement_targets(counts, total=total), self.num_classes).float()

    def distill(self, student_logits: Tensor, teacher_logits: Tensor) -> Tensor:
        """Return the binary KL divergence of `student_logits` from `teacher_logits` for each class.

        The divergence is averaged over images and classes, as `loss` is. Outputs beyond the K classes are ignored.
        """
        k = self.num_classes
        return binary_distillation(student_logits[:, :k], teacher_logits[:, :k]) / k

    def sums(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the test sums of `logits` [N, K'] for images with these `labels` [N, K]: float64 [3 + 3K].

        The sums are: decisions (images x classes), correct decisions, summed loss, then true positives, false positives
        and false negatives by class.
        """
        logits, truth = logits[:, : self.num_classes], labels > 0.5
        says = logits > 0
        loss = F.binary_cross_entropy_with_logits(logits.double(), labels.double(), reduction="sum").cpu()
        head = torch.tensor([float(labels.numel()), float((says == truth).sum()), float(loss)], dtype=torch.float64)
        cells = [(says & truth).sum(0), (says & ~truth).sum(0), (~says & truth).sum(0)]
        return torch.cat([head, torch.cat(cells).double().cpu()])

    def check_sums(self, sums: Tensor) -> None:
        """Check that `sums` count each wrong decision as either a false positive or a false negative of its class."""
        count, correct, tp, fp, fn = _counts(sums)
        if fp + fn != count - correct or tp > correct:
            raise ValueError(
                f"of {count:g} answers {correct:g} are right, but tp, fp, fn sum to {tp:g}, {fp:g}, {fn:g}"
            )

    def metrics(self, sums: Tensor) -> dict[str, float]:
        """Return accuracy, loss, c_precision, c_recall, c_f1, o_precision, o_recall and o_f1 of `sums`."""
        tp, fp, fn = sums[3:].view(3, -1)

        def ratio(a: Tensor, b: Tensor) -> Tensor:
            return torch.where(b > 0, a / b.clamp_min(1e-12), torch.zeros_like(a))

        found = {"accuracy": float(sums[1] / sums[0]), "loss": float(sums[2] / sums[0])}
        for name, (p, r) in {
            "c": (ratio(tp, tp + fp).mean(), ratio(tp, tp + fn).mean()),
            "o": (ratio(tp.sum(), (tp + fp).sum()), ratio(tp.sum(), (tp + fn).sum())),
        }.items():
            found |= {
                f"{name}_precision": float(p),
                f"{name}_recall": float(r),
                f"{name}_f1": float(ratio(2 * p * r, p + r)),
            }
        return found


def clients_accuracy(accuracies: Sequence[float]) -> dict[str, float]:
    """Return statistics of the clients' accuracies, which show how evenly a model serves them (`accuracy_clients`).

    Args:
        accuracies: accuracy of each tested client, a fraction; at least one.

    Returns:
        `mean`, `std` (population), `worst10` (the mean of the worst tenth of the clients, at least one client), and the
        number of `clients`.
    """
    values = torch.tensor(sorted(accuracies), dtype=torch.float64)
    worst = max(1, len(values) // 10)
    return {
        "mean": float(values.mean()),
        "std": float(values.std(correction=0)),
        "worst10": float(values[:worst].mean()),
        "clients": len(values),
    }
