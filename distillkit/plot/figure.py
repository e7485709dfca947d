"""Helpers of all plots: figures without pyplot's global state, and colors for color-blind readers."""

from __future__ import annotations

import functools
import io
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


# Okabe & Ito's palette (without yellow, too pale for lines) and Tol's "muted" scheme.
LINE_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
CLASS_COLOURS = (
    *("#332288", "#CC6677", "#117733", "#DDCC77", "#88CCEE"),
    *("#882255", "#44AA99", "#999933", "#AA4499", "#777777"),
)
LINE_STYLES = ("-", ":", "-.")  # for the first, second and third use of a colour
MARKERS = ("o", "X", "^", "s", "D", "v", "P", "*", "<", ">")


@functools.cache
def _notebook_figure() -> type[Figure]:
    """Return a subclass of matplotlib's `Figure` that notebooks display without pyplot."""
    from matplotlib.figure import Figure

    class NotebookFigure(Figure):
        """Matplotlib figure that IPython displays as a PNG picture."""

        def _repr_png_(self) -> bytes:
            buffer = io.BytesIO()
            self.savefig(buffer, format="png")
            return buffer.getvalue()

    return NotebookFigure


def subplots(axes: Any, count: int, width: float, height: float, columns: int = 4) -> tuple[Figure, list[Axes]]:
    """Return a figure and `count` axes: the given axes, or those of a new figure. No window is opened.

    Args:
        axes: the axes to draw into, as a single axes or a list; None for a new figure.
        count: number of axes.
        width, height: size of each axes of a new figure, in inches.
        columns: largest number of axes per row of a new figure.

    Raises:
        TypeError: `axes` are not matplotlib axes.
        ValueError: the number of `axes` is not `count`.
    """
    if axes is None:
        from matplotlib.backends.backend_agg import FigureCanvasAgg

        columns = min(count, columns)
        rows = -(-count // columns)
        figure = _notebook_figure()(figsize=(width * columns, height * rows), layout="constrained", dpi=120)
        FigureCanvasAgg(figure)
        grid = list(figure.subplots(rows, columns, squeeze=False).flat)
        for unused in grid[count:]:
            unused.remove()
        return figure, grid[:count]
    from matplotlib.axes import Axes

    given = list(axes) if hasattr(axes, "__iter__") and not isinstance(axes, str) else [axes]
    if wrong := [one for one in given if not isinstance(one, Axes)]:
        raise TypeError(f"ax must be matplotlib axes, such as figure.subplots(), got {type(wrong[0]).__name__}")
    if len(given) != count:
        raise ValueError(f"this figure needs {count} axes, got {len(given)}")
    return given[0].get_figure(root=True), given


def class_colours(count: int) -> list[Any]:
    """Return one color per class: distinct colors for up to ten classes, and a uniform color scale for more.

    Args:
        count: number of classes.
    """
    if count <= len(CLASS_COLOURS):
        return list(CLASS_COLOURS[:count])
    from matplotlib import colormaps

    return [colormaps["viridis"](i / (count - 1)) for i in range(count)]


def class_names(classes: Sequence[str] | None, count: int, own: Sequence[str] = ()) -> list[str]:
    """Return the class names for a plot.

    The names are `classes` if the user passed them, otherwise `own`. If `own` is empty, they are the class indices.

    Args:
        classes: class names that the user passed, or None.
        count: number of classes.
        own: class names that the plotted image set stores, or an empty sequence.

    Raises:
        ValueError: the number of names is not `count`.
    """
    if classes is None:
        return list(own) or [str(c) for c in range(count)]
    if len(classes) != count:
        raise ValueError(f"classes must have one name per class, got {len(classes)} names for {count} classes")
    return list(classes)


def require_mapping(values: Any, name: str, expected: str) -> None:
    """Check that `values` is a mapping with names as keys.

    Args:
        values: the argument to check.
        name: name of the argument, used in the error message.
        expected: type of the mapping's values, used in the error message.

    Raises:
        TypeError: `values` is not a mapping.
    """
    if not isinstance(values, Mapping):
        example = f'{{"all": {name}}}'
        raise TypeError(
            f"{name} must be a mapping, name -> {expected}, got {type(values).__name__}; for a single one use {example}"
        )
