"""What the labels mean: the loss, the class counts, distillation, and the metrics of a classification task."""

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
    """What a federated method asks of a task, so that it need not know what labels look like.

    `Classification` and `MultiLabel` are the two that there are; `simulate(..., task=...)` takes them. A task is
    frozen, and the same object on the server and on every client. K is its number of classes; a network may have more
    outputs, K' >= K, when an add-on has classes of its own.

    Attributes:
        single_label: an image has exactly one class, and labels are indices.
    """

    single_label: ClassVar[bool]

    @property
    def num_classes(self) -> int:
        """How many classes the task has, K."""
        ...

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        """What local training minimises: the mean loss of `logits` [N, K'] of images with these `labels`."""
        ...

    def counts(self, labels: Tensor) -> Tensor:
        """How many images of each class a client holds whose images have these `labels`: int64 [K]."""
        ...

    def complement(self, counts: Tensor, total: int) -> Tensor:
        """Which images a client should make up to balance its classes, as their labels (FedCOG generates them).

        At most `total` for a client with `counts` int64 [K]; none if it is balanced.
        """
        ...

    def distill(self, student_logits: Tensor, teacher_logits: Tensor) -> Tensor:
        """How far a student is from a teacher on the same images: a mean loss, on the scale of `loss`.

        Args:
            student_logits, teacher_logits: float [N, K'].
        """
        ...

    def sums(self, logits: Tensor, labels: Tensor) -> Tensor:
        """What a test of some images found, as numbers that add up over batches and over clients.

        Args:
            logits: float [N, K'].
            labels: of these images, as the task has them.

        Returns:
            float64 [3 + 3K]: count, correct, summed loss, then the true positives of each class, then their false
            positives, then their false negatives.
        """
        ...

    def check_sums(self, sums: Tensor) -> None:
        """Raise ValueError if no test set could give such `sums`, float64 [3 + 3K]; they come from clients."""
        ...

    def metrics(self, sums: Tensor) -> dict[str, float]:
        """What the history says of a test with these `sums`, by name; `accuracy` and `loss` are always among them."""
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

    Args:
        num_classes: K; labels are indices in [0, K), int64 [N].

    Raises:
        TypeError, ValueError: `num_classes` is no positive integer.
    """

    single_label: ClassVar[bool] = True
    num_classes: int

    def __post_init__(self) -> None:
        check.positive_int(self.num_classes, "num_classes")

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Mean cross-entropy of `logits` [N, K'] at `labels`: indices [N], or rows of probabilities [N, K']."""
        return F.cross_entropy(logits, labels)

    def counts(self, labels: Tensor) -> Tensor:
        """How many of the `labels`, indices int64 [N], are of each class: int64 [K]."""
        return torch.bincount(labels, minlength=self.num_classes)

    def complement(self, counts: Tensor, total: int) -> Tensor:
        """Indices of at most `total` images that even out `counts`; see `distillkit.generate.complement_targets`.

        As many of each class, in proportion, as it lacks to the largest one.
        """
        return complement_targets(counts, total=total)

    def distill(self, student_logits: Tensor, teacher_logits: Tensor) -> Tensor:
        """KL(teacher || student) of the softmax over all outputs of `student_logits` and `teacher_logits`, mean."""
        return knowledge_distillation(student_logits, teacher_logits)

    def sums(self, logits: Tensor, labels: Tensor) -> Tensor:
        """What `logits` [N, K'] say of images with these `labels` [N], to be added up: float64 [3 + 3K].

        Images, right ones, summed cross-entropy, then true positives, false positives and false negatives by class. An
        image is predicted as the class of its largest logit.
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
        """Refuse `sums` unless each image is right, a true positive of its class, or wrong, missed by its class."""
        count, correct, tp, fp, fn = _counts(sums)
        if tp != correct or fn != count - correct or fp > fn:
            raise ValueError(f"of {count:g} images {correct:g} are right, but tp, fp, fn sum to {tp:g}, {fp:g}, {fn:g}")

    def metrics(self, sums: Tensor) -> dict[str, float]:
        """`accuracy` (a fraction) and `loss` (mean cross-entropy) of `sums`."""
        return {"accuracy": float(sums[1] / sums[0]), "loss": float(sums[2] / sums[0])}


@dataclass(frozen=True)
class MultiLabel:
    """Any number of classes an image, labels as rows of 0 and 1: binary cross-entropy, a logit above 0 says yes.

    `accuracy` is the share of right answers over images and classes. Precision, recall and F1 are given per class
    averaged (`c_`) and overall (`o_`), as the FLAIR benchmark reports them; 0/0 counts as 0.

    Args:
        num_classes: K; labels are rows [N, K].

    Raises:
        TypeError, ValueError: `num_classes` is no positive integer.
    """

    single_label: ClassVar[bool] = False
    num_classes: int

    def __post_init__(self) -> None:
        check.positive_int(self.num_classes, "num_classes")

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Binary cross-entropy of `logits` [N, K'] at `labels` [N, K], mean over images and classes."""
        return F.binary_cross_entropy_with_logits(logits[:, : self.num_classes], labels.to(logits.dtype))

    def counts(self, labels: Tensor) -> Tensor:
        """How many of the images with these `labels` [N, K] carry each class: int64 [K]."""
        return (labels > 0.5).sum(0)

    def complement(self, counts: Tensor, total: int) -> Tensor:
        """Rows of at most `total` images that even out `counts`, one class each.

        As many of each class, in proportion, as it lacks to the most frequent one.
        """
        return F.one_hot(complement_targets(counts, total=total), self.num_classes).float()

    def distill(self, student_logits: Tensor, teacher_logits: Tensor) -> Tensor:
        """KL between the yes-or-no answers of `student_logits` and `teacher_logits` for each class.

        Mean over images and classes, as `loss` is; outputs beyond the K classes have no part in it.
        """
        k = self.num_classes
        return binary_distillation(student_logits[:, :k], teacher_logits[:, :k]) / k

    def sums(self, logits: Tensor, labels: Tensor) -> Tensor:
        """What `logits` [N, K'] say of images with these `labels` [N, K], to be added up: float64 [3 + 3K].

        Answers given (images x classes), right answers, summed loss, then true positives, false positives and false
        negatives by class.
        """
        logits, truth = logits[:, : self.num_classes], labels > 0.5
        says = logits > 0
        loss = F.binary_cross_entropy_with_logits(logits.double(), labels.double(), reduction="sum").cpu()
        head = torch.tensor([float(labels.numel()), float((says == truth).sum()), float(loss)], dtype=torch.float64)
        cells = [(says & truth).sum(0), (says & ~truth).sum(0), (~says & truth).sum(0)]
        return torch.cat([head, torch.cat(cells).double().cpu()])

    def check_sums(self, sums: Tensor) -> None:
        """Refuse `sums` unless each wrong answer is a false positive or a false negative of its class."""
        count, correct, tp, fp, fn = _counts(sums)
        if fp + fn != count - correct or tp > correct:
            raise ValueError(
                f"of {count:g} answers {correct:g} are right, but tp, fp, fn sum to {tp:g}, {fp:g}, {fn:g}"
            )

    def metrics(self, sums: Tensor) -> dict[str, float]:
        """Of `sums`: accuracy, loss, c_precision, c_recall, c_f1, o_precision, o_recall, o_f1."""
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
    """How evenly a model serves its clients: what the history writes as `accuracy_clients`.

    Args:
        accuracies: of the clients that were tested, fractions; at least one.

    Returns:
        `mean`, `std` (population), `worst10` (the mean of the worst tenth, of at least one), and how many `clients`.
    """
    values = torch.tensor(sorted(accuracies), dtype=torch.float64)
    worst = max(1, len(values) // 10)
    return {
        "mean": float(values.mean()),
        "std": float(values.std(correction=0)),
        "worst10": float(values[:worst].mean()),
        "clients": len(values),
    }
