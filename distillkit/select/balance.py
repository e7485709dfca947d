"""Selection of images by their distances to k-means centroids, with balanced predicted classes."""

from __future__ import annotations

import torch
from torch import Tensor

from distillkit._utils import check
from distillkit._utils.user_warnings import warn
from distillkit.rng import as_generator

_ORDERS = ("easy", "hard", "mixed")


def kmeans_balance(
    embeddings: Tensor,
    predicted: Tensor,
    *,
    keep: int,
    clusters: int = 1000,
    order: str = "hard",
    balancing: float = 1.0,
    batch_size: int | None = None,
    generator: int | torch.Generator = 0,
) -> Tensor:
    """Select `keep` images balanced over predicted classes, ranked by distance to their k-means centroid.

    First, the `int(balancing * keep / P)` highest-ranked images of each of the P predicted classes are selected. If a
    class has fewer images, all of them are selected. Then the highest-ranked of all other images are added, until
    `keep` images are selected.

    Args:
        embeddings: embeddings of the images, float [N, d].
        predicted: class that the model predicts for each image, int [N].
        keep: number of images to select, in [1, N].
        clusters: number of centroids; at most N are used.
        order: ranking of the images: "easy" for images near their centroid first, "hard" for images far from it first,
            "mixed" to alternate between the nearest and the farthest.
        balancing: share of `keep` that is divided equally among the predicted classes, in [0, 1].
        batch_size: number of images per batch of the faster `MiniBatchKMeans`; None for Lloyd's algorithm
            (scikit-learn's `KMeans`, one initialization).
        generator: seed or generator for k-means.

    Returns:
        Indices of the selected images, int64 [keep], ascending, on the device of `embeddings`. K-means itself runs on
        the CPU.

    Raises:
        TypeError, ValueError: an argument has the wrong type or is out of range; the message contains its name.

    Deviation from Soni, Saeed and Asano, "Federated Learning with a Single Shared Image" (2024): with "easy", the
    authors' code first selects `int(balancing * keep / P)` images of each class too, but half of them among the nearest
    and half among the farthest images. In a small class, the two halves overlap, so fewer images are selected.
    """
    check.one_of(order, "order", _ORDERS)
    balancing = check.real_number(balancing, "balancing", least=0.0, most=1.0)
    embeddings = check.matrix(embeddings, "embeddings")
    predicted = check.class_labels(predicted, len(embeddings), None, "predicted").cpu()
    keep = check.positive_int(keep, "keep", most=len(embeddings))
    if keep == len(embeddings):
        return torch.arange(keep, device=embeddings.device)
    distances = centroid_distances(embeddings, clusters=clusters, batch_size=batch_size, generator=generator).cpu()
    classes = predicted.unique()
    minimum = int(balancing * keep / len(classes))
    chosen = torch.zeros(len(embeddings), dtype=torch.bool)
    for c in classes:
        members = (predicted == c).nonzero().flatten()
        chosen[members[_ranked(distances[members], order)[:minimum]]] = True
    rest = (~chosen).nonzero().flatten()
    chosen[rest[_ranked(distances[rest], order)[: keep - int(chosen.sum())]]] = True
    return chosen.nonzero().flatten().to(embeddings.device)


def centroid_distances(
    embeddings: Tensor, *, clusters: int = 1000, batch_size: int | None = None, generator: int | torch.Generator = 0
) -> Tensor:
    """Compute the Euclidean distance of each embedding to its k-means centroid, float64 [N].

    Typical images have a small distance. K-means runs on one thread, so the result does not depend on the number of
    cores.

    Args:
        embeddings, clusters, batch_size, generator: arguments of `kmeans_balance`.

    Raises:
        TypeError, ValueError: an argument has the wrong type or is out of range; the message contains its name.
    """
    from sklearn.cluster import KMeans, MiniBatchKMeans
    from threadpoolctl import threadpool_limits

    points = check.matrix(embeddings, "embeddings").detach().cpu()
    points = points if points.dtype == torch.float64 else points.float()
    clusters = check.positive_int(clusters, "clusters")
    if clusters >= len(points):
        warn(
            f"clusters={clusters} for {len(points)} embeddings: each is its own centroid at distance 0, so distances "
            "do not rank them; use fewer clusters"
        )
        clusters = len(points)
    seed = int(torch.randint(2**31 - 1, (), generator=as_generator(generator)))
    if batch_size is None:
        kmeans = KMeans(clusters, n_init=1, random_state=seed)
    else:
        batch_size = check.positive_int(batch_size, "batch_size")
        kmeans = MiniBatchKMeans(clusters, n_init=1, random_state=seed, batch_size=batch_size)
    with threadpool_limits(1):
        own = kmeans.fit_predict(points.numpy())
    centroids = torch.from_numpy(kmeans.cluster_centers_)[torch.from_numpy(own).long()]
    return (points.double() - centroids.double()).norm(dim=1).to(embeddings.device)


def _ranked(distances: Tensor, order: str) -> Tensor:
    near = distances.argsort(stable=True)
    if order == "easy":
        return near
    if order == "hard":
        return near.flip(0)
    mixed = torch.empty_like(near)
    half = -(-len(near) // 2)
    mixed[0::2], mixed[1::2] = near[:half], near[half:].flip(0)
    return mixed
