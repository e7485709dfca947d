"""Selection of images by k-means balancing followed by confidence pruning."""

from __future__ import annotations

import torch
from torch import Tensor

from distillkit._utils import check
from distillkit.rng import as_generator
from distillkit.select.balance import kmeans_balance
from distillkit.select.prune import checked_logits, prune_by_confidence

__all__ = ["select"]


def select(
    embeddings: Tensor,
    logits: Tensor,
    *,
    keep: int,
    kmeans_share: float = 0.5,
    released_threshold: float | None = None,
    clusters: int = 1000,
    order: str = "hard",
    balancing: float = 1.0,
    strategy: str = "top",
    measure: str = "max_softmax",
    batch_size: int | None = None,
    generator: int | torch.Generator = 0,
) -> Tensor:
    """Select `keep` of N images as in the single-image method: balance by k-means clusters, then prune by confidence.

    Args:
        embeddings: embeddings of the pool, float [N, d], from the model that also computed the logits.
        logits: logits of the pool, float [N, K], K >= 2. The classes are the model's predictions; no label is used.
        keep: number of images to select, in [1, N].
        kmeans_share: share of the reduction done by k-means, in [0, 1]: k-means keeps `M = N^(1 - share) * keep^share`
            images, and pruning reduces M to `keep`. At 0.5 both steps keep the same fraction: 50,000 -> 15,811 ->
            5,000. 0 means pruning only, 1 means k-means only. The paper removes 90 % by pruning and keeps 5,000 of
            50,000, which corresponds to 0.
        released_threshold: threshold of the authors' rule, which replaces `kmeans_share`: k-means keeps `int(keep / (1
            - threshold))` images, or all if there are fewer, then every predicted class of n images loses
            `int(threshold * n)`. With the authors' 50,000 images, keep 5,000 and threshold 0.9, k-means keeps
            everything, so the paper's rows "KMeans + Entropy" use pruning only. The number of selected images is only
            approximately `keep`.
        clusters, order, balancing, batch_size: as in `kmeans_balance`.
        strategy, measure: as in `prune_by_confidence`.
        generator: seed or generator for k-means, then for the random strategy.

    Returns:
        int64 [keep] indices, ascending, on the device of `embeddings`. With `released_threshold` their number may
        differ.

    Raises:
        TypeError, ValueError: an invalid argument, which is named.
    """
    generator = as_generator(generator)
    logits = checked_logits(logits)
    n = len(logits)
    if isinstance(embeddings, Tensor) and len(embeddings) != n:
        raise ValueError(f"embeddings and logits must have one row per image, got {len(embeddings)} and {n} rows")
    keep = check.positive_int(keep, "keep", most=n)
    if released_threshold is None:
        share = check.real_number(kmeans_share, "kmeans_share", least=0.0, most=1.0)
        middle = min(max(round(n ** (1 - share) * keep**share), keep), n)
    else:
        released_threshold = check.real_number(released_threshold, "released_threshold", least=0.0, below=1.0)
        middle = min(int(keep / (1 - released_threshold)), n)
    balanced = kmeans_balance(
        embeddings,
        logits.argmax(1),
        keep=middle,
        clusters=clusters,
        order=order,
        balancing=balancing,
        batch_size=batch_size,
        generator=generator,
    ).to(logits.device)
    pruned = prune_by_confidence(
        logits[balanced],
        keep=keep if released_threshold is None else None,
        threshold=released_threshold,
        strategy=strategy,
        measure=measure,
        generator=generator,
    )
    return balanced[pruned].to(embeddings.device)
