"""Classification tasks, with one or several classes per image: their losses, class counts and test metrics."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from distillkit._utils import check
from distillkit._utils.devices import is_accelerator
from distillkit._utils.options import CheckedOptions, PositiveInt
from distillkit.generate import complement_targets
from distillkit.losses import binary_distillation, knowledge_distillation


class LabelTask(Protocol):
    """Interface of a classification task.

    Federated methods use only this interface, so they work with any form of labels. `Classification` and `MultiLabel`
    implement this interface; pass them as `simulate(..., task=...)`. A task is immutable, and it is the same on the
    server and on every client. K is the task's number of classes. A network has K' >= K outputs. The outputs after the
    first K belong to additional classes, with which some add-ons train the network.

    Attributes:
        single_label: whether each image has exactly one class and its label is the index of this class.
    """

    single_label: ClassVar[bool]

    @property
    def num_classes(self) -> int:
        """The number of classes, K."""

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the training loss, a scalar: the mean over N images with these `logits` and `labels`.

        The logits are [N, K'], where K' is the number of the network's outputs, at least the number of classes.
        """

    def counts(self, labels: Tensor) -> Tensor:
        """Return the number of images of each class, int64 [K], in a set with these `labels`."""

    def complement(self, counts: Tensor, total: int) -> Tensor:
        """Return labels of additional images that would balance a client's classes.

        FedCOG generates images with these labels.

        Args:
            counts: number of the client's images of each class, int64 [K].
            total: maximum number of labels. If the classes are balanced already, there are no labels.
        """

    def distill(self, student_logits: Tensor, teacher_logits: Tensor) -> Tensor:
        """Return the distillation loss between a student and a teacher, averaged over the images.

        This loss has the same scale as `loss`, so the two can be added.

        Args:
            student_logits, teacher_logits: logits of the two networks for the same N images, float [N, K']. K' is the
                number of outputs, which is at least the number of classes, K.
        """

    def sums(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the results of a test as sums over images, so that results of batches or clients can be added.

        Args:
            logits: float [N, K']. K' is the number of the network's outputs, at least the number of classes, K.
            labels: labels of these images: class indices [N] for `Classification`, rows of 0 and 1 [N, K] for
                `MultiLabel`.

        Returns:
            float64 [3 + 3K], on the device of the logits: the number of predictions (one per image, or one per image
            and class if an image may have several classes), the number of correct predictions, the summed loss, then K
            true positives, K false positives and K false negatives, one for each class.
        """

    def check_sums(self, sums: Tensor) -> None:
        """Raise ValueError if no test set could yield these test results.

        The server checks the test results of clients with this function.

        Args:
            sums: test results as the method `sums` returns them, float64 [3 + 3K] for K classes.
        """

    def metrics(self, sums: Tensor) -> dict[str, float]:
        """Return the test metrics by name, among them `accuracy` and `loss`.

        Args:
            sums: test results as the method `sums` returns them, float64 [3 + 3K] for K classes.
        """


def _require_logits(logits: Tensor, labels: Tensor, k: int, rows: bool, width: int | None = None) -> None:
    """Refuse logits that are no floats [N, k or more], and labels of another form: `rows`, or indices int64 [N]."""
    if not isinstance(logits, Tensor) or not logits.is_floating_point() or logits.ndim != 2 or logits.shape[1] < k:
        raise ValueError(f"logits must be floats [N, {k} or more], got {_form(logits)}")
    wanted = [len(logits), width or logits.shape[1]] if rows else [len(logits)]
    if not isinstance(labels, Tensor) or list(labels.shape) != wanted or not (rows or labels.dtype == torch.int64):
        raise ValueError(f"labels must be {'' if rows else 'int64 '}{wanted} for these logits, got {_form(labels)}")


def _require_rows(labels: Tensor, k: int) -> None:
    """Refuse labels of a multi-label task that are no rows [N, k]."""
    if not isinstance(labels, Tensor) or labels.ndim != 2 or labels.shape[1] != k:
        raise ValueError(f"labels must be rows [N, {k}], got {_form(labels)}")


def _require_sums(sums: Tensor, k: int) -> None:
    """Refuse test results that are no floats [3 + 3k]."""
    if not isinstance(sums, Tensor) or not sums.is_floating_point() or list(sums.shape) != [3 + 3 * k]:
        raise ValueError(f"sums must be floats [{3 + 3 * k}], as the method sums returns them, got {_form(sums)}")


def _form(value: object) -> str:
    return f"{value.dtype} {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__


def _counts(sums: Tensor) -> tuple[float, float, float, float, float]:
    """Return the numbers of predictions, correct predictions, true positives, false positives and false negatives."""
    counts = torch.cat([sums[:2], sums[3:]])
    if bool((counts < 0).any() | (counts != counts.floor()).any() | (counts > 2**53).any()) or float(sums[2]) < 0:
        raise ValueError("counts must be whole numbers of at least 0, and the loss at least 0")
    count, correct = (float(v) for v in sums[:2])
    if not count > 0 or correct > count:
        raise ValueError(f"{correct:g} of {count:g} predictions cannot be correct")
    tp, fp, fn = (float(v) for v in sums[3:].view(3, -1).sum(1))
    return count, correct, tp, fp, fn


@dataclass(frozen=True)
class Classification(CheckedOptions):
    """Task with exactly one class per image, with cross-entropy as loss.

    `accuracy` is the share of images whose true class has the largest logit. A network may have more than K outputs, if
    an add-on has additional (virtual) classes. A prediction of an additional class counts as wrong.

    Args:
        num_classes: the number of classes, K. Labels are indices in [0, K), int64 [N].

    Raises:
        TypeError, ValueError: `num_classes` is not a positive integer.
    """

    single_label: ClassVar[bool] = True
    num_classes: PositiveInt

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the cross-entropy of `logits`, averaged over the images.

        Args:
            logits: float [N, K']. K' is the number of the network's outputs, at least the number of classes, K.
            labels: class indices [N], or class probabilities [N, K'].
        """
        rows = isinstance(labels, Tensor) and labels.is_floating_point()
        _require_logits(logits, labels, self.num_classes, rows)
        return F.cross_entropy(logits, labels)

    def counts(self, labels: Tensor) -> Tensor:
        """Return the number of images of each class, int64 [K], in a set with these `labels` (indices, int64 [N])."""
        return torch.bincount(check.class_labels(labels, None, self.num_classes), minlength=self.num_classes)

    def complement(self, counts: Tensor, total: int) -> Tensor:
        """Return the classes of at most `total` additional images that would balance the class counts.

        A class gets images in proportion to the difference between the largest count and its own count; see
        `distillkit.generate.complement_targets`.
        """
        return complement_targets(counts, total=total)

    def distill(self, student_logits: Tensor, teacher_logits: Tensor) -> Tensor:
        """Return the KL divergence KL(teacher || student) of the softmax over all outputs, averaged over the images.

        Args:
            student_logits, teacher_logits: logits of the two networks for the same N images, float [N, K']. K' is the
                number of outputs, which is at least the number of classes, K.
        """
        return knowledge_distillation(student_logits, teacher_logits)

    def sums(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the results of a test as sums over images, float64 [3 + 3K].

        The sums are the number of images, the number of correct predictions and the summed cross-entropy, then the true
        positives, false positives and false negatives of each class. The predicted class has the largest logit. If an
        output after the first K has the largest logit, the prediction is wrong.

        Args:
            logits: float [N, K']. K' is the number of the network's outputs, at least the number of classes, K.
            labels: class indices, int64 [N].
        """
        k = self.num_classes
        _require_logits(logits, labels, k, False)
        if not is_accelerator(labels.device):
            check.class_labels(labels, len(logits), k)
        predicted = logits.argmax(1)
        right = (predicted == labels).double()
        loss = F.cross_entropy(logits.double(), labels, reduction="sum")
        tp, fp, fn = right.new_zeros(3, logits.shape[1])
        tp.index_add_(0, labels, right)
        fp.index_add_(0, predicted, 1 - right)
        fn.index_add_(0, labels, 1 - right)
        head = torch.stack([torch.ones_like(right).sum(), right.sum(), loss])
        return torch.cat([head, tp[:k], fp[:k], fn[:k]])

    def check_sums(self, sums: Tensor) -> None:
        """Raise ValueError if the counts in `sums`, a result of the method `sums`, contradict each other.

        Summed over all classes, there must be as many true positives as correct predictions, and as many false
        negatives as wrong predictions. There must be at most as many false positives as false negatives: a wrong
        prediction is a false positive of the predicted class, unless the prediction is an output after the first K.
        """
        _require_sums(sums, self.num_classes)
        count, correct, tp, fp, fn = _counts(sums)
        if tp != correct or fn != count - correct or fp > fn:
            raise ValueError(
                f"{correct:g} of {count:g} images are correct, but tp, fp, fn sum to {tp:g}, {fp:g}, {fn:g}"
            )

    def metrics(self, sums: Tensor) -> dict[str, float]:
        """Return the test metrics by name: `accuracy` (a fraction) and `loss` (the mean cross-entropy).

        Args:
            sums: test results as the method `sums` returns them, float64 [3 + 3K] for K classes.
        """
        _require_sums(sums, self.num_classes)
        return {"accuracy": float(sums[1] / sums[0]), "loss": float(sums[2] / sums[0])}


@dataclass(frozen=True)
class MultiLabel(CheckedOptions):
    """Task with any number of classes per image, with labels as rows of 0 and 1, and binary cross-entropy as loss.

    A class is predicted if its logit is above 0. `accuracy` is the share of correct predictions among all pairs of
    image and class. Precision, recall and F1 are reported in two ways, as in the FLAIR benchmark: averaged over classes
    (prefix `c_`), and computed from the predictions of all classes together (prefix `o_`). A ratio 0/0 counts as 0.

    Args:
        num_classes: the number of classes, K. Labels are rows, [N, K].

    Raises:
        TypeError, ValueError: `num_classes` is not a positive integer.
    """

    single_label: ClassVar[bool] = False
    num_classes: PositiveInt

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the binary cross-entropy of the first K `logits`, averaged over images and classes.

        Args:
            logits: float [N, K']. K' is the number of the network's outputs, at least the number of classes, K.
            labels: rows of 0 and 1, [N, K].
        """
        _require_logits(logits, labels, self.num_classes, True, self.num_classes)
        return F.binary_cross_entropy_with_logits(logits[:, : self.num_classes], labels.to(logits.dtype))

    def counts(self, labels: Tensor) -> Tensor:
        """Return the number of images that have each class, int64 [K], in a set with these `labels` [N, K]."""
        _require_rows(labels, self.num_classes)
        return (labels > 0.5).sum(0)

    def complement(self, counts: Tensor, total: int) -> Tensor:
        """Return label rows of at most `total` additional images that would balance the class counts.

        Each row has one class. A class gets images in proportion to the difference between the largest count and its
        own count.
        """
        return F.one_hot(complement_targets(counts, total=total), self.num_classes).float()

    def distill(self, student_logits: Tensor, teacher_logits: Tensor) -> Tensor:
        """Return the KL divergence KL(teacher || student), averaged over images and classes.

        A network's prediction of a class is a Bernoulli distribution, whose probability is the sigmoid of the logit.
        Outputs after the first K are ignored.

        Args:
            student_logits, teacher_logits: logits of the two networks for the same N images, float [N, K']. K' is the
                number of outputs, which is at least the number of classes, K.
        """
        k = self.num_classes
        return binary_distillation(student_logits[:, :k], teacher_logits[:, :k]) / k

    def sums(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the results of a test as sums over images and classes, float64 [3 + 3K].

        The sums are the number of predictions (images x classes), the number of correct predictions and the summed
        loss, then the true positives, false positives and false negatives of each class.

        Args:
            logits: float [N, K']. K' is the number of the network's outputs, at least the number of classes, K.
            labels: rows of 0 and 1, [N, K].
        """
        _require_logits(logits, labels, self.num_classes, True, self.num_classes)
        logits, truth = logits[:, : self.num_classes], labels > 0.5
        says = logits > 0
        loss = F.binary_cross_entropy_with_logits(logits.double(), labels.double(), reduction="sum")
        head = torch.stack([torch.ones_like(loss) * labels.numel(), (says == truth).sum().double(), loss])
        cells = [(says & truth).sum(0), (says & ~truth).sum(0), (~says & truth).sum(0)]
        return torch.cat([head, torch.cat(cells).double()])

    def check_sums(self, sums: Tensor) -> None:
        """Raise ValueError if the counts in `sums`, a result of the method `sums`, contradict each other.

        The total number of false positives and false negatives must equal the number of wrong predictions. The total
        number of true positives must not exceed the number of correct predictions.
        """
        _require_sums(sums, self.num_classes)
        count, correct, tp, fp, fn = _counts(sums)
        if fp + fn != count - correct or tp > correct:
            raise ValueError(
                f"{correct:g} of {count:g} predictions are correct, but tp, fp, fn sum to {tp:g}, {fp:g}, {fn:g}"
            )

    def metrics(self, sums: Tensor) -> dict[str, float]:
        """Return the test metrics by name.

        They are `accuracy`, `loss`, and six more: `c_precision`, `c_recall` and `c_f1` (precision and recall averaged
        over classes, and their F1), and `o_precision`, `o_recall` and `o_f1` (computed from the predictions of all
        classes together).

        Args:
            sums: test results as the method `sums` returns them, float64 [3 + 3K] for K classes.
        """
        _require_sums(sums, self.num_classes)
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
    """Return statistics of the clients' accuracies, which show how much the model's quality differs between clients.

    The history of a run has them in the column `accuracy_clients`.

    Args:
        accuracies: accuracy of each tested client, a fraction; at least one.

    Returns:
        A mapping with four numbers: `mean`; `std`, the population standard deviation; `worst10`, the mean over the
        worst tenth of the clients (at least one client); and `clients`, the number of clients.
    """
    given = [check.real_number(one, f"accuracies[{i}]", least=0.0, most=1.0) for i, one in enumerate(accuracies)]
    if not given:
        raise ValueError("accuracies must hold at least one client's accuracy, got none")
    values = torch.tensor(sorted(given), dtype=torch.float64)
    worst = max(1, len(values) // 10)
    return {
        "mean": float(values.mean()),
        "std": float(values.std(correction=0)),
        "worst10": float(values[:worst].mean()),
        "clients": len(values),
    }
