"""Pruning of an image pool by the confidence of a model's predictions."""

from __future__ import annotations

import torch
from torch import Tensor

from distillkit._sanity_checks import check_logits
from distillkit._utils import check
from distillkit.rng import as_generator

_STRATEGIES = ("top", "bottom", "random")
_MEASURES = ("max_softmax", "entropy", "max_logit")


def prune_by_confidence(
    logits: Tensor,
    *,
    keep: int | None = None,
    threshold: float | None = None,
    strategy: str = "top",
    per_class: bool = True,
    measure: str = "max_softmax",
    generator: int | torch.Generator = 0,
) -> Tensor:
    """Drop the most confidently predicted images of every predicted class, and return the indices of the kept images.

    The argument `strategy` can instead drop the least confident images, or random images, for comparison.

    Paper: Soni, Saeed and Asano, "Federated Learning with a Single Shared Image" (2024), Algorithm 3.

    Args:
        logits: logits of the images, float [N, K], K >= 2. If you have probabilities `p`, pass `p.log()`, clamped to
            stay finite.
        keep: exact number of images to keep, in [1, N]. A class of n images loses `int(n * (N - keep) / N)`. If more
            than `keep` images remain, further images are removed one by one until `keep` remain, each from the class
            that then has the most images. A class can therefore disappear only if `keep` is less than the number of
            classes.
        threshold: share to drop, in [0, 1), as an alternative to `keep`: a class of n images keeps `n - int(threshold *
            n)`.
        strategy: the images to drop: "top" for the most confident (the paper's choice, which keeps uncertain images),
            "bottom" for the least confident, "random" for a draw without replacement.
        per_class: whether to prune each predicted class separately. If False, all images are pruned together.
        measure: measure of confidence. "max_softmax" is the largest probability, which the authors' code calls entropy;
            "entropy" is minus the Shannon entropy of the softmax; "max_logit" is the paper's Eq. 4.
        generator: seed or generator for `strategy="random"`.

    Returns:
        Indices of the kept images, int64, ascending, on the device of `logits`. Of equally confident images, those with
        the smallest indices are dropped first.

    Raises:
        TypeError, ValueError: an argument has the wrong type or is out of range; the message contains its name.

    Deviation: for `strategy="random"`, the authors' code draws the images to drop with replacement, so it drops only 59
    % of the images at a threshold of 90 %. Here, they are drawn without replacement.
    """
    check.one_of(strategy, "strategy", _STRATEGIES)
    check.one_of(measure, "measure", _MEASURES)
    logits = checked_logits(logits)
    if (keep is None) == (threshold is None):
        raise ValueError(f"pass either keep or threshold, got keep={keep} and threshold={threshold}")
    check.boolean(per_class, "per_class")
    draws = as_generator(generator)
    confidence = _confidence(logits, measure).cpu()
    if strategy == "random":
        confidence = torch.randperm(len(logits), generator=draws).double()
    groups = logits.argmax(1).cpu() if per_class else torch.zeros(len(logits), dtype=torch.int64)
    classes, sizes = groups.unique(return_counts=True)
    if threshold is not None:
        threshold = check.real_number(threshold, "threshold", least=0.0, below=1.0)
        drops = [int(threshold * n) for n in sizes.tolist()]
    else:
        assert keep is not None
        drops = _drops(sizes, check.positive_int(keep, "keep", most=len(logits)))
    kept = torch.ones(len(logits), dtype=torch.bool)
    for c, drop in zip(classes, drops, strict=True):
        members = (groups == c).nonzero().flatten()
        kept[members[confidence[members].argsort(descending=strategy != "bottom", stable=True)[:drop]]] = False
    return kept.nonzero().flatten().to(logits.device)


def _confidence(logits: Tensor, measure: str) -> Tensor:
    if measure == "max_logit":
        return logits.double().amax(1)
    log_probabilities = logits.double().log_softmax(1)
    if measure == "max_softmax":
        return log_probabilities.amax(1)
    return -torch.special.entr(log_probabilities.exp()).sum(1)


def _drops(sizes: Tensor, keep: int) -> list[int]:
    total = int(sizes.sum())
    kept = sizes - sizes * (total - keep) // total
    for _ in range(int(kept.sum()) - keep):
        kept[kept.argmax()] -= 1
    return (sizes - kept).tolist()


def checked_logits(logits: Tensor) -> Tensor:
    """Check that `logits` are finite, [N, K] with K at least 2, and return them detached.

    Raises:
        TypeError, ValueError: the logits have another shape or type, or are not finite.
    """
    if check.matrix(logits, "logits").shape[1] < 2:
        raise ValueError("logits must have at least 2 columns, got 1; for one logit z of two classes pass [0, z]")
    check_logits(logits.detach(), "the network that computed logits", refuse=False)
    return logits.detach()
