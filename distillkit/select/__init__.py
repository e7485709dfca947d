"""Selection of a small, balanced and informative part of a large image pool by a model's embeddings and predictions.

The package contains the k-means balancing (Eq. 1-3, Algorithm 2) and the confidence pruning (Eq. 4, Algorithm 3) of
"Federated Learning with a Single Shared Image" (Soni, Saeed, Asano, 2024). The defaults of `clusters`, `order`,
`balancing` and `strategy` are those of the paper's section 4.1. `kmeans_share` of `select` determines how much
of the reduction is done by the balancing, and how much by the pruning. Every selector returns indices into the pool:
int64, ascending, without duplicates.
"""

from distillkit.select.balance import centroid_distances, kmeans_balance
from distillkit.select.balance_and_prune import select
from distillkit.select.prune import prune_by_confidence

__all__ = ["centroid_distances", "kmeans_balance", "prune_by_confidence", "select"]
__dir__ = __all__.copy
