"""What the labels mean: the loss, the class counts, distillation, and the metrics of a classification task."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from distillkit import check
from distillkit.generate import complement_targets
from distillkit.losses import binary_distillation, knowledge_distillation

__all__ = ["Classification", "MultiLabel", "Task", "clients_accuracy"]


class Task(Protocol):
    """What a federated method asks of a task; frozen, and the same object on the server and on every client.

    Attributes:
        single_label: an image has exactly one class, and labels are indices.
    """

    single_label: ClassVar[bool]

    @property
    def num_classes(self) -> int:
        """K."""
        ...

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        """The mean training loss of logits [N, K'] with K' >= K."""
        ...

    def counts(self, labels: Tensor) -> Tensor:
        """How many images of each class, int64 [K]."""
        ...

    def complement(self, counts: Tensor, total: int) -> Tensor:
        """Labels of at most `total` images that a set with such `counts` lacks; none if it is balanced."""
        ...

    def distill(self, student_logits: Tensor, teacher_logits: Tensor) -> Tensor:
        """The distillation loss of logits [N, K'], on the scale of `loss`."""
        ...

    def sums(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Statistics that add up over test images, float64 [3 + 3K]: count, correct, loss, then tp, fp, fn."""
        ...

    def check_sums(self, sums: Tensor) -> None:
        """Raise ValueError if no test set could give such `sums`; they come from clients."""
        ...

    def metrics(self, sums: Tensor) -> dict[str, float]:
        """Named metrics of summed statistics; `accuracy` and `loss` are always among them."""
        ...


def _counts(sums: Tensor) -> tuple[float, float, float, float, float]:
    """Count, correct, and the sums of tp, fp and fn over the classes, if they are counts at all."""
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
    """One class an image: cross-entropy; accuracy is the share of images whose largest logit is their class.

    A network may have more than K outputs (virtual classes): an image predicted as one of those is wrong.
    """

    single_label: ClassVar[bool] = True
    num_classes: int

    def __post_init__(self) -> None:
        check.positive_int(self.num_classes, "num_classes")

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Mean cross-entropy; `labels` are indices [N] or rows of probabilities [N, K']."""
        return F.cross_entropy(logits, labels)

    def counts(self, labels: Tensor) -> Tensor:
        """How many images of each class, int64 [K]."""
        return torch.bincount(labels, minlength=self.num_classes)

    def complement(self, counts: Tensor, total: int) -> Tensor:
        """Class indices, in proportion to what each class lacks to the largest one (`complement_targets`)."""
        return complement_targets(counts, total=total)

    def distill(self, student_logits: Tensor, teacher_logits: Tensor) -> Tensor:
        """KL(teacher || student) of the softmax over all outputs, mean over images."""
        return knowledge_distillation(student_logits, teacher_logits)

    def sums(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Count, correct, summed cross-entropy, then true positives, false positives, false negatives by class."""
        predicted, k = logits.argmax(1), self.num_classes
        right = predicted == labels
        tp = torch.bincount(labels[right], minlength=k)
        fp = torch.bincount(predicted[~right & (predicted < k)], minlength=k)
        fn = torch.bincount(labels[~right], minlength=k)
        loss = F.cross_entropy(logits.double(), labels, reduction="sum").cpu()
        head = torch.stack([torch.tensor(float(len(labels)), dtype=torch.float64), right.sum().double().cpu(), loss])
        return torch.cat([head, torch.cat([tp, fp, fn]).double().cpu()])

    def check_sums(self, sums: Tensor) -> None:
        """Each image is right, and a true positive of its class, or wrong, and missed by its class."""
        count, correct, tp, fp, fn = _counts(sums)
        if tp != correct or fn != count - correct or fp > fn:
            raise ValueError(f"of {count:g} images {correct:g} are right, but tp, fp, fn sum to {tp:g}, {fp:g}, {fn:g}")

    def metrics(self, sums: Tensor) -> dict[str, float]:
        """`accuracy` (a fraction) and `loss` (mean cross-entropy)."""
        return {"accuracy": float(sums[1] / sums[0]), "loss": float(sums[2] / sums[0])}


@dataclass(frozen=True)
class MultiLabel:
    """Any number of classes an image, labels as rows of 0 and 1: binary cross-entropy, a logit above 0 says yes.

    `accuracy` is the share of right answers over images and classes. Precision, recall and F1 are given per class
    averaged (`c_`) and overall (`o_`), as the FLAIR benchmark reports them; 0/0 counts as 0.
    """

    single_label: ClassVar[bool] = False
    num_classes: int

    def __post_init__(self) -> None:
        check.positive_int(self.num_classes, "num_classes")

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Binary cross-entropy over images and classes, mean."""
        return F.binary_cross_entropy_with_logits(logits[:, : self.num_classes], labels.to(logits.dtype))

    def counts(self, labels: Tensor) -> Tensor:
        """How many images carry each class, int64 [K]."""
        return (labels > 0.5).sum(0)

    def complement(self, counts: Tensor, total: int) -> Tensor:
        """Rows with one class each, in proportion to what each class lacks to the most frequent one."""
        return F.one_hot(complement_targets(counts, total=total), self.num_classes).float()

    def distill(self, student_logits: Tensor, teacher_logits: Tensor) -> Tensor:
        """KL between the two yes-or-no answers for each class, mean over images and classes as `loss` is."""
        k = self.num_classes
        return binary_distillation(student_logits[:, :k], teacher_logits[:, :k]) / k

    def sums(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Answers given (images x classes), right answers, summed loss, then tp, fp, fn by class."""
        logits, truth = logits[:, : self.num_classes], labels > 0.5
        says = logits > 0
        loss = F.binary_cross_entropy_with_logits(logits.double(), labels.double(), reduction="sum").cpu()
        head = torch.tensor([float(labels.numel()), float((says == truth).sum()), float(loss)], dtype=torch.float64)
        cells = [(says & truth).sum(0), (says & ~truth).sum(0), (~says & truth).sum(0)]
        return torch.cat([head, torch.cat(cells).double().cpu()])

    def check_sums(self, sums: Tensor) -> None:
        """Each wrong answer is a false positive or a false negative of its class."""
        count, correct, tp, fp, fn = _counts(sums)
        if fp + fn != count - correct or tp > correct:
            raise ValueError(
                f"of {count:g} answers {correct:g} are right, but tp, fp, fn sum to {tp:g}, {fp:g}, {fn:g}"
            )

    def metrics(self, sums: Tensor) -> dict[str, float]:
        """accuracy, loss, c_precision, c_recall, c_f1, o_precision, o_recall, o_f1."""
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
    """Mean, standard deviation, and the mean of the worst tenth (at least one) of per-client test accuracies."""
    values = torch.tensor(sorted(accuracies), dtype=torch.float64)
    worst = max(1, len(values) // 10)
    return {
        "mean": float(values.mean()),
        "std": float(values.std(correction=0)),
        "worst10": float(values[:worst].mean()),
        "clients": len(values),
    }
