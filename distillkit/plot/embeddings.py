"""Figures of embeddings: t-SNE by client and class, and distances between clients."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from distillkit._utils import check
from distillkit.plot.figure import MARKERS, class_colours, class_names, require_mapping, subplots
from distillkit.rng import as_generator

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def tsne(
    embeddings: Mapping[str, Tensor],
    labels: Mapping[str, Tensor],
    *,
    perplexity: float = 30.0,
    classes: Sequence[str] | None = None,
    generator: int | torch.Generator = 0,
    ax: Axes | None = None,
) -> Figure:
    """Draw the embeddings of several clients in a t-SNE map, with one marker per client and one color per class.

    Args:
        embeddings: mapping from client names to embeddings, float [N_i, d], with at least 5 rows in total.
        labels: mapping from the same client names to class indices, int [N_i].
        perplexity: perplexity of t-SNE, roughly the number of neighbors of a point. It is limited to a third of the
            number of rows.
        classes: class names; default: the class indices.
        generator: seed or random generator for t-SNE.
        ax: the axes to draw into; default: the axes of a new figure.

    Returns:
        The matplotlib figure. The axes have no unit, and positions in two maps are not comparable. Compare how much the
        clients overlap.

    Raises:
        TypeError, ValueError: `embeddings` and `labels` have different client names, the embeddings differ in d, an
            array is invalid, there are too few rows, all rows are equal, or the number of class names is wrong.

    Source: van der Maaten and Hinton, "Visualizing data using t-SNE" (2008). The map is computed by scikit-learn's
    Barnes-Hut implementation.
    """
    from matplotlib.lines import Line2D

    require_mapping(embeddings, "embeddings", "rows [N, d]")
    require_mapping(labels, "labels", "class indices [N]")
    if not embeddings or set(embeddings) != set(labels):
        raise ValueError(f"labels must have the clients of embeddings, {sorted(embeddings)}, got {sorted(labels)}")
    points = _join(embeddings)
    sizes = [len(rows) for rows in embeddings.values()]
    marks = [check.class_labels(labels[name], len(rows), None).cpu() for name, rows in embeddings.items()]
    count = check.classes_of(torch.cat(marks)) if classes is None else len(classes)
    names, colours = class_names(classes, count), class_colours(count)
    figure, (ax,) = subplots(ax, 1, 5.6, 4.2)
    positions = _tsne(points, perplexity, as_generator(generator)).split(sizes)
    for i, (position, mark) in enumerate(zip(positions, marks, strict=True)):
        check.class_labels(mark, None, count)
        x, y = position.T.tolist()
        colour = [colours[int(m)] for m in mark]
        ax.scatter(x, y, c=colour, marker=MARKERS[i % len(MARKERS)], s=22, linewidths=0.3, edgecolors="white")
    ax.set(xticks=[], yticks=[], xlabel="t-SNE 1", ylabel="t-SNE 2")
    shapes = [
        Line2D([], [], linestyle="", marker=MARKERS[i % len(MARKERS)], color="#555555", label=name)
        for i, name in enumerate(embeddings)
    ]
    step = -(-count // 20)
    dots = [Line2D([], [], linestyle="", marker="o", color=colours[c], label=names[c]) for c in range(0, count, step)]
    first = ax.legend(handles=shapes, title="client", loc="upper left", bbox_to_anchor=(1.01, 1), fontsize=8)
    ax.add_artist(first)
    ax.legend(handles=dots, title="class", loc="lower left", bbox_to_anchor=(1.01, 0), fontsize=8, ncols=2)
    return figure


def pairwise_mmd(embeddings: Mapping[str, Tensor], *, unbiased: bool = True) -> Tensor:
    """Return the squared RBF MMD between all pairs of n clients, as a symmetric matrix float64 [n, n].

    Each pair of clients has its own kernel bandwidths, the defaults of `distillkit.losses.rbf_mmd`.

    Args:
        embeddings: mapping from client names to embeddings, float [N_i, d].
        unbiased: whether to use the unbiased estimate, which may be negative. The biased estimate, which FedLGD uses,
            is larger for smaller sets, so small distilled sets appear further apart than real sets.

    Raises:
        TypeError, ValueError: there are fewer than two clients, a tensor is invalid, or the embeddings differ in d.
    """
    from distillkit.losses.matching import rbf_mmd

    _join(embeddings)
    check.boolean(unbiased, "unbiased")
    if len(embeddings) < 2:
        raise ValueError(f"embeddings must hold at least 2 clients to compare, got {len(embeddings)}")
    rows = [r.detach().cpu().double() for r in embeddings.values()]
    table = torch.zeros(len(rows), len(rows), dtype=torch.float64)
    for i in range(len(rows)):
        for j in range(i):
            table[i, j] = table[j, i] = rbf_mmd(rows[i], rows[j], unbiased=unbiased)
    return table


def mmd_table(
    before: Mapping[str, Tensor],
    after: Mapping[str, Tensor] | None = None,
    *,
    unbiased: bool = True,
    axes: Sequence[Axes] | Axes | None = None,
) -> Figure:
    """Draw tables of the squared RBF MMD between all pairs of clients, before and optionally after distillation.

    Args:
        before: mapping from client names to embeddings, float [N_i, d]. The tables list the clients in this order.
        after: mapping from the same client names to embeddings of the distilled sets, computed by the same network; or
            None.
        unbiased: whether to use the unbiased estimate; see `pairwise_mmd`.
        axes: the axes to draw into, two if `after` is given; default: the axes of a new figure.

    Returns:
        The matplotlib figure. Both tables have the same color scale and number format. The titles state the mean over
        all pairs and the relative change.

    Raises:
        TypeError, ValueError: for the same reasons as in `pairwise_mmd`, or `after` has other client names than
            `before`.
    """
    for name, one in (("before", before), ("after", after)):
        if one is not None or name == "before":
            require_mapping(one, name, "rows [N, d]")
    if after is not None and list(after) != list(before):
        raise ValueError(f"after must have the clients of before in the same order, {list(before)}, got {list(after)}")
    tables = [pairwise_mmd(one, unbiased=unbiased) for one in (before, after) if one is not None]
    n = len(before)
    figure, drawn = subplots(axes, len(tables), 0.62 * n + 1.6, 0.55 * n + 1.1)
    power, decimals = _number_format(max(float(table.abs().max()) for table in tables))
    tables = [table / 10.0**power for table in tables]
    means = [float(table.sum()) / (n * (n - 1)) for table in tables]
    titles = [f"mean {means[0]:.{decimals + 1}f}"]
    if after is not None:
        change = f" ({means[1] / means[0] - 1:+.0%})" if means[0] > 0 else ""
        titles = [f"before: mean {means[0]:.{decimals + 1}f}", f"after: mean {means[1]:.{decimals + 1}f}{change}"]
    most = max(max(float(table.max()) for table in tables), 1e-12)
    for ax, table, title in zip(drawn, tables, titles, strict=True):
        shown = table.masked_fill(torch.eye(n, dtype=torch.bool), torch.nan)
        image = ax.imshow(shown.numpy(), cmap="cividis", vmin=0, vmax=most)
        for i in range(n):
            for j in range(n):
                if i != j:
                    value = float(table[i, j])
                    shade = "black" if value > 0.55 * most else "white"
                    ax.text(j, i, f"{value:.{decimals}f}", ha="center", va="center", fontsize=8, color=shade)
        ax.set_xticks(range(n), list(before), rotation=45, ha="right", fontsize=8)
        ax.set_yticks(range(n), list(before), fontsize=8)
        ax.set_title(title, fontsize=9)
    unit = f" (in $10^{{{power}}}$)" if power else ""
    figure.colorbar(image, ax=drawn, label=f"squared MMD, RBF kernel{unit}", shrink=0.8)
    return figure


def _number_format(most: float) -> tuple[int, int]:
    """Return how to print numbers up to `most`: an exponent p, and a number of decimals.

    The numbers are divided by 10^p, and `most` is then shown with at least two significant digits. p is 0 if `most` is
    0, and also if `most` is at least 0.001 and below 10,000.
    """
    exponent = math.floor(math.log10(most)) if most > 0 else 0
    power = 0 if -3 <= exponent <= 3 else exponent
    return power, max(0, 1 - exponent + power)


def _join(embeddings: Mapping[str, Tensor]) -> Tensor:
    require_mapping(embeddings, "embeddings", "rows [N, d]")
    rows = [check.matrix(r, f"embeddings[{name!r}]") for name, r in embeddings.items()]
    widths = {r.shape[1] for r in rows}
    if len(widths) > 1:
        raise ValueError(f"embeddings must all have the same width, got {sorted(widths)}")
    return torch.cat([r.detach().cpu().double() for r in rows])


def _tsne(points: Tensor, perplexity: float, generator: torch.Generator) -> Tensor:
    from sklearn.manifold import TSNE
    from threadpoolctl import threadpool_limits

    check.real_number(perplexity, "perplexity", above=0.0)
    if len(points) < 5:
        raise ValueError(f"embeddings must have at least 5 rows in all, got {len(points)}")
    if bool((points == points[0]).all()):  # scikit-learn would end the process
        raise ValueError(f"embeddings must differ, but all {len(points)} rows are equal")
    seed = int(torch.randint(2**31 - 1, (), generator=generator))
    start = "pca" if points.shape[1] > 1 else "random"
    with threadpool_limits(1):
        fitted = TSNE(perplexity=min(perplexity, len(points) / 3), init=start, random_state=seed)
        return torch.from_numpy(fitted.fit_transform(points.numpy()))
