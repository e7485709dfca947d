"""Coresets: real images chosen at random, by herding, or as greedy k-centres; the baselines of condensation."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from distillkit._sanity_checks import check_class_sizes
from distillkit._utils import check
from distillkit._utils.progress import bar
from distillkit._utils.provenance import provenance
from distillkit.chunking import chunk_size, forward_chunks
from distillkit.networks._base import Network, split
from distillkit.networks._factory import frozen_copy
from distillkit.networks._validation import check_network, require_network
from distillkit.normalization import Normalization
from distillkit.rng import as_generator
from distillkit.sets import Images, LabeledImages, Labels, as_set
from distillkit.sets._class_index import class_rows

__all__ = ["herding", "k_center", "random_subset"]


def random_subset(
    images: Images,
    labels: Labels | None = None,
    *,
    ipc: int,
    network: nn.Module | None = None,
    generator: int | torch.Generator = 0,
    classes: Sequence[int] | None = None,
    num_classes: int | None = None,
    normalization: Normalization | None = None,
    chunk: int | None = None,
    progress: bool = True,
) -> LabeledImages:
    """Choose `ipc` random images of each class, without replacement: what every condensed set must beat.

    Args:
        images: a set, or float [N, C, H, W] in the normalised space.
        labels: class indices int [N]; left out with a set.
        ipc: images per class.
        network: not used; all coresets take the same arguments.
        generator: an int seed, or a CPU generator, which is advanced.
        classes: the classes wanted; default all that own an image.
        num_classes: K, when classes may be absent from `labels`.
        normalization: how `images` came from pixels.
        chunk: not used.
        progress: whether a dataset that takes long to read shows a bar.

    Returns:
        A set, class by class in ascending order, with the columns of the given set. Its `info` says which classes
        have no image (`absent`), and which have fewer than `ipc` (`with_replacement`): those give their images again
        from the first one on.

    Raises:
        TypeError, ValueError: bad images, labels or ipc; soft labels; a class asked for that owns no image.
    """
    draws = as_generator(generator)
    real = as_set(images, labels, num_classes=num_classes, normalization=normalization, progress=progress)

    def order(rows: Tensor, count: int) -> Tensor:
        return torch.randperm(len(rows), generator=draws)[:count]

    return _chosen(real, ipc, classes, order, {"method": "random", **provenance(generator)})


def herding(
    images: Images,
    labels: Labels | None = None,
    *,
    ipc: int,
    network: nn.Module | None = None,
    generator: int | torch.Generator = 0,
    classes: Sequence[int] | None = None,
    num_classes: int | None = None,
    normalization: Normalization | None = None,
    chunk: int | None = None,
    progress: bool = True,
) -> LabeledImages:
    """Choose real images whose mean is the class's: one after the other, each the one that brings the mean closest.

    With embeddings f and the class mean mu, the k-th choice is the x, not chosen yet, that minimises
    ||mu - (f(x) + sum of the chosen f) / k||. The first is the image nearest to the mean. Ties go to the first image.

    Papers: Welling, "Herding dynamical weights to learn" (ICML 2009); in this form Rebuffi et al., "iCaRL" (CVPR
    2017), algorithm 4, and the baselines of Zhao et al., "Dataset condensation with gradient matching" (ICLR 2021).

    Args:
        images, labels, ipc, classes, num_classes, normalization: see `random_subset`.
        network: where to measure; a copy in eval mode gives `features`. The published baselines take a network
            trained on the whole set. Default: the pixels.
        generator: not used, nothing is drawn.
        chunk: images per forward pass; default by device and size.
        progress: whether long work shows a bar (see `distillkit._utils.progress`).

    Returns, raises: see `random_subset`.

    Deviation: iCaRL normalises embeddings to unit length; we take them as they are, as distribution matching does.
    """
    real = as_set(images, labels, num_classes=num_classes, normalization=normalization, progress=progress)
    embed = _embedder(real, network, chunk)

    def order(rows: Tensor, count: int) -> Tensor:
        f = embed(rows)
        f = f - f.mean(0)
        squares, total = f.square().sum(1), torch.zeros_like(f[0])
        taken: list[int] = []
        for _ in range(count):
            score = squares + 2 * (f @ total)
            score[taken] = torch.inf
            taken.append(int(score.argmin()))
            total += f[taken[-1]]
        return torch.tensor(taken)

    return _chosen(
        real, ipc, classes, order, {"method": "herding", "embedding": _name(network), **provenance()}, progress
    )


def k_center(
    images: Images,
    labels: Labels | None = None,
    *,
    ipc: int,
    network: nn.Module | None = None,
    generator: int | torch.Generator = 0,
    classes: Sequence[int] | None = None,
    num_classes: int | None = None,
    normalization: Normalization | None = None,
    chunk: int | None = None,
    progress: bool = True,
) -> LabeledImages:
    """Choose real images that cover a class, one after the other: each the farthest from those chosen (k-centre).

    The first is the image nearest to the class mean, so that nothing is random. The largest distance from any image
    to its nearest centre is at most twice the smallest possible (Gonzalez 1985). Ties go to the first image.

    Papers: Gonzalez, "Clustering to minimize the maximum intercluster distance" (1985); Sener and Savarese, "Active
    learning for convolutional neural networks: a core-set approach" (ICLR 2018), algorithm 1.

    Args:
        images, labels, ipc, classes, num_classes, normalization: see `random_subset`.
        network: where to measure; see `herding`.
        generator: not used, nothing is drawn.
        chunk: images per forward pass; default by device and size.
        progress: whether long work shows a bar (see `distillkit._utils.progress`).

    Returns, raises: see `random_subset`.
    """
    real = as_set(images, labels, num_classes=num_classes, normalization=normalization, progress=progress)
    embed = _embedder(real, network, chunk)

    def order(rows: Tensor, count: int) -> Tensor:
        f = embed(rows)
        taken = [int((f - f.mean(0)).square().sum(1).argmin())]
        nearest = (f - f[taken[0]]).square().sum(1)
        while len(taken) < count:
            nearest[taken] = -1.0
            taken.append(int(nearest.argmax()))
            nearest = torch.minimum(nearest, (f - f[taken[-1]]).square().sum(1))
        return torch.tensor(taken)

    return _chosen(
        real, ipc, classes, order, {"method": "k-center", "embedding": _name(network), **provenance()}, progress
    )


def _embedder(real: LabeledImages, network: nn.Module | None, chunk: int | None) -> Callable[[Tensor], Tensor]:
    size = chunk_size(real.images, chunk)
    twin: Network | None = None
    if network is not None:
        twin = split(frozen_copy(require_network(network)).eval())
        if len(real):
            check_network(twin, real.images, features=True)

    @torch.no_grad()
    def embed(rows: Tensor) -> Tensor:
        rows = rows.to(real.images.device)
        if twin is None:
            return real.images.index_select(0, rows).flatten(1)
        return torch.cat(list(forward_chunks(twin.features, real.images.index_select(0, rows), size)))

    return embed


def _name(network: nn.Module | None) -> str:
    return "pixels" if network is None else type(network).__name__


def _chosen(
    real: LabeledImages,
    ipc: int,
    classes: Sequence[int] | None,
    order: Callable[[Tensor, int], Tensor],
    info: dict[str, object],
    progress: bool = False,
) -> LabeledImages:
    """The set of `ipc` images a class in the order that `order(rows, min(ipc, len(rows)))` puts its rows in."""
    ipc = check.positive_int(ipc, "ipc")
    rows = class_rows(real, classes)
    check_class_sizes("ipc", ipc, {c: len(own) for c, own in rows.items()})
    index = []
    with bar(len(rows), str(info["method"]), unit="class", progress=progress) as shown:
        for own in rows.values():
            first = own[order(own, min(ipc, len(own))).cpu()]
            index.append(first.repeat(-(-ipc // len(first)))[:ipc])
            shown.update()
    info |= {
        "ipc": ipc,
        "absent": [c for c in range(real.num_classes) if c not in rows] if classes is None else [],
        "with_replacement": [c for c, own in rows.items() if len(own) < ipc],
    }
    return real[torch.cat(index).to(real.images.device)].replace(info=info)
