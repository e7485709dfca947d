"""Parts of a distribution-matching step: mean embeddings of real images, and pixel gradients of synthetic images."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from distillkit._utils import check
from distillkit._utils.batches import uses_batch_statistics
from distillkit.chunking import chunk_size, forward_chunks
from distillkit.networks._base import Network

MATCHES = ("embedding", "embedding+logits")

Match = Callable[[Tensor, Tensor], Tensor]
"""Loss of one class: a function of the embeddings of its real images [n, d] and synthetic images [m, d]."""

__all__ = [
    "MATCHES",
    "Match",
    "class_distance",
    "class_groups",
    "distance_to_means",
    "embed_real",
    "embedding_means",
]


def embed_real(network: Network, images: Tensor, chunk: int | None) -> Tensor:
    """Return the embeddings [N, d] of real images, computed in chunks without gradients.

    Args:
        network: network with `features`. If it uses batch statistics, all images are processed together.
        images: real images, float [N, C, H, W].
        chunk: number of images per forward pass. Default: see `chunking.chunk_size`.
    """
    limit = len(images) if uses_batch_statistics(network) else chunk_size(images, chunk)
    return torch.cat(list(forward_chunks(network.features, images, limit)))


@torch.no_grad()
def embedding_means(
    network: Network, images: Tensor, counts: Sequence[int], *, match: str = "embedding", chunk: int | None = None
) -> Tensor:
    """Return the mean embedding of each class of real images.

    The means are the targets of a distribution-matching step. Use this function with `distance_to_means` to write your
    own loop. `embedding_means` processes the images in chunks and records no autograd graph.

    Args:
        network: network with `features` and `classifier`. If it uses batch statistics, all images are processed
            together, so that the statistics come from mixed classes.
        images: real images, float [N, C, H, W], sorted by class.
        counts: number of images of each class. All counts are positive, and their sum is N.
        match: `"embedding"`, or `"embedding+logits"` to append the mean logits.
        chunk: number of images per forward pass. Default: see `chunking.chunk_size`.

    Returns:
        The means, float [K, d], for the K classes in `counts`. With `"embedding+logits"`, d is the sum of the
        embedding's size and the number of logits.

    Raises:
        TypeError, ValueError: the network has no `features` and `classifier`, the images are invalid, or `counts` does
            not sum to N.
    """
    counts = _checked_counts(network, images, counts, match)
    limit = chunk_size(images, chunk, chunked_stem=getattr(network, "chunked_stem", False))
    limit = len(images) if uses_batch_statistics(network) else limit
    shares = torch.block_diag(*(images.new_full((1, n), 1 / n) for n in counts)).split(limit, 1)
    embeddings = forward_chunks(lambda part: _embed(network, part, match), images, limit)
    first = next(embeddings).to(images.dtype)
    means = images.new_zeros(len(counts), first.shape[1]).addmm_(shares[0], first, beta=0)  # not rounded by autocast
    for share, embedding in zip(shares[1:], embeddings, strict=True):
        means.addmm_(share, embedding.to(images.dtype))
    return means


def distance_to_means(
    network: Network,
    targets: Tensor,
    images: Tensor,
    counts: Sequence[int],
    *,
    match: str = "embedding",
    augment: Callable[[Tensor, int], Tensor] | None = None,
    chunk: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the distance between the mean embeddings of synthetic and real images, and its gradient.

    To write your own loop, call `embedding_means` on real images, call this function, and take an optimizer step with
    the gradient.

    The distance is a sum over classes. The function therefore divides the classes into groups that fit into a chunk,
    and runs one forward and backward pass for each group. A class that exceeds a chunk is passed in pieces. On a CPU,
    this is faster than a single pass, and the gradient is the same. If batch norm uses batch statistics, all classes
    are processed together.

    Args:
        network: network with `features` and `classifier`. The function is faster if the parameters do not require
            gradients.
        targets: the mean embeddings of real images [K, d], from `embedding_means` with the same `match`.
        images: the synthetic images [N, C, H, W], sorted by class.
        counts: number of synthetic images of each of the K classes. All counts are positive, and their sum is N.
        match: quantity whose means are compared, `"embedding"` or `"embedding+logits"`; see `embedding_means`.
        augment: function that augments the images of one class, or None. Its arguments are the images and the index of
            the class in `counts`, 0 to K-1.
        chunk: number of images per pass. Default: see `chunking.chunk_size`.

    Returns:
        The distance, a scalar, and its gradient with respect to the images, [N, C, H, W]. The distance is the sum over
        k of ||targets[k] - mean embedding of class k||^2.
    """
    counts = _checked_counts(network, images, counts, match)
    k = len(counts)

    def distance(group: slice, embeddings: Sequence[Tensor]) -> Tensor:
        return (targets[group] - torch.stack([own.mean(0) for own in embeddings])).square().sum()

    if not isinstance(targets, Tensor) or targets.ndim != 2 or (len(targets), targets.dtype) != (k, images.dtype):
        came = f"{targets.dtype} {list(targets.shape)}" if isinstance(targets, Tensor) else type(targets).__name__
        raise ValueError(f"targets must be {images.dtype} [{k}, d], a mean for each of the counts, got {came}")
    check.has_values(targets, "targets")
    return class_distance(network, images, counts, distance, match=match, augment=augment, chunk=chunk)


def class_distance(
    network: Network,
    images: Tensor,
    counts: Sequence[int],
    distance: Callable[[slice, Sequence[Tensor]], Tensor],
    *,
    match: str = "embedding",
    augment: Callable[[Tensor, int], Tensor] | None = None,
    chunk: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Sum a given distance over all classes, and return it with its gradient with respect to synthetic images.

    The function `distance` compares the embeddings of a class's synthetic images with a target, such as the mean
    embedding of the class's real images.

    Args:
        network, images, counts, match, augment, chunk: as in `distance_to_means`.
        distance: function that returns the distance for a group of classes, a scalar that is summed over these classes.
            Its arguments are a `slice` that selects the classes of the group from `counts`, and a list with the
            embeddings [n, d] of the synthetic images of each of these classes.

    Returns:
        The sum of the distance over all classes, a scalar, and its gradient with respect to `images`, [N, C, H, W].
    """
    loss, gradients = images.new_zeros(()), []
    limit = len(images) if uses_batch_statistics(network) else chunk_size(images, chunk)
    parts = images.detach().split(list(counts))
    for group in class_groups(network, images, counts, chunk):
        leaf = torch.cat(parts[group]).requires_grad_()
        sizes = list(counts[group])
        with torch.enable_grad():
            inputs = leaf
            if augment is not None:
                pairs = enumerate(leaf.split(sizes), group.start)
                inputs = torch.cat([augment(own, position) for position, own in pairs])
                check.differentiable(inputs, "augment", "its images")
            # Pieces of at most a chunk, so that no pass of a large class has larger tensors than other passes.
            pieces = [piece.detach().requires_grad_() for piece in inputs.split(limit)]
            outputs = [_embed(network, piece, match) for piece in pieces]
            check.differentiable(outputs[0], "networks", "their images")
            embeddings = torch.cat([output.detach() for output in outputs]).requires_grad_()
            value = distance(group, embeddings.split(sizes))
            rows = torch.autograd.grad(value, embeddings)[0].split(limit)
            own = torch.cat([torch.autograd.grad(*call)[0] for call in zip(outputs, pieces, rows, strict=True)])
            gradients.append(own if augment is None else torch.autograd.grad(inputs, leaf, own)[0])
        loss += value.detach()
    return loss, torch.cat(gradients)


def class_groups(network: Network, images: Tensor, counts: Sequence[int], chunk: int | None) -> Iterator[slice]:
    """Divide consecutive classes into groups whose images fit into a chunk. A class that alone exceeds a chunk forms
    its own group.

    If batch norm uses batch statistics, there is only one group, so that the statistics come from mixed classes.

    Args:
        network: the network that processes the images.
        images: float [N, C, H, W]. Only their shape and device are used, to choose the default of `chunk`.
        counts: number of images of each class.
        chunk: number of images per pass. Default: see `chunking.chunk_size`.

    Yields:
        A slice of `counts` for each group.
    """
    limit = sum(counts) if uses_batch_statistics(network) else chunk_size(images, chunk)
    first, size = 0, 0
    for position, count in enumerate(counts):
        if size and size + count > limit:
            yield slice(first, position)
            first, size = position, 0
        size += count
    yield slice(first, len(counts))


def _embed(network: Network, images: Tensor, match: str) -> Tensor:
    embedding = network.features(images)
    return embedding if match == "embedding" else torch.cat([embedding, network.classifier(embedding)], 1)


def _checked_counts(network: Network, images: Tensor, counts: Sequence[int], match: str) -> list[int]:
    """Check the arguments of `embedding_means`, and return the numbers of images per class (`counts`) as ints.

    Image values are not checked, to save time.
    """
    check.one_of(match, "match", MATCHES)
    if not callable(getattr(network, "features", None)) or isinstance(network, type):
        raise TypeError(f"network must have features and classifier (networks.split), got {type(network).__name__}")
    if not isinstance(images, Tensor) or not images.is_floating_point() or images.ndim != 4:
        check.batch_of_images(images)
    check.has_values(images, "images")
    found = [check.positive_int(n, "counts") for n in check.sequence(counts, "counts", "image counts, one per class")]
    if not found or sum(found) != len(images):
        raise ValueError(f"counts must add up to the number of images, {len(images)}, got {found}")
    return found
