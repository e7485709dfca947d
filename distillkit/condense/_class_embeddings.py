"""Embeddings of the images of each class, and gradients of a function of these embeddings, in chunks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import Tensor

from distillkit._utils import check
from distillkit._utils.batches import uses_batch_statistics
from distillkit.chunking import chunk_size, forward_chunks
from distillkit.condense._parallel import ParallelMap
from distillkit.networks._base import Network
from distillkit.sets._stored import RealImages

MATCHES = ("embedding", "embedding+logits")

Loss = Callable[[Sequence[Tensor], Sequence[Tensor]], Tensor]
"""Sum of a loss over several classes: a function of their targets, and of the embeddings of their synthetic images."""

Embed = Callable[[Network, Tensor, Sequence[int]], Iterable[Tensor]]
"""Function of a network, images sorted by class and their numbers per class that returns a target of each class."""


def embed(network: Network, images: Tensor, match: str) -> Tensor:
    """Return the embeddings [N, d] of images, with the logits appended if `match` is "embedding+logits"."""
    embedding = network.features(images)
    if not isinstance(embedding, Tensor) or not embedding.is_floating_point():
        came = embedding.dtype if isinstance(embedding, Tensor) else type(embedding).__name__
        raise ValueError(f"the network {type(network).__name__} must return floating embeddings [N, d], got {came}")
    return embedding if match == "embedding" else torch.cat([embedding, network.classifier(embedding)], 1)


def embed_images(network: Network, images: Tensor, counts: Sequence[int], *, chunk: int | None) -> Sequence[Tensor]:
    """Return the embeddings [n, d] of each class's images, computed in chunks without gradients.

    Args:
        network, images, counts, chunk: as in `embedding_means`.
    """
    limit = len(images) if uses_batch_statistics(network) else chunk_size(images, chunk)
    return torch.cat(list(forward_chunks(network.features, images, limit))).split(list(counts))


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
    counts = check_counts(network, images, counts, match)
    limit = len(images) if uses_batch_statistics(network) else _limit(network, images, chunk)
    return _means(network, images.split(limit), counts, limit, images, match)


def class_means(
    parallel: ParallelMap, real: RealImages, rows: Sequence[Tensor], *, match: str, chunk: int | None
) -> list[Tensor]:
    """Return the mean embedding of all images of each class, reading one chunk of images at a time.

    Args:
        parallel: map with the network, which must not use batch statistics.
        real: the set.
        rows: indices of the images of each class.
        match, chunk: as in `embedding_means`.
    """
    like, counts = real._empty.images, [len(own) for own in rows]
    limit = _limit(parallel.network, like, chunk)

    def group_means(network: Network, group: slice) -> Tensor:
        parts = map(real._take, torch.cat([*rows[group]]).split(limit))
        return _means(network, parts, counts[group], limit, like, match)

    groups = list(_class_groups(parallel.network, like, counts, chunk))
    return [own for means in parallel(group_means, groups) for own in means]


def _limit(network: Network, images: Tensor, chunk: int | None) -> int:
    return chunk_size(images, chunk, chunked_stem=getattr(network, "chunked_stem", False))


@torch.no_grad()
def _means(
    network: Network, parts: Iterable[Tensor], counts: Sequence[int], limit: int, like: Tensor, match: str
) -> Tensor:
    """Return the mean embedding [K, d] of each class of images that are given in parts of `limit` images."""
    shares = torch.block_diag(*(like.new_full((1, n), 1 / n) for n in counts)).split(limit, 1)
    embeddings = forward_chunks(lambda part: embed(network, part, match), parts, limit)
    first = next(embeddings).to(like.dtype)
    means = like.new_zeros(len(counts), first.shape[1]).addmm_(shares[0], first, beta=0)  # not rounded by autocast
    for share, embedding in zip(shares[1:], embeddings, strict=True):
        means.addmm_(share, embedding.to(like.dtype))
    return means


def embed_classes(
    parallel: ParallelMap,
    batch: Callable[[int], Tensor],
    counts: Sequence[int],
    embed: Embed,
    *,
    like: Tensor,
    chunk: int | None,
) -> list[Tensor]:
    """Embed a batch of images of each class without gradients, with groups of classes in parallel.

    Args:
        parallel: map with the network.
        batch: function that returns the images [n, C, H, W] of a class, given the index of the class in `counts`.
        counts: number of images of each class.
        embed: `embed_images` or `embedding_means`, with their options.
        like: images whose shape and device determine the default of `chunk`.
        chunk: number of images per pass.

    Returns:
        What `embed` returns for each class.
    """

    def embed_group(network: Network, group: slice) -> Iterable[Tensor]:
        batches = [batch(position) for position in range(len(counts))[group]]
        return embed(network, torch.cat(batches), counts[group])

    groups = list(_class_groups(parallel.network, like, counts, chunk))
    return [own for embeddings in parallel(embed_group, groups) for own in embeddings]


def class_distance(
    images: Tensor,
    parallel: ParallelMap,
    counts: Sequence[int],
    targets: Sequence[Tensor],
    loss: Loss,
    *,
    match: str = "embedding",
    augment: Callable[[Tensor, int], Tensor] | None = None,
    chunk: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the sum of a loss over all classes, and its gradient with respect to synthetic images.

    Groups of classes are processed in parallel.

    Args:
        images, counts, match, augment, chunk: as in `distance_to_means`.
        parallel: map with the network.
        targets: target of each class, such as the mean embedding of its real images.
        loss: function of the targets of several classes and the embeddings [m, d] of their synthetic images. It returns
            the sum of the loss over these classes, a scalar.
    """
    whole, parts = uses_batch_statistics(parallel.network), images.detach().split(list(counts))
    limit = len(images) if whole else chunk_size(images, chunk)

    def group_distance(network: Network, group: slice) -> tuple[Tensor, Tensor]:
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
            outputs = [embed(network, piece, match) for piece in pieces]
            check.differentiable(outputs[0], "networks", "their images")
            embeddings = torch.cat([output.detach() for output in outputs]).requires_grad_()
            value = loss(targets[group], embeddings.split(sizes))
            rows = torch.autograd.grad(value, embeddings)[0].split(limit)
            own = torch.cat([torch.autograd.grad(*call)[0] for call in zip(outputs, pieces, rows, strict=True)])
            gradient = own if augment is None else torch.autograd.grad(inputs, leaf, own)[0]
        return value.detach(), gradient

    groups = list(_class_groups(parallel.network, images, counts, chunk))
    losses, gradients = zip(*parallel(group_distance, groups), strict=True)
    return torch.stack(losses).sum(), torch.cat(gradients)


def _class_groups(network: Network, images: Tensor, counts: Sequence[int], chunk: int | None) -> Iterator[slice]:
    """Divide consecutive classes into groups whose images fit into a chunk. A class that alone exceeds a chunk forms
    its own group.

    If batch norm uses batch statistics, there is only one group, so that the statistics come from mixed classes.
    """
    limit = sum(counts) if uses_batch_statistics(network) else chunk_size(images, chunk)
    first, size = 0, 0
    for position, count in enumerate(counts):
        if size and size + count > limit:
            yield slice(first, position)
            first, size = position, 0
        size += count
    yield slice(first, len(counts))


def check_counts(network: Network, images: Tensor, counts: Sequence[int], match: str) -> list[int]:
    """Check the arguments of `embedding_means`, and return the numbers of images per class (`counts`) as ints.

    Image values are not checked, to save time.
    """
    check.one_of(match, "match", MATCHES)
    if not callable(getattr(network, "features", None)) or isinstance(network, type):
        raise TypeError(f"network must have features and classifier (networks.split), got {type(network).__name__}")
    check.batch_of_images(images, values=False)
    check.has_values(images, "images")
    found = [check.positive_int(n, "counts") for n in check.sequence(counts, "counts", "image counts, one per class")]
    if not found or sum(found) != len(images):
        raise ValueError(f"counts must add up to the number of images, {len(images)}, got {found}")
    return found
