"""Coresets: real images that are selected at random, by herding or by k-center. They are baselines of condensation."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from distillkit._utils import check
from distillkit._utils.progress import bar
from distillkit._utils.provenance import provenance
from distillkit._utils.shares import require_unsplit
from distillkit.chunking import chunk_size, forward_chunks
from distillkit.networks._base import Network, require_network, split
from distillkit.networks._factory import frozen_copy
from distillkit.networks._validation import check_network
from distillkit.normalization import Normalization
from distillkit.rng import as_generator
from distillkit.sets import Images, LabeledImages, Labels, StoredImages, Tiles
from distillkit.sets._class_index import class_rows, warn_of_repeats
from distillkit.sets._devices import on_device
from distillkit.sets._info import derived_info
from distillkit.sets._stored import RealImages
from distillkit.sets.as_set import open_set

_CHUNK = 256
"""Number of embeddings whose distances are computed at a time. It bounds memory if pixels are the embeddings."""


@on_device("images")
def random_subset(
    images: Images | StoredImages,
    labels: Labels | None = None,
    *,
    ipc: int,
    network: nn.Module | None = None,
    generator: int | torch.Generator = 0,
    parametrize: Tiles | None = None,
    classes: Sequence[int] | None = None,
    num_classes: int | None = None,
    normalization: Normalization | None = None,
    chunk: int | None = None,
    device: torch.device | str | None = None,
    progress: bool = True,
) -> LabeledImages:
    """Select `ipc` random images of each class, without replacement. Every condensed set should beat this baseline.

    Args:
        images: a set, or a tensor, float [N, C, H, W], in the normalized space. Of a `StoredImages`, only the selected
            images are read.
        labels: class indices int [N]; omit them if `images` is a set.
        ipc: number of images to select in each class.
        network: ignored; it is accepted because all coreset functions have the same arguments.
        generator: an int seed, or a CPU generator.
        parametrize: `sets.Tiles(f)`, for example with f = 2, or None. With `Tiles(f)`, `ipc * f ** 2` images of each
            class are selected, shrunk, and combined to `ipc` stored images (see `TiledImages`). Use it as the baseline
            of a condensation with the same parametrization.
        classes: the classes from which images are selected. Default: all classes with an image.
        num_classes: number of classes K. Pass it if some classes may be absent from `labels`.
        normalization: normalization of `images`, if `images` is a tensor.
        chunk: ignored, like `network`.
        device: device that computes, or "auto"; results return to the device of `images`. Default: nothing moves.
        progress: whether to show a progress bar while a dataset is read.

    Returns:
        The selected images as a set, sorted by class. If `images` is a set, the result has the same `columns` (further
        data of each image). The `info` of the result lists the classes without images (`absent`), and the classes with
        fewer than `ipc` images (`with_replacement`). `derived` names the method: private methods refuse the set as
        records, because the selection depends on other records. If a class has too few images, its selected images are
        repeated in the same order.

    Raises:
        TypeError, ValueError: `images`, `labels` or `ipc` is invalid, the labels are soft, or a class in `classes` has
            no images.
    """
    require_unsplit("all classes share one sequence of random numbers; call random_subset itself", "over_classes")
    draws = as_generator(generator)
    real = open_set(images, labels, num_classes=num_classes, normalization=normalization, progress=progress)
    tiles = Tiles.require(parametrize)
    ipc = check.positive_int(ipc, "ipc")

    def order(rows: Tensor, count: int) -> Tensor:
        return torch.randperm(len(rows), generator=draws)[:count]

    info = {"method": "random", **provenance(generator)}
    if tiles is None:
        return _select(real, ipc, classes, order, info)
    drawn = _select(real, ipc * tiles.count, classes, order, info)
    return tiles.pack(drawn.replace(info={**drawn.info, "ipc": ipc, "parametrize": repr(tiles)}))


@on_device("images")
def herding(
    images: Images | StoredImages,
    labels: Labels | None = None,
    *,
    ipc: int,
    network: nn.Module | None = None,
    generator: int | torch.Generator = 0,
    classes: Sequence[int] | None = None,
    num_classes: int | None = None,
    normalization: Normalization | None = None,
    chunk: int | None = None,
    device: torch.device | str | None = None,
    progress: bool = True,
) -> LabeledImages:
    """Select real images greedily so that their mean embedding approaches the class mean.

    Let f(x) be the embedding of an image x, and mu the mean embedding of its class. The k-th selected image is the x
    that minimizes ||mu - (f(x) + s) / k||, where s is the sum of the embeddings of the k - 1 images selected before. In
    a tie, the image with the lowest index is selected.

    Papers: Welling, "Herding dynamical weights to learn" (ICML 2009). This form is from Rebuffi et al., "iCaRL" (CVPR
    2017), algorithm 4, and is a baseline in Zhao et al., "Dataset condensation with gradient matching" (ICLR 2021).

    Args:
        images, labels, ipc, classes, num_classes, normalization: see `random_subset`.
        network: network that computes the embeddings. A copy in eval mode is used. The published baselines use a
            network trained on the whole set. Default: the pixels are used as embeddings.
        generator: ignored; the selection is deterministic.
        chunk: number of images per forward pass; the default depends on device and image size.
        device: device that computes, or "auto"; results return to the device of `images`. Default: nothing moves.
        progress: whether to show a progress bar.

    Returns, raises: see `random_subset`.

    Deviation: iCaRL normalizes embeddings to unit length. Here, as in distribution matching, embeddings are not
    normalized.
    """
    real = open_set(images, labels, num_classes=num_classes, normalization=normalization, progress=progress)
    embed = _embedder(real, network, chunk)

    def order(rows: Tensor, count: int) -> Tensor:
        f = embed(rows)
        mean = f.mean(0)
        squares, total = _square_distances(f, mean), torch.zeros_like(mean)
        f -= mean
        selected: list[Tensor] = []
        for _ in range(count):
            score = squares + 2 * (f @ total)
            selected.append(score.argmin().view(1))
            total += f.index_select(0, selected[-1])[0]
            squares.index_fill_(0, selected[-1], torch.inf)
        return torch.cat(selected)

    info = {"method": "herding", "embedding": _embedding_name(network), **provenance()}
    return _select(real, ipc, classes, order, info, progress)


@on_device("images")
def k_center(
    images: Images | StoredImages,
    labels: Labels | None = None,
    *,
    ipc: int,
    network: nn.Module | None = None,
    generator: int | torch.Generator = 0,
    classes: Sequence[int] | None = None,
    num_classes: int | None = None,
    normalization: Normalization | None = None,
    chunk: int | None = None,
    device: torch.device | str | None = None,
    progress: bool = True,
) -> LabeledImages:
    """Select real images so that every image of a class is close to a selected image (greedy k-center).

    The function repeatedly adds the image that is farthest from all selected images. The first image is the one nearest
    to the class mean, so the selection is deterministic. The largest distance from any image to its nearest selected
    image is at most twice the smallest possible value (Gonzalez 1985). In a tie, the image with the lowest index is
    selected.

    Papers: Gonzalez, "Clustering to minimize the maximum intercluster distance" (1985); Sener and Savarese, "Active
    learning for convolutional neural networks: a core-set approach" (ICLR 2018), algorithm 1.

    Args:
        images, labels, ipc, classes, num_classes, normalization: see `random_subset`.
        network: network that computes the embeddings; see `herding`.
        generator: ignored; the selection is deterministic.
        chunk: number of images per forward pass; the default depends on device and image size.
        device: device that computes, or "auto"; results return to the device of `images`. Default: nothing moves.
        progress: whether to show a progress bar.

    Returns, raises: see `random_subset`.
    """
    real = open_set(images, labels, num_classes=num_classes, normalization=normalization, progress=progress)
    embed = _embedder(real, network, chunk)

    def order(rows: Tensor, count: int) -> Tensor:
        f = embed(rows)
        selected = [_square_distances(f, f.mean(0)).argmin().view(1)]
        nearest = _square_distances(f, f.index_select(0, selected[0]))
        while len(selected) < count:
            nearest.index_fill_(0, selected[-1], -1.0)
            selected.append(nearest.argmax().view(1))
            nearest = torch.minimum(nearest, _square_distances(f, f.index_select(0, selected[-1])))
        return torch.cat(selected)

    info = {"method": "k-center", "embedding": _embedding_name(network), **provenance()}
    return _select(real, ipc, classes, order, info, progress)


def _embedder(real: RealImages, network: nn.Module | None, chunk: int | None) -> Callable[[Tensor], Tensor]:
    """Return a function of rows that returns the embeddings [n, d] of these images, which are read in chunks."""
    size = chunk_size(real._empty.images, chunk)
    twin: Network | None = None
    if network is not None:
        twin = split(frozen_copy(require_network(network)).eval())
        if len(real):
            check_network(twin, real._empty.images, features=True)

    @torch.no_grad()
    def embed(rows: Tensor) -> Tensor:
        if twin is None:
            return real._take(rows).flatten(1)
        return torch.cat(list(forward_chunks(twin.features, map(real._take, rows.split(size)), size)))

    return embed


def _square_distances(f: Tensor, x: Tensor) -> Tensor:
    parts = f.tensor_split(-(-len(f) // _CHUNK))
    return torch.cat([(part - x).square().sum(1) for part in parts])


def _embedding_name(network: nn.Module | None) -> str:
    return "pixels" if network is None else type(network).__name__


def _select(
    real: RealImages,
    ipc: int,
    classes: Sequence[int] | None,
    order: Callable[[Tensor, int], Tensor],
    info: dict[str, object],
    progress: bool = False,
) -> LabeledImages:
    """Select images of each class with `order`, and return them as a set."""
    ipc = check.positive_int(ipc, "ipc")
    rows = class_rows(real, classes)
    warn_of_repeats("ipc", ipc, {c: len(own) for c, own in rows.items()})
    index = []
    with bar(len(rows), str(info["method"]), unit="class", progress=progress) as shown:
        for own in rows.values():
            first = own[order(own, min(ipc, len(own))).cpu()]
            index.append(first.repeat(-(-ipc // len(first)))[:ipc])
            shown.update()
    method = str(info["method"])
    info |= {
        "publishes": "real images",
        "ipc": ipc,
        "absent": [c for c in range(real.num_classes) if c not in rows] if classes is None else [],
        "with_replacement": [c for c, own in rows.items() if len(own) < ipc],
    }
    unknown = "selection by a network of unknown origin" if info.get("embedding", "pixels") != "pixels" else ""
    info = derived_info(info, [real.info], method, unknown)
    return real._part(torch.cat(index)).replace(info=info)
