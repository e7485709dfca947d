"""Distances between two sets of embeddings (by their means or the RBF MMD), or between two gradients."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from distillkit._utils import check
from distillkit.losses._common import at_least_float32, pair_tensors, reduce, require_float, row_norms


def class_means(embeddings: Tensor, labels: Tensor, num_classes: int) -> tuple[Tensor, Tensor]:
    """Compute the mean embedding and the number of embeddings of each class.

    Args:
        embeddings: float [N, d].
        labels: class indices int [N] in [0, num_classes).
        num_classes: number of classes, K.

    Returns:
        The means [K, d], and the counts int64 [K]. The mean of an absent class is zero. Half-precision embeddings are
        averaged in float32, and the means are float32.

    Raises:
        TypeError, ValueError: a tensor has a wrong dtype or shape, or a label is out of range.
    """
    require_float(embeddings, "embeddings", "N, d")
    num_classes = check.positive_int(num_classes, "num_classes")
    labels = check.class_labels(labels, len(embeddings), num_classes)
    rows = at_least_float32(embeddings)
    counts = torch.bincount(labels, minlength=num_classes)
    # A matrix product, because the summation order of index_add varies between runs on CUDA.
    sums = F.one_hot(labels, num_classes).to(rows.dtype).T @ rows
    return sums / counts.clamp(min=1).unsqueeze(1), counts


def mean_embedding_distance(
    real: Tensor,
    synthetic: Tensor,
    real_labels: Tensor | None = None,
    synthetic_labels: Tensor | None = None,
    *,
    num_classes: int | None = None,
    reduction: Literal["sum", "none"] = "sum",
) -> Tensor:
    """Compute DM's loss, the squared L2 distance between real and synthetic mean embeddings, summed over classes.

    The distance of a class equals the squared MMD with a linear kernel.

    Args:
        real: embeddings of real images, float [N, d], without gradients. You can also pass precomputed class means, as
            one row per class.
        synthetic: embeddings of synthetic images, float [M, d].
        real_labels: class indices of the real images, int [N]. Omit `real_labels` and `synthetic_labels` to treat all
            images as a single class.
        synthetic_labels: class indices of the synthetic images, int [M].
        num_classes: number of classes, K. Default: the largest label + 1.
        reduction: "sum" over the classes, or "none" to return the distance of each class.

    Returns:
        A scalar, or [K]. The distance is 0 for a class that is absent from one of the sets.

    Raises:
        TypeError, ValueError: a tensor has a wrong dtype or shape, or labels are given for only one of the sets.

    Paper: Zhao and Bilen, "Dataset Condensation with Distribution Matching" (WACV 2023), the empirical MMD. With logits
    instead of embeddings, the loss is the second term of FedDM's Eq. 8. The loss sums over features and classes, as in
    the authors' code, so a good learning rate for the images depends on the numbers of features and classes.
    """
    require_float(real, "real", "N, d")
    require_float(synthetic, "synthetic", "M, d")
    check.one_of(reduction, "reduction", ("sum", "none"))
    if real.shape[1] != synthetic.shape[1]:
        raise ValueError(f"synthetic must have {real.shape[1]} columns as real has, got {synthetic.shape[1]}")
    if (real_labels is None) != (synthetic_labels is None):
        raise ValueError("real_labels and synthetic_labels must be given together, got only one of them")
    if real_labels is None or synthetic_labels is None:
        real_labels = torch.zeros(len(real), dtype=torch.long, device=real.device)
        synthetic_labels = torch.zeros(len(synthetic), dtype=torch.long, device=synthetic.device)
    real_labels = check.class_labels(real_labels, len(real), num_classes, "real_labels")
    synthetic_labels = check.class_labels(synthetic_labels, len(synthetic), num_classes, "synthetic_labels")
    if num_classes is None:
        num_classes = int(torch.maximum(real_labels.max(), synthetic_labels.max())) + 1
    real_means, real_counts = class_means(real, real_labels, num_classes)
    means, counts = class_means(synthetic, synthetic_labels, num_classes)
    distances = (real_means - means).square().sum(1)
    return reduce(distances * ((real_counts > 0) & (counts > 0)), reduction)


def rbf_mmd(
    x: Tensor,
    y: Tensor,
    *,
    bandwidth: float | None = None,
    kernels: int = 5,
    multiplier: float = 2.0,
    unbiased: bool = False,
) -> Tensor:
    """Compute the squared maximum mean discrepancy (MMD) between two samples. The result is differentiable.

    The kernel is a sum of Gaussian (RBF) kernels of several widths,

        k(a, b) = sum_i exp(-|a - b|^2 / w_i), w_i = bandwidth * multiplier^(i - kernels // 2).

    Args:
        x: rows of the first sample, float [n, d].
        y: rows of the second sample, float [m, d].
        bandwidth: bandwidth of the middle kernel, in units of squared distance. Default: the mean squared distance over
            all pairs of two of the n + m rows of x and y. No gradient flows through this default.
        kernels: number of kernels.
        multiplier: ratio between the widths of successive kernels.
        unbiased: whether to use the U-statistic, which excludes pairs of a row with itself and may be negative, instead
            of the V-statistic, which is at least 0.

    Returns:
        A scalar, which is between 0 and 2 * `kernels` for the V-statistic. It is float32 for half-precision rows.

    Raises:
        TypeError, ValueError: a tensor has a wrong dtype or shape, an option is out of range, or a sample has fewer
            than two rows and `unbiased` is True.

    Paper: Gretton et al., "A Kernel Two-Sample Test" (JMLR 2012), Eq. 5 and 3. The defaults are those of the authors'
    code of FedLGD.
    """
    require_float(x, "x", "n, d")
    require_float(y, "y", "m, d")
    if x.shape[1] != y.shape[1]:
        raise ValueError(f"y must have {x.shape[1]} columns as x has, got {y.shape[1]}")
    kernels = check.positive_int(kernels, "kernels")
    multiplier = check.real_number(multiplier, "multiplier", above=0)
    if check.boolean(unbiased, "unbiased") and min(len(x), len(y)) < 2:
        raise ValueError(f"unbiased needs at least 2 rows in x and in y, got {len(x)} and {len(y)}")

    n, m = len(x), len(y)
    both = at_least_float32(torch.cat([x, y]))
    both = both - both.mean(0).detach()  # keeps all distances, and reduces cancellation in the next line
    squares = both.square().sum(1)
    distances = (squares.unsqueeze(1) + squares - 2 * both @ both.T).clamp(min=0)
    distances = distances.masked_fill(torch.eye(n + m, dtype=torch.bool, device=both.device), 0)
    if bandwidth is None:
        width = distances.detach().sum() / ((n + m) * (n + m - 1))
        width = torch.where(width > 0, width, 1)  # all rows are equal
    else:
        width = distances.new_tensor(check.real_number(bandwidth, "bandwidth", above=0))
    powers = range(-(kernels // 2), kernels - kernels // 2)
    gram = sum(((-distances / (width * multiplier**i)).exp() for i in powers), torch.zeros_like(distances))

    xx, yy, xy = gram[:n, :n], gram[n:, n:], gram[:n, n:]
    if not unbiased:
        return xx.mean() + yy.mean() - 2 * xy.mean()
    within_x = (xx.sum() - xx.diagonal().sum()) / (n * (n - 1))
    within_y = (yy.sum() - yy.diagonal().sum()) / (m * (m - 1))
    return within_x + within_y - 2 * xy.mean()


class RBFMMD(nn.Module):
    """`nn.Module` version of `rbf_mmd`, with options in the constructor and tensors in the call.

    Args:
        bandwidth, kernels, multiplier, unbiased: as in `rbf_mmd`.
    """

    def __init__(
        self, *, bandwidth: float | None = None, kernels: int = 5, multiplier: float = 2.0, unbiased: bool = False
    ) -> None:
        super().__init__()
        self.bandwidth = None if bandwidth is None else check.real_number(bandwidth, "bandwidth", above=0)
        self.kernels = check.positive_int(kernels, "kernels")
        self.multiplier = check.real_number(multiplier, "multiplier", above=0)
        self.unbiased = check.boolean(unbiased, "unbiased")

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Compute the squared MMD between two samples, `x` [n, d] and `y` [m, d]; see `rbf_mmd`."""
        return rbf_mmd(
            x, y, bandwidth=self.bandwidth, kernels=self.kernels, multiplier=self.multiplier, unbiased=self.unbiased
        )


def gradient_distance(
    gradients: Iterable[Tensor],
    targets: Iterable[Tensor],
    *,
    metric: Literal["row_cosine", "mse", "cos"] = "row_cosine",
    eps: float = 1e-6,
) -> Tensor:
    """Compute the distance between two gradients of a network, which gradient matching minimizes.

    - "row_cosine" (DC): each tensor of 2 or more dimensions is viewed as a matrix with one row per output. The distance
      is the sum of 1 - g.t / (|g||t| + eps) over all rows g of the gradients and the corresponding rows t of the
      targets. 1-D tensors, such as biases and norm weights, are ignored.
    - "mse": the sum (not the mean) of the squared differences of all entries, including 1-D tensors.
    - "cos": 1 - cosine of the two gradients, each flattened to one vector including 1-D tensors, with `eps` as above.

    Args:
        gradients: one tensor per parameter, for example from `torch.autograd.grad(..., create_graph=True)`.
        targets: the gradient to match, as detached tensors of the same shapes.
        metric: one of the metrics above.
        eps: constant that is added to the product of the norms, at least 0. If the product is not much larger than
            `eps`, the cosine is too close to 0. With `eps=0`, the distance does not depend on the scale of a row, and
            equal gradients have distance 0.

    Returns:
        A scalar. If one of two corresponding rows is zero, the distance of the pair is 1, and all derivatives of this
        distance are zero. The authors' code instead has a large derivative there, of the order of 1 / eps.

    Raises:
        TypeError: a value is not a floating-point tensor, such as the gradient None of an unused parameter.
        ValueError: the numbers or shapes of the tensors differ, "row_cosine" is used but all tensors are 1-D, or an
            option is out of range.

    Paper: Zhao, Mopuri and Bilen, "Dataset Condensation with Gradient Matching" (ICLR 2021), Eq. 10. The names "mse"
    and "cos" and their definitions follow the authors' code.
    """
    check.one_of(metric, "metric", ("row_cosine", "mse", "cos"))
    eps = check.real_number(eps, "eps", least=0)
    pairs = pair_tensors(gradients, targets, ("gradients", "targets"))
    if metric == "mse":
        return torch.stack([(g - t).square().sum() for g, t in pairs]).sum()
    if metric == "cos":
        whole, target = (torch.cat([tensor.flatten() for tensor in side]).unsqueeze(0) for side in zip(*pairs))
        return _cosine_distances(whole, target, eps)
    matrices = [(g.flatten(1), t.flatten(1)) for g, t in pairs if g.ndim > 1]
    if not matrices:
        raise ValueError("gradients must have a tensor of 2 or more dimensions: 'row_cosine' ignores 1-D tensors")
    return torch.stack([_cosine_distances(g, t, eps) for g, t in matrices]).sum()


def _cosine_distances(a: Tensor, b: Tensor, eps: float) -> Tensor:
    """Return the sum over i of (1 - cos(a_i, b_i)), where a_i and b_i are the rows i of `a` and `b`.

    If a_i or b_i is zero, the pair contributes the constant 1.
    """
    norms = row_norms(a) * row_norms(b)
    defined = norms > 0
    cosines = torch.where(defined, (a * b).sum(1), 0) / torch.where(defined, norms + eps, 1)
    return (1 - cosines).sum()
