"""Figures of federated runs: partitions and learning curves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from numbers import Real
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from distillkit._utils import check
from distillkit._utils.conversion import as_tensor
from distillkit.data.partition import summary
from distillkit.plot.figure import LINE_COLOURS, LINE_STYLES, MARKERS, class_names, subplots
from distillkit.sets import Labels

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Run = Sequence[Mapping[str, Any]]


class HasRows(Protocol):
    """Interface of runs, such as `fl.Run`, whose history is the attribute `rows`."""

    @property
    def rows(self) -> Run:
        """History of the run: for each round, a mapping from column names to values."""
        ...


_X_LABELS = {
    "round": "communication round",
    "bytes": "traffic up and down, all clients (MB)",
    "bytes_up": "upload, all clients (MB)",
    "bytes_down": "download, all clients (MB)",
    "client_seconds": "computing time of all clients (s)",
    "seconds": "wall time (s)",
}


def partition(
    labels: Labels,
    parts: Sequence[Labels],
    *,
    num_classes: int | None = None,
    classes: Sequence[str] | None = None,
    ax: Axes | None = None,
) -> Figure:
    """Draw the number of images of each client and class as bubbles, with a column per client and a row per class.

    Args:
        labels: class indices of the whole dataset, int [N], as a tensor, an array or a list.
        parts: indices of the images of each client, as the functions of `distillkit.data.partition` return them.
        num_classes: number of classes K; default: the largest label + 1.
        classes: class names; default: the class indices.
        ax: the axes to draw into; default: the axes of a new figure.

    Returns:
        The matplotlib figure. The area of a bubble is proportional to the number of images, which is also printed in
        the bubble if it fits. The total of each client is above its column. The title states the number of images that
        belong to no client.

    Raises:
        TypeError, ValueError: there are no clients, an index or label is out of range, or the number of class names is
            wrong.
    """
    marks = check.class_labels(as_tensor(labels, "labels", lists=True), None, num_classes).cpu()
    if not len(check.sequence(parts, "parts", "index tensors, one per client")):
        raise ValueError("parts must hold at least one client, got none")
    if num_classes is None:
        num_classes = check.classes_of(marks)
    names = class_names(classes, num_classes)
    named = ((as_tensor(part, f"parts[{i}]", lists=True), f"parts[{i}]") for i, part in enumerate(parts))
    indices = [check.class_labels(part, None, len(marks), name).cpu() for part, name in named]
    counts = summary(marks, indices, num_classes)
    clients = len(parts)
    cell = 0.5 if clients <= 20 else 0.22
    figure, (ax,) = subplots(ax, 1, cell * clients + 1.4, max(0.42 * num_classes if clients <= 20 else 3.5, 1.5) + 1.2)
    client, label = counts.nonzero(as_tuple=True)
    sizes = counts[client, label].double()
    largest = float(sizes.max()) if len(sizes) else 1.0
    points = 72 * 0.9 * min(cell, 0.42)
    ax.scatter(client, label, s=sizes / largest * points**2, color="#56B4E9", linewidths=0)
    if clients <= 20:
        for x, y, size in zip(client.tolist(), label.tolist(), sizes.tolist(), strict=True):
            ax.text(x, y, f"{size:.0f}", ha="center", va="center", fontsize=7)
    small: dict[str, Any] = {"xytext": (0, 4), "textcoords": "offset points", "fontsize": 7}
    above = {**small, "ha": "center", "rotation": 0 if clients <= 20 else 90}
    for i, total in enumerate(counts.sum(1).tolist()):
        ax.annotate(f"{total:,}", (i, 1.0), xycoords=("data", "axes fraction"), **above)
    ax.annotate("total", (-0.02, 1.0), xycoords="axes fraction", ha="right", **small)
    ax.set_xticks(range(0, clients, -(-clients // 40)))
    ax.set_yticks(range(num_classes), names)
    ax.set(xlim=(-0.7, clients - 0.3), ylim=(num_classes - 0.4, -0.6), xlabel="client", ylabel="class")
    ax.set_axisbelow(True)
    ax.grid(color="#eeeeee")
    ax.tick_params(length=0)
    assigned = len(torch.cat(indices).unique())
    left = f", {len(marks) - assigned:,} with no client" if assigned < len(marks) else ""
    ax.set_title(f"images per client and class (of {len(marks):,}{left})", fontsize=9, pad=18 if clients <= 20 else 30)
    return figure


def curves(
    histories: Mapping[str, Any] | Run | HasRows, *, x: str = "round", y: str = "accuracy", ax: Axes | None = None
) -> Figure:
    """Draw learning curves of several methods, each averaged over runs, with a band of one standard deviation.

    Args:
        histories: mapping from the names of methods to their runs, for example one run per seed; or a single run. A run
            is a list of rows, one per round, or an object with an attribute `rows`, such as `fl.Run`. Each row is a
            mapping from column names to values, with a column "round" and the columns that you pass as `x` and `y`. For
            a method without rounds, pass a list with one value per run, whose mean is drawn as a dashed horizontal
            line.
        x: quantity on the x axis: "round", or a column with a cost, which is accumulated over the rounds. "bytes",
            "bytes_up" and "bytes_down" are drawn in MB (10^6 bytes). If rows have no column "bytes", the sum of
            "bytes_up" and "bytes_down" is used. Other examples are "client_seconds" and "seconds".
        y: name of the column on the y axis. If it begins with "accuracy", the values are fractions, which are drawn in
            per cent. Rounds without this column are not drawn, but their cost is counted.
        ax: the axes to draw into; default: the axes of a new figure.

    Returns:
        The matplotlib figure. Each point is the mean of x and the mean of y over the runs, for a round that all runs of
        the method have. The band is the sample standard deviation of y. A single run has no band.

    Raises:
        TypeError: `histories` does not contain runs.
        ValueError: `histories` is empty, a method has no runs, no method has rounds, a row has no `round` or `x`, or
            the runs of a method have no common round with `y`.
    """
    named = histories if isinstance(histories, Mapping) else {"": histories}
    unit = 100.0 if y.startswith("accuracy") else 1.0
    horizontal = {
        name: torch.tensor(given, dtype=torch.float64) * unit
        for name, given in named.items()
        if _is_horizontal_line(given)
    }
    lines = {name: horizontal[name] if name in horizontal else _points(name, _runs(name, given), x, y)
             for name, given in named.items()}  # fmt: skip
    if len(lines) == len(horizontal):
        raise ValueError("histories must hold at least one name, and each at least one run (of rounds)")
    figure, (ax,) = subplots(ax, 1, 5.2, 3.6)
    for i, (name, points) in enumerate(lines.items()):
        mean = points.mean(0)
        colour, marker = LINE_COLOURS[i % len(LINE_COLOURS)], MARKERS[i % len(MARKERS)]
        label = name or y.replace("_", " ")
        if name in horizontal:
            ax.axhline(float(mean), label=label, color=colour, linestyle="--", linewidth=1.5)
            if len(points) > 1:
                ax.axhspan(float(mean - points.std()), float(mean + points.std()), color=colour, alpha=0.1, linewidth=0)
            continue
        style = LINE_STYLES[i // len(LINE_COLOURS) % len(LINE_STYLES)]
        look: dict[str, Any] = {"color": colour, "marker": marker, "linestyle": style}
        every = -(-points.shape[1] // 25)
        ax.plot(*mean.T.tolist(), label=label, markersize=4, linewidth=1.5, markevery=every, **look)
        if len(points) > 1:
            std = points[:, :, 1].std(0)
            low, high = (mean[:, 1] - std).tolist(), (mean[:, 1] + std).tolist()
            ax.fill_between(mean[:, 0].tolist(), low, high, color=colour, alpha=0.18, linewidth=0)
    counts = sorted({len(points) for points in lines.values()})
    runs = f"{counts[0]}" if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
    title = "one run" if counts == [1] else f"mean ± std of {runs} runs"
    beside: dict[str, Any] = {"loc": "upper left", "bbox_to_anchor": (1.01, 1.0)} if len(lines) > 4 else {}
    ax.legend(title=title, fontsize=8, title_fontsize=8, **beside)
    ax.set(xlabel=_X_LABELS.get(x, x.replace("_", " ")), ylabel=y.replace("_", " "))
    if y.startswith("accuracy"):
        ax.set_ylabel(("test " + y.replace("_", " ")) + " (%)")
    if x == "round":
        from matplotlib.ticker import MaxNLocator

        ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    ax.grid(color="#eeeeee")
    ax.spines[["top", "right"]].set_visible(False)
    return figure


def _is_horizontal_line(given: Any) -> bool:
    """Return whether `given` is a list of numbers, which is plotted as a horizontal line.

    A method without rounds has such a list, with one number for each run.
    """
    several = isinstance(given, Sequence) and not isinstance(given, str) and len(given) > 0
    return several and all(isinstance(v, Real) and not isinstance(v, bool) for v in given)


def _runs(name: str, given: Any) -> list[Run]:
    """Return a list of the runs in `given`, which is one run or a sequence of runs. Each run is a list of rows."""
    given = getattr(given, "rows", given)
    if not isinstance(given, Sequence) or isinstance(given, str):
        of_name = f" of {name!r}" if name else ""
        raise TypeError(
            f"histories must be a run (its rows) or name -> runs; the runs{of_name} are {type(given).__name__}"
        )
    if not given:
        raise ValueError("histories must hold at least one name, and each at least one run")
    if isinstance(given[0], Mapping):
        return [given]
    return [rows for run in given for rows in _runs(name, run)]


def _points(name: str, runs: Sequence[Run], x: str, y: str) -> Tensor:
    """Return the values of x and y of each run, at each round that all runs have, as float64 [runs, rounds, 2]."""
    by_round: list[dict[int, tuple[float, float]]] = []
    for run in runs:
        spent, found = 0.0, {}
        for row in run:
            if "round" not in row:
                raise ValueError(f"each row of {name!r} must have a round, got {sorted(row)}")
            spent += _cost(name, row, x)
            if row.get(y) is not None:
                found[int(row["round"])] = (float(row["round"]) if x == "round" else spent, _number(name, row, y))
        by_round.append(found)
    common = sorted(set.intersection(*(set(found) for found in by_round)))
    if not common:
        raise ValueError(f"the runs of {name!r} have no round with {y!r} in common")
    points = torch.tensor([[found[r] for r in common] for found in by_round], dtype=torch.float64)
    scale = torch.tensor([1e-6 if x.startswith("bytes") else 1.0, 100.0 if y.startswith("accuracy") else 1.0])
    return points * scale


def _cost(name: str, row: Mapping[str, Any], x: str) -> float:
    if x == "bytes" and "bytes" not in row and "bytes_up" in row and "bytes_down" in row:
        return _number(name, row, "bytes_up") + _number(name, row, "bytes_down")
    if x not in row:
        raise ValueError(f"each row of {name!r} must have {x!r}, got {sorted(row)}")
    return _number(name, row, x)


def _number(name: str, row: Mapping[str, Any], column: str) -> float:
    try:
        return float(row[column])
    except (TypeError, ValueError) as error:
        raise TypeError(f"{column} must be a number in each row of {name!r}, got {row[column]!r}") from error
