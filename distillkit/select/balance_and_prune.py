"""Selection of images by k-means balancing followed by confidence pruning."""

from __future__ import annotations

import torch
from torch import Tensor

from distillkit._utils import check
from distillkit.rng import as_generator
from distillkit.select.balance import kmeans_balance
from distillkit.select.prune import checked_logits, prune_by_confidence


def select(
    embeddings: Tensor,
    logits: Tensor,
    *,
    keep: int,
    kmeans_share: float = 0.5,
    threshold: float | None = None,
    clusters: int = 1000,
    order: str = "hard",
    balancing: float = 1.0,
    strategy: str = "top",
    measure: str = "max_softmax",
    batch_size: int | None = None,
    generator: int | torch.Generator = 0,
) -> Tensor:
    """Select `keep` of N images: balance them with k-means, then prune them by confidence.

    Paper: Soni, Saeed and Asano, "Federated Learning with a Single Shared Image" (2024).

    Args:
        embeddings: embeddings of the N images, float [N, d], from the model that also computed the logits.
        logits: logits of the N images, float [N, K], K >= 2. The predicted class of an image is that of its largest
            logit; no labels are used.
        keep: number of images to select, in [1, N].
        kmeans_share: share s of the reduction that k-means does, in [0, 1]: k-means keeps M = N^(1 - s) * keep^s
            images, and pruning reduces M to `keep`. At 0.5, both steps keep the same fraction: 50,000 -> 15,811 ->
            5,000. At 0, there is only pruning; at 1, there is only k-means. The paper selects 5,000 of 50,000 images by
            pruning only, so its share is 0.
        threshold: threshold t of the rule in the authors' code, which replaces `kmeans_share`. K-means keeps
            `int(keep / (1 - t))` images, or all if there are fewer. Pruning then removes `int(t * n)` of the n images
            of every predicted class, so the number of selected images is only approximately `keep`. With the authors'
            values (50,000 images, `keep` 5,000 and t = 0.9), k-means therefore keeps all images.
        clusters, order, balancing, batch_size: arguments of `kmeans_balance`.
        strategy, measure: arguments of `prune_by_confidence`.
        generator: seed or generator for k-means, and for `strategy="random"`.

    Returns:
        Indices of the selected images, int64 [keep], ascending, on the device of `embeddings`. With
        `threshold`, their number may differ from `keep`.

    Raises:
        TypeError, ValueError: an argument has the wrong type or is out of range; the message contains its name.
    """
    generator = as_generator(generator)
    logits = checked_logits(logits)
    n = len(logits)
    if isinstance(embeddings, Tensor) and len(embeddings) != n:
        raise ValueError(f"embeddings and logits must have one row per image, got {len(embeddings)} and {n} rows")
    keep = check.positive_int(keep, "keep", most=n)
    if threshold is None:
        share = check.real_number(kmeans_share, "kmeans_share", least=0.0, most=1.0)
        middle = min(max(round(n ** (1 - share) * keep**share), keep), n)
    else:
        threshold = check.real_number(threshold, "threshold", least=0.0, below=1.0)
        middle = min(int(keep / (1 - threshold)), n)
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
        keep=keep if threshold is None else None,
        threshold=threshold,
        strategy=strategy,
        measure=measure,
        generator=generator,
    )
    return balanced[pruned].to(embeddings.device)
