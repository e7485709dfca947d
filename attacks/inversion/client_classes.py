"""Recovery of a client's classes from its messages: bounds on the number of its records in each class."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from attacks.inversion._inputs import check_bias
from distillkit._utils import check

_UNBOUNDED = torch.iinfo(torch.int64).max


@dataclass(frozen=True, eq=False)
class ClassBounds:
    """Bounds on a client's number of records per class, as `class_bounds` returns them.

    The bounds are not estimates: they hold without error. The object prints as a list of the classes that the client
    certainly has and of those that it certainly lacks.

    Attributes:
        at_least: lower bound on the number of records of each class, int64 [K].
        at_most: upper bound on the number of records of each class, int64 [K]; the largest int64 if there is no bound.
        grounds: descriptions of the messages from which the bounds follow, each with the assumptions that were made
            about it.
    """

    at_least: Tensor
    at_most: Tensor
    grounds: tuple[str, ...]

    @property
    def present(self) -> Tensor:
        """For each class, whether the client certainly has records of it, bool [K]."""
        return self.at_least > 0

    @property
    def absent(self) -> Tensor:
        """For each class, whether the client certainly has no records of it, bool [K]."""
        return self.at_most == 0

    @property
    def exact(self) -> Tensor:
        """True for each class whose number of records is known exactly, including absent classes; bool [K]."""
        return self.at_least == self.at_most

    def __str__(self) -> str:
        unknown = int((~self.present & ~self.absent).sum())
        parts = []
        for name, which in (("certainly holds", self.present), ("certainly lacks", self.absent)):
            if bool(which.any()):
                parts.append(f"{name} {_format_classes(self, which)}")
        if unknown:
            parts.append(
                f"reveals nothing certain about {unknown} classes, which is no protection: they may still be estimated"
            )
        return f"The sender {'; '.join(parts)}. Assuming: {'; '.join(self.grounds)}."

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
    """Derive from a client's messages which classes it certainly has, with bounds on the number of records per class.

    Nearly everything sent in federated learning or distillation reveals the client's classes. Pass all observed
    messages of one client about the same records; their bounds are combined. The bounds hold without error; for
    estimates of counts, use `class_counts`. If noise was added to the values of all classes (as with differential
    privacy), the message implies no such bounds. Noise in the values of the present classes alone does not hide which
    classes are present.

    These messages allow conclusions:

    - Gradient of the last layer, for softmax cross-entropy with hard labels. Entry k of the bias gradient is the mean
      of p_k - y_k over the client's N images, where p_k is the predicted probability of class k, and y_k is 1 if the
      label is k and 0 otherwise. It is negative only if some label is k, and then at least N |entry k| of the N labels
      are k. Row k of the weight's gradient is the mean of (p_k - y_k) times the features. If the features are never
      negative (after a ReLU), any negative value in the row shows that some label is k.
    - Change of the last layer's bias over any number of steps of SGD, with or without momentum. It is positive only for
      classes that were present. With adaptive optimizers, weight decay, a teacher or SCAFFOLD's correction, it may be
      positive for absent classes. This function refuses a change that does not sum to 0 over the classes, and so
      usually detects adaptive optimizers and weight decay. It cannot detect a teacher or SCAFFOLD's correction: you
      must know that neither was used.
    - Rows by class, such as means, sums or prototypes. A row of zeros or NaN means that the class has no records.
    - Labels of a distilled set or of prototypes that were made for the present classes only.

    Args:
        num_classes: number of classes, K, at least 2.
        bias_gradient: gradient of the mean loss with respect to the last layer's bias, float [K], unscaled or scaled
            down (for example clipped).
        bias_change: change of the last layer's bias, float [K]: its value after local training minus its value before.
        weight_gradient: gradient of the mean loss with respect to the last layer's weight, float [K, D]. Pass it only
            if the layer's D inputs are known to be never negative.
        class_rows: one row per class, float [K, F].
        noised: whether noise was added to `class_rows`. A row of pure noise looks like the row of a present class. If
            True, the rows are therefore used only if one of them is zero or NaN, which shows that only present classes
            received noise.
        labels: class indices int [M] of a set's images or of prototypes; classes without an image or prototype count as
            absent.
        ipc: images per class of a set in which each image was initialized from a different record. A class with fewer
            records than `ipc` has one image per record, so its number of records is known exactly.
        size: number of the client's records, N, such as its weight in FedAvg; None if unknown.

    Returns:
        The bounds, and the messages and assumptions on which they are based.

    Raises:
        TypeError, ValueError: no message was given; a tensor has another shape or is not finite; messages contradict
            each other; or the gradient or the change of the bias does not sum to 0 over the classes. Another sum means
            that noise, weight decay, Adam or a loss without softmax was used, so no conclusion is certain.

    Sources: Zhao, Mopuri and Bilen (iDLG, 2020) for the sign of one image's gradient; Yin et al., "See through
    gradients" (CVPR 2021), who look for negative values in a batch's gradient. All other bounds follow by arithmetic.
    """
    num_classes = check.positive_int(num_classes, "num_classes", least=2)
    check.boolean(noised, "noised")
    if size is not None:
        size = check.positive_int(size, "size")
    if ipc is not None:
        ipc = check.positive_int(ipc, "ipc")
        if labels is None:
            raise ValueError("ipc needs labels, the classes of the images that were made")
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
    if bool((low > high).any()):
        wrong = (low > high).nonzero().flatten().tolist()
        raise ValueError(
            f"messages must be of one client and the same records, but contradict each other (classes {wrong}): "
            f"{'; '.join(grounds)}; leave out messages of another round, or size"
        )
    return ClassBounds(low, high, grounds)


Bounds = tuple[Tensor, Tensor, str]


def _unbounded(num_classes: int) -> tuple[Tensor, Tensor]:
    return torch.zeros(num_classes, dtype=torch.int64), torch.full((num_classes,), _UNBOUNDED)


def _of_gradients(
    num_classes: int, bias: Tensor | None, change: Tensor | None, weight: Tensor | None, size: int | None
) -> Iterator[Bounds]:
    if bias is not None:
        row = _class_rows(check_bias(bias), "bias_gradient", num_classes)
        low, high = _unbounded(num_classes)
        low[row < 0] = 1
        if size is not None:
            low = torch.maximum(low, (-row * size - 1e-4 * size).ceil().long())
        yield low, high, "the bias gradient of cross-entropy with hard labels, not scaled up"
    if change is not None:
        row = _class_rows(check_bias(change, name="bias_change"), "bias_change", num_classes)
        low, high = _unbounded(num_classes)
        low[row > 1e-5 * row.abs().max()] = 1
        yield low, high, "the bias change by plain SGD on cross-entropy with hard labels only"
    if weight is not None:
        matrix = check.matrix(weight, "weight_gradient").detach().double().cpu()
        rows = _class_rows(matrix, "weight_gradient", num_classes)
        low, high = _unbounded(num_classes)
        low[(rows < 0).any(1)] = 1
        yield (low, high, "the weight gradient of cross-entropy with hard labels, on features that are never negative")


def _of_rows(num_classes: int, rows: Tensor, noised: bool) -> Iterator[Bounds]:
    check.float_tensor(rows, "class_rows", "[K, F]")
    if rows.ndim < 2 or 0 in rows.shape or len(rows) != num_classes:
        raise ValueError(f"class_rows must have one row per class, [{num_classes}, F], got {list(rows.shape)}")
    flat = rows.detach().cpu().flatten(1)
    empty = (flat == 0).all(1) | flat.isnan().all(1)
    if not bool((flat.isfinite().all(1) | empty).all()):
        raise ValueError("class_rows must be finite, except for rows of NaN only, which mark classes without records")
    low, high = _unbounded(num_classes)
    high[empty] = 0
    if bool(empty.any()):
        low[~empty] = 1
        yield low, high, "rows for some classes only" + (", with noise on those" if noised else "")
    elif noised:
        yield low, high, "noised rows for all classes, from which nothing certain follows"
    else:
        yield low + 1, high, "a row for every class, without noise"


def _of_labels(num_classes: int, labels: Tensor, ipc: int | None) -> Iterator[Bounds]:
    counts = check.class_labels(labels, None, num_classes).cpu().bincount(minlength=num_classes)
    low, high = (counts > 0).long(), torch.full((num_classes,), _UNBOUNDED)
    high[counts == 0] = 0
    if ipc is None:
        yield low, high, "a set made for the present classes only"
        return
    if int(counts.max()) > ipc:
        raise ValueError(
            f"ipc must be at least the number of images of every class, got {ipc} but {int(counts.max())} of one"
        )
    high = torch.where(counts < ipc, counts, _UNBOUNDED)
    yield counts, high, f"images started from up to {ipc} different records per class"


def _with_size(low: Tensor, high: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Tighten bounds on the number of records per class by using the total number of records.

    A class has at least the total minus the upper bounds of all other classes, and at most the total minus their lower
    bounds.
    """
    bounded = high.clamp(max=size)
    others_low, others_high = low.sum() - low, bounded.sum() - bounded
    return torch.maximum(low, size - others_high), torch.minimum(bounded, size - others_low)


def _class_rows(rows: Tensor, name: str, num_classes: int) -> Tensor:
    """Check that a gradient has one row or entry per class, and that it sums to 0 over the classes."""
    if len(rows) != num_classes:
        raise ValueError(f"{name} must have one row or entry for each of {num_classes} classes, got {list(rows.shape)}")
    if bool((rows.sum(0).abs() > 1e-4 * rows.abs().sum(0).max()).any()):
        raise ValueError(
            f"{name} must sum to 0 over the classes, as with softmax cross-entropy: noise, weight decay, an adaptive "
            "optimizer or another loss leave nothing certain; for an estimate call class_counts"
        )
    return rows.cpu()


def _format_classes(held: ClassBounds, which: Tensor) -> str:
    words = []
    for k in which.nonzero().flatten().tolist():
        low, high = int(held.at_least[k]), int(held.at_most[k])
        if high == 0:
            words.append(f"{k}")
        elif low == high:
            words.append(f"{k} (exactly {low})")
        else:
            words.append(f"{k} (at least {low})" if high == _UNBOUNDED else f"{k} ({low} to {high})")
    return "classes " + ", ".join(words)
