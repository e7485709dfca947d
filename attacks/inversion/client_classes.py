"""Which classes a client holds, and how many records of each: what follows for certain from what it sent."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from attacks.inversion._inputs import check_bias
from distillkit._utils import check

__all__ = ["ClassBounds", "class_bounds"]

_MANY = torch.iinfo(torch.int64).max


@dataclass(frozen=True, eq=False)
class ClassBounds:
    """What is certain of a client's classes. Made by `class_bounds`; printed, it is a statement for a report.

    Attributes:
        at_least, at_most: bounds of how many records of each class the client has, int64 [K]; where there is no upper
            one, the largest int64.
        grounds: which messages it follows from, and what has to be so, in words.
    """

    at_least: Tensor
    at_most: Tensor
    grounds: tuple[str, ...]

    @property
    def present(self) -> Tensor:
        """Bool [K]: classes that the client certainly holds."""
        return self.at_least > 0

    @property
    def absent(self) -> Tensor:
        """Bool [K]: classes that it certainly does not hold."""
        return self.at_most == 0

    @property
    def exact(self) -> Tensor:
        """Bool [K]: classes of which the number of records is certain; absent ones among them."""
        return self.at_least == self.at_most

    def __str__(self) -> str:
        unknown = int((~self.present & ~self.absent).sum())
        parts = []
        for name, which in (("certainly holds", self.present), ("certainly lacks", self.absent)):
            if bool(which.any()):
                parts.append(f"{name} {_listed(self, which)}")
        if unknown:
            parts.append(f"nothing certain of {unknown} classes, which is no protection: likelihoods remain")
        return f"The sender {'; '.join(parts)}. Given: {'; '.join(self.grounds)}."

    __repr__ = __str__


def class_bounds(
    num_classes: int,
    *,
    bias_gradient: Tensor | None = None,
    bias_change: Tensor | None = None,
    weight_gradient: Tensor | None = None,
    class_rows: Tensor | None = None,
    noised: bool = False,
    labels: Tensor | None = None,
    ipc: int | None = None,
    size: int | None = None,
) -> ClassBounds:
    """Read off a client's messages which classes it certainly holds or lacks, and bounds of how many records of each.

    Nearly everything that is sent in federated learning or distillation says which classes stand behind it, often
    without a word on images. Give whatever was seen, of one client and the same records; the bounds are put together.
    Only what follows is said, no likelihoods: estimates of counts are `class_counts`. Noise that covers all classes
    (differential privacy with every class in it) leaves nothing certain; noise on the classes that are there hides
    nothing.

    - A gradient of the last layer, of softmax cross-entropy with hard labels: its bias's entry k is the mean over the
      images of p_k - [label is k], negative only if some label is k; at least -entry N of the N are. The weight's row
      k is that times the features, so where these are never negative (behind a ReLU) any negative number says the same.
    - The change of that bias over any number of steps of SGD, with momentum or without: it rises only for classes
      that were there. (By adaptive optimizers, with weight decay, a teacher, or SCAFFOLD's correction it may rise for
      others; the last two keep the sum at 0, so you must know that there was neither.)
    - A row for each class: means, sums or prototypes; zeros or NaN stand for a class without records.
    - The labels of a distilled set or of prototypes, made for the classes that are there alone.

    Args:
        num_classes: K, at least 2.
        bias_gradient: float [K], of the mean loss, as it is or scaled down, as by clipping.
        bias_change: float [K], the last bias after local training minus before.
        weight_gradient: float [K, D], of a last layer whose inputs are never negative. That they are not you must know.
        class_rows: float [K, F].
        noised: whether noise was added to `class_rows`. Rows of noise look like any other, so with True they are held
            for certain only if others are empty, which shows that noise was added where there were records alone.
        labels: class indices int [M] of a set's images or of prototypes; classes without one are taken for absent.
        ipc: how many records of each class the images of `labels` were started from, all different, where there were
            as many: then fewer images than `ipc` are as many records as there are.
        size: how many records stand behind all of this, N, such as FedAvg's weight; None where it is not known.

    Returns:
        The bounds, with the grounds that they rest on.

    Raises:
        TypeError, ValueError: no message; tensors of other shapes or not finite; gradients and changes that do not sum
            to 0 over the classes, as softmax's do (noise, weight decay, Adam or another loss: nothing certain follows);
            messages that contradict each other.

    Sources: Zhao, Mopuri and Bilen (iDLG, 2020) for the sign of one image's gradient; Yin et al., "See through
    gradients" (CVPR 2021), who look for negative numbers in a batch's; the rest is arithmetic.
    """
    num_classes = check.positive_int(num_classes, "num_classes", least=2)
    check.boolean(noised, "noised")
    if size is not None:
        size = check.positive_int(size, "size")
    if ipc is not None:
        ipc = check.positive_int(ipc, "ipc")
        if labels is None:
            raise ValueError("ipc must come with labels, the classes of the images that were made; give them too")
    found = [
        *_of_gradients(num_classes, bias_gradient, bias_change, weight_gradient, size),
        *(_of_rows(num_classes, class_rows, noised) if class_rows is not None else ()),
        *(_of_labels(num_classes, labels, ipc) if labels is not None else ()),
    ]
    if not found:
        raise ValueError(
            "class_bounds must be given at least one message: bias_gradient, bias_change, weight_gradient, class_rows "
            "or labels"
        )
    low = torch.stack([at_least for at_least, _, _ in found]).amax(0)
    high = torch.stack([at_most for _, at_most, _ in found]).amin(0)
    grounds = tuple(ground for _, _, ground in found)
    if size is not None:
        low, high = _with_size(low, high, size)
        grounds += (f"{size} records in all",)
    if bool((low > high).any()) or (size is not None and (int(low.sum()) > size)):
        wrong = (low > high).nonzero().flatten().tolist()
        raise ValueError(
            f"messages must be of one client and the same records, but they contradict each other (classes {wrong}): "
            f"{'; '.join(grounds)}; leave out those of another round, or size"
        )
    return ClassBounds(low, high, grounds)


Bounds = tuple[Tensor, Tensor, str]


def _open(num_classes: int) -> tuple[Tensor, Tensor]:
    return torch.zeros(num_classes, dtype=torch.int64), torch.full((num_classes,), _MANY)


def _of_gradients(
    num_classes: int, bias: Tensor | None, change: Tensor | None, weight: Tensor | None, size: int | None
) -> Iterator[Bounds]:
    if bias is not None:
        row = _summing_to_zero(_sized(check_bias(bias, 2), "bias_gradient", num_classes), "bias_gradient")
        low, high = _open(num_classes)
        low[row < 0] = 1
        if size is not None:
            low = torch.maximum(low, (-row * size - 1e-4 * size).ceil().long())
        yield low, high, "a bias's gradient of cross-entropy with hard labels, not scaled up"
    if change is not None:
        row = _summing_to_zero(_sized(_vector(change), "bias_change", num_classes), "bias_change")
        low, high = _open(num_classes)
        low[row > 1e-5 * row.abs().max()] = 1
        yield low, high, "a bias's change by plain SGD on cross-entropy with hard labels alone"
    if weight is not None:
        rows = _sized(check.matrix(weight, "weight_gradient").detach().double().cpu(), "weight_gradient", num_classes)
        _summing_to_zero(rows, "weight_gradient")
        low, high = _open(num_classes)
        low[(rows < 0).any(1)] = 1
        yield (
            low,
            high,
            "a weight's gradient of cross-entropy with hard labels, behind features that are never negative",
        )


def _of_rows(num_classes: int, rows: Tensor, noised: bool) -> Iterator[Bounds]:
    check.float_tensor(rows, "class_rows", "[K, F]")
    if rows.ndim < 2 or 0 in rows.shape or len(rows) != num_classes:
        raise ValueError(f"class_rows must be one row a class, [{num_classes}, F], got {list(rows.shape)}")
    flat = rows.detach().cpu().flatten(1)
    empty = (flat == 0).all(1) | flat.isnan().all(1)
    if not bool((flat.isfinite().all(1) | empty).all()):
        raise ValueError(
            "class_rows must be finite, but for rows of NaN alone, which stand for classes without records"
        )
    low, high = _open(num_classes)
    high[empty] = 0
    if bool(empty.any()):
        low[~empty] = 1
        yield low, high, "rows for some classes alone" + (", with noise on those" if noised else "")
    elif noised:
        yield low, high, "noised rows for all classes, which say nothing for certain"
    else:
        yield low + 1, high, "a row of numbers for every class, without noise"


def _of_labels(num_classes: int, labels: Tensor, ipc: int | None) -> Iterator[Bounds]:
    counts = check.class_labels(labels, None, num_classes).cpu().bincount(minlength=num_classes)
    low, high = (counts > 0).long(), torch.full((num_classes,), _MANY)
    high[counts == 0] = 0
    if ipc is None:
        yield low, high, "a set made for the classes that are there alone"
        return
    if int(counts.max()) > ipc:
        raise ValueError(f"ipc must be at least the images of every class, got {ipc} and {int(counts.max())} of one")
    yield counts, torch.where(counts < ipc, counts, _MANY), f"images started from up to {ipc} different records a class"


def _with_size(low: Tensor, high: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """What follows for each class from the bounds of the others and their sum."""
    bounded = high.clamp(max=size)
    others_low, others_high = low.sum() - low, bounded.sum() - bounded
    return torch.maximum(low, size - others_high), torch.minimum(bounded, (size - others_low).clamp(min=0))


def _vector(change: Tensor) -> Tensor:
    check.float_tensor(change, "bias_change", "[K], one number a class")
    if change.ndim != 1 or not bool(change.isfinite().all()):
        raise ValueError(f"bias_change must be finite, [K], got shape {list(change.shape)}, or NaN or Inf in it")
    return change.detach().double()


def _sized(rows: Tensor, name: str, num_classes: int) -> Tensor:
    if len(rows) != num_classes:
        raise ValueError(f"{name} must have one row or entry for each of {num_classes} classes, got {list(rows.shape)}")
    return rows.cpu()


def _summing_to_zero(rows: Tensor, name: str) -> Tensor:
    if bool((rows.sum(0).abs() > 1e-4 * rows.abs().sum(0).max()).any()):
        raise ValueError(
            f"{name} must sum to 0 over the classes, as softmax's cross-entropy makes it: noise, weight decay, an "
            "adaptive optimizer or another loss leave nothing certain; for an estimate call class_counts"
        )
    return rows


def _listed(held: ClassBounds, which: Tensor) -> str:
    words = []
    for k in which.nonzero().flatten().tolist():
        low, high = int(held.at_least[k]), int(held.at_most[k])
        if high == 0:
            words.append(f"{k}")
        elif low == high:
            words.append(f"{k} (exactly {low})")
        else:
            words.append(f"{k} (at least {low})" if high == _MANY else f"{k} ({low} to {high})")
    return "classes " + ", ".join(words)
