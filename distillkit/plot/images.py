"""Figures of images by class, comparisons of two groups of images, and histograms of pixel values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from distillkit._utils import check
from distillkit.normalization import IDENTITY
from distillkit.plot.figure import LINE_COLOURS, class_names, require_mapping, subplots
from distillkit.rng import as_generator
from distillkit.sets import Images, LabeledImages, Labels, StoredImages
from distillkit.sets._stored import RealImages, read_batches
from distillkit.sets.as_set import open_set

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_CELL = 0.5  # inches
_PART = 256  # images that are read at a time
_FRAME = 0.85  # grey frame, so that white images are visible


def grid(
    images: Images | StoredImages,
    labels: Labels | None = None,
    *,
    per_class: int = 10,
    classes: Sequence[str] | None = None,
    ax: Axes | None = None,
) -> Figure:
    """Draw the first images of each class, with one row per class.

    Args:
        images, labels: a set, in which case `labels` are omitted, or images float [N, C, H, W] in [0, 1]
            and their labels. One channel is drawn in gray, and three channels as RGB. For any other number of channels,
            their mean is drawn in gray. For label rows (soft or multi-label), the class is the largest entry.
        per_class: largest number of images per row.
        classes: class names; default: those of the set, or the class indices.
        ax: the axes to draw into; default: the axes of a new figure.

    Returns:
        The matplotlib figure, which you can save with `figure.savefig("grid.png")`.

    Raises:
        TypeError, ValueError: the images or labels are invalid, the set is empty, or the number of class names is
            wrong.
    """
    data = open_set(images, labels)
    check.positive_int(per_class, "per_class")
    rows = _by_class(data, per_class)
    return _rows_of_classes([("", rows)], data, class_names(classes, data.num_classes, data.class_names), ax)


def real_and_synthetic(
    real: LabeledImages | StoredImages,
    synthetic: LabeledImages | StoredImages,
    *,
    per_class: int = 5,
    classes: Sequence[str] | None = None,
    ax: Axes | None = None,
) -> Figure:
    """Draw the first real images of each class beside its first synthetic images, with one row per class.

    Args:
        real, synthetic: sets with the same image shape and number of classes. Their normalizations may differ.
        per_class: largest number of images per row on each side.
        classes, ax: as in `grid`.

    Returns:
        The matplotlib figure.

    Raises:
        ValueError: the sets differ in image shape or number of classes, a set is empty, or the number of class names is
            wrong.
    """
    check.positive_int(per_class, "per_class")
    real, synthetic = open_set(real, name="real"), open_set(synthetic, name="synthetic")
    like = synthetic._empty.replace(normalization=real.normalization)
    like.require_compatible(real._empty, names=("synthetic", "real"))
    blocks = [("real", _by_class(real, per_class)), ("synthetic", _by_class(synthetic, per_class))]
    return _rows_of_classes(
        blocks, real, class_names(classes, real.num_classes, real.class_names or synthetic.class_names), ax
    )


def selection(
    images: Tensor | LabeledImages | StoredImages,
    selected: Tensor,
    *,
    rows: int = 6,
    columns: int = 8,
    generator: int | torch.Generator = 0,
    ax: Axes | None = None,
) -> Figure:
    """Draw a random sample of the selected images beside a random sample of the rejected images.

    Args:
        images: float [N, C, H, W] in [0, 1], or a set.
        selected: indices of the selected images, int [M], as the functions of `distillkit.select` return them.
        rows, columns: number of rows and columns of images in each sample, if there are enough images.
        generator: seed or random generator for the samples.
        ax: the axes to draw into; default: the axes of a new figure.

    Returns:
        The matplotlib figure, which states the number of selected and of rejected images.

    Raises:
        TypeError, ValueError: the images are invalid, or an index is out of range or repeated.
    """
    generator = as_generator(generator)
    check.positive_int(rows, "rows")
    check.positive_int(columns, "columns")
    normalization = images.normalization if isinstance(images, RealImages) else IDENTITY
    if not isinstance(images, StoredImages):
        images = check.batch_of_images(images.images if isinstance(images, LabeledImages) else images)
    n = len(images)
    selected = check.class_labels(selected, None, n, "selected").cpu()
    chosen = torch.bincount(selected, minlength=n)
    if int(chosen.max()) > 1:
        raise ValueError(f"selected must hold each index once, got {int(chosen.argmax())} {int(chosen.max())} times")
    blocks, size = [], rows * columns
    for name, members in (("selected", chosen.nonzero().flatten()), ("rejected", (chosen == 0).nonzero().flatten())):
        drawn = members[torch.randperm(len(members), generator=generator)[:size]]
        [found] = read_batches(images, [drawn])
        pixels = _drawable(normalization.decode(found))
        blocks.append((f"{name}: {len(members):,}", [pixels[i * columns : (i + 1) * columns] for i in range(rows)]))
    figure, (ax,) = subplots(ax, 1, 2 * columns * _CELL + 0.6, rows * _CELL + 0.4)
    _draw(ax, blocks, columns)
    ax.set_yticks([])
    return figure


def pixel_histogram(
    sets: Mapping[str, LabeledImages | StoredImages], *, bins: int = 64, axes: Sequence[Axes] | Axes | None = None
) -> Figure:
    """Draw histograms of pixel values, to compare the colors of several sets, as in FedLGD's figures 18 to 20.

    Each set has its own axes, with one line per channel.

    Args:
        sets: mapping from names to sets, for example one set per client. Values are drawn as pixels in [0, 1], not
            normalized.
        bins: number of equal bins of [0, 1]. Values outside [0, 1] are not drawn, and the title states their share.
        axes: the axes to draw into, one per set; default: the axes of a new figure.

    Returns:
        The matplotlib figure. The vertical axis is logarithmic, in per cent of a channel's pixels.

    Raises:
        ValueError: there are no sets, a set is empty, or the number of axes differs from the number of sets.
    """
    from matplotlib.ticker import LogFormatter

    check.positive_int(bins, "bins")
    require_mapping(sets, "sets", "LabeledImages")
    opened = {name: open_set(one, name=f"sets[{name!r}]") for name, one in sets.items()}
    if not opened or not all(len(s) for s in opened.values()):
        raise ValueError("sets must hold at least one set, and none may be empty; omit empty ones")
    figure, drawn = subplots(axes, len(opened), 3.2, 2.6, columns=3)
    edges, low, high = torch.linspace(0, 1, bins + 1), 100.0, 0.0
    for ax, (name, one) in zip(drawn, opened.items(), strict=True):
        styles, each = _channel_styles(one.shape[0]), len(one) * one.shape[1] * one.shape[2]
        counts = torch.zeros(len(styles), bins, dtype=torch.float64)
        for rows in torch.arange(len(one)).split(_PART):
            pixels = one.normalization.decode(one._take(rows)).detach().cpu().float()
            for values, count in zip(pixels.transpose(0, 1), counts, strict=True):
                count += torch.histc(values[(values >= -1e-6) & (values <= 1 + 1e-6)].clamp(0, 1), bins, 0, 1)
        outside = 1 - float(counts.sum()) / (each * len(styles))
        for share, (label, colour) in zip(100 * counts / each, styles, strict=True):
            low, high = min([low, *share[share > 0].tolist()]), max(high, float(share.max()))
            ax.stairs(share.tolist(), edges.tolist(), color=colour, label=label, linewidth=1.2)
        note = f"\n{outside:.1%} outside [0, 1]" if outside else ""
        ax.set_title(f"{name}, {len(one):,} images{note}", fontsize=9)
        ax.set(xlabel="pixel value", ylabel="pixels per bin (%)", xlim=(0, 1))
        if len(styles) > 1:
            ax.legend(fontsize=8)
    for ax in drawn if high else ():
        ax.set_yscale("log")
        ax.yaxis.set_major_formatter("{x:g}")
        ax.yaxis.set_minor_formatter(LogFormatter(labelOnlyBase=False, minor_thresholds=(1, 0.4)))
        ax.set_ylim(0.7 * low, 1.5 * high)
    return figure


def _channel_styles(count: int) -> list[tuple[str, str]]:
    if count == 1:
        return [("grey", "#000000")]
    if count == 3:
        return [("red", LINE_COLOURS[1]), ("green", LINE_COLOURS[2]), ("blue", LINE_COLOURS[0])]
    return [(f"channel {c}", LINE_COLOURS[c % len(LINE_COLOURS)]) for c in range(count)]


def _drawable(pixels: Tensor) -> Tensor:
    pixels = pixels.detach().clamp(0, 1).cpu().float()
    if pixels.shape[1] not in (1, 3):
        pixels = pixels.mean(1, keepdim=True)
    return pixels.expand(-1, 3, -1, -1)


def _by_class(data: RealImages, per_class: int) -> list[Tensor]:
    if not len(data):
        raise ValueError("images must hold at least one image to draw, got an empty set")
    labels = data.labels.argmax(1) if data.labels.ndim == 2 else data.labels
    members = [(labels == c).nonzero().flatten()[:per_class] for c in range(data.num_classes)]
    pixels = _drawable(data._part(torch.cat(members)).pixels())
    return list(pixels.split([len(m) for m in members]))


def _rows_of_classes(
    blocks: list[tuple[str, list[Tensor]]], data: RealImages, names: list[str], ax: Axes | None
) -> Figure:
    columns = max(len(row) for _, rows in blocks for row in rows)
    height, width = data.shape[1:]
    cell = _CELL * width / max(height, width), _CELL * height / max(height, width)
    figure, (ax,) = subplots(ax, 1, len(blocks) * columns * cell[0] + 1.0, len(names) * cell[1] + 0.5)
    _draw(ax, blocks, columns)
    ax.set_yticks([(i + 0.5) * (height + 2) for i in range(len(names))], names)
    ax.set_ylabel("class")
    return figure


def _draw(ax: Any, blocks: list[tuple[str, list[Tensor]]], columns: int) -> None:
    """Draw blocks of images side by side, each image in a gray frame of one pixel."""
    from torchvision.utils import make_grid

    gap = max(4, blocks[0][1][0].shape[3] // 2)
    sheets = []
    for _, rows in blocks:
        framed = [pad(row, (1, 1, 1, 1), value=_FRAME) for row in rows]
        full = [pad(row, (0, 0, 0, 0, 0, 0, 0, columns - len(row)), value=1.0) for row in framed]
        sheets += [make_grid(torch.cat(full), columns, padding=0), torch.ones(3, full[0].shape[2] * len(full), gap)]
    sheet, width = torch.cat(sheets[:-1], 2).permute(1, 2, 0), sheets[0].shape[2]
    ax.imshow(sheet.numpy(), interpolation="nearest", extent=(0, sheet.shape[1], sheet.shape[0], 0))
    centres = [b * (width + gap) + width / 2 for b in range(len(blocks))]
    if any(title for title, _ in blocks):
        ax.set_xticks(centres, [title for title, _ in blocks])
        ax.xaxis.tick_top()
    else:
        ax.set_xticks([])
    ax.tick_params(length=0)
    ax.spines[:].set_visible(False)
