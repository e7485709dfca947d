"""Inference of labels from the gradient of the last layer: the class of one image, or the class counts of a batch."""

from __future__ import annotations

import torch
from torch import Tensor

from attacks.inversion._inputs import check_bias
from distillkit._utils import check
from distillkit._utils.user_warnings import warn


def infer_label(weight_gradient: Tensor) -> int:
    """Return the class of the single image behind a gradient (iDLG).

    With softmax cross-entropy, row c of the last weight's gradient is (p_c - y_c) a. Here a are the features of the
    image, p_c is the predicted probability of class c, and y_c is 1 for the true class and 0 otherwise. Only the row of
    the true class has a negative factor, so only this row points in the opposite direction to all others. The result is
    exact, and the function needs neither the network nor the image. A client that clips the gradient, or sends only the
    signs of its values, does not hide the class. If the gradient has noise, use `class_counts(bias_gradient, 1)`, which
    gives a best guess from the bias gradient. This function refuses gradients that one image cannot have caused.

    Args:
        weight_gradient: gradient of the last linear layer's weight, float [K, D], for at least 3 classes. With two
            classes, the rows are opposite for either label.

    Returns:
        The class, in [0, K). The gradient of several images of one class may look like that of one image.

    Raises:
        TypeError, ValueError: the tensor is invalid, or not exactly one row points in the opposite direction to all
            other rows. Causes are images of several classes, noise, another loss, and probabilities rounded to 0.

    Paper: Zhao, Mopuri and Bilen, "iDLG: Improved Deep Leakage from Gradients" (2020). Deviation: the authors' code
    takes the row with the smallest sum, which is right for features that are never negative; we compare whole rows, and
    require that exactly one class fits.
    """
    rows = check.matrix(weight_gradient, "weight_gradient").detach().double()
    if len(rows) < 3:
        raise ValueError(
            f"weight_gradient must have a row for each of at least 3 classes, got {list(rows.shape)}; for two classes "
            "call class_counts(bias_gradient, 1)"
        )
    rows = rows / rows.abs().amax().clamp(min=torch.finfo(torch.float64).tiny)  # so that no product underflows
    products = (rows @ rows.T).fill_diagonal_(-1)
    against = ((products <= 0).all(1) & rows.ne(0).any(1)).nonzero().flatten().tolist()
    if len(against) != 1:
        raise ValueError(
            "weight_gradient must have exactly one row that points against all others, as for one image with "
            f"cross-entropy, got {len(against)}; for a batch or a noisy gradient use class_counts(bias_gradient, count)"
        )
    return int(against[0])


def class_counts(bias_gradient: Tensor, count: int, predictions: Tensor | None = None) -> Tensor:
    """Return the number of images per class in a batch, from the gradient of the last layer's bias.

    With softmax cross-entropy averaged over N images, entry k of this gradient is g_k = p_k - n_k / N, where p_k is the
    mean predicted probability of class k, and n_k is the number of its images. Therefore n_k = N (p_k - g_k). The
    attacker does not know the predictions for the private images, but has the network: early in training, its mean
    prediction for any other images is close enough. The result is the nearest vector of nonnegative whole counts that
    sum to N. It is exact if every p_k is known to better than 1/(2N).

    Args:
        bias_gradient: gradient of the batch's mean loss, float [K] with K at least 2, neither clipped nor scaled. With
            `count` 1 and no `predictions`, a scaled gradient can also be used, because the result is the class with the
            smallest entry.
        count: number of images in the batch, N.
        predictions: class probabilities that the network predicts: a mean prediction, float [K], or the predictions
            for M public or random images, [M, K], which are averaged. The default is a uniform prediction, as of an
            untrained network.

    Returns:
        Counts, int64 [K], which sum to `count`.

    Warns:
        UserWarning: no batch of `count` images has such a gradient, for example because it is scaled or noisy.

    Raises:
        TypeError, ValueError: a value is not finite, the shapes do not fit, or the predictions are not probabilities
            (for example, if they are logits).

    Paper: Geng et al., "Towards General Deep Leakage in Federated Learning" (2021), which also restores labels that
    occur several times in a batch. Deviation: we return the nearest counts with the right sum, instead of rounding each
    class separately.
    """
    bias = check_bias(bias_gradient, 2)
    count = check.positive_int(count, "count")
    expected = torch.full_like(bias, 1 / len(bias)) if predictions is None else _mean_prediction(predictions, bias)
    total, largest = float(bias.sum()), float(bias.abs().max())
    if (count > 1 or predictions is not None) and (count * abs(total) >= 0.5 or largest > 1):
        warn(
            f"bias_gradient has the sum {total:.3g} and entries up to {largest:.3g}, but the gradient of the mean "
            f"cross-entropy of {count} images has the sum 0 and entries in [-1, 1]: noise, a scale or another loss "
            "makes the counts unreliable; divide a sum over images by their number, or an update by -lr"
        )
    wanted = count * (expected - bias)
    found = torch.zeros_like(wanted)
    # Greedy assignment gives the nearest vector of whole numbers with this sum.
    for _ in range(count):
        found[(wanted - found).argmax()] += 1
    return found.long()


def _mean_prediction(predictions: Tensor, bias: Tensor) -> Tensor:
    one = isinstance(predictions, Tensor) and predictions.ndim == 1
    rows = check.matrix(predictions.unsqueeze(0) if one else predictions, "predictions").detach().double()
    if rows.shape[1] != len(bias):
        raise ValueError(f"predictions must have a column for each of {len(bias)} classes, got {list(rows.shape)}")
    if float(rows.min()) < 0 or not bool(((rows.sum(1) - 1).abs() < 1e-3).all()):
        raise ValueError(
            "predictions must be probabilities that sum to 1 for every image; for logits use logits.softmax(1)"
        )
    return rows.mean(0).to(bias.device)
