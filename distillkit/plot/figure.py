"""What all plots share: figures without global state, and colours that colour-blind readers can tell apart."""

from __future__ import annotations

import functools
import io
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["CLASSES", "LINES", "MARKERS", "STYLES", "class_colours", "class_names", "panels", "require_mapping"]

# Okabe & Ito's palette (without yellow, too pale for lines) and Tol's "muted" scheme.
LINES = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
CLASSES = (
    *("#332288", "#CC6677", "#117733", "#DDCC77", "#88CCEE"),
    *("#882255", "#44AA99", "#999933", "#AA4499", "#777777"),
)
STYLES = ("-", ":", "-.")  # the second time that a colour is used, and the third
MARKERS = ("o", "X", "^", "s", "D", "v", "P", "*", "<", ">")


@functools.cache
def _shown() -> type[Figure]:
    """Figures that a notebook shows as a picture, also where no pyplot has told it how."""
    from matplotlib.figure import Figure

    class ShownFigure(Figure):
        """A matplotlib figure with the picture that IPython asks for."""

        def _repr_png_(self) -> bytes:
            buffer = io.BytesIO()
            self.savefig(buffer, format="png")
            return buffer.getvalue()

    return ShownFigure


def panels(given: Any, count: int, width: float, height: float, across: int = 4) -> tuple[Figure, list[Axes]]:
    """The `count` axes to draw into and their figure: those given, or new ones of `width` x `height` inches each.

    A new figure belongs to no window and to no pyplot state.

    Args:
        given: axes, one alone or a list of them; None for a new figure.
        count: how many there must be.
        width, height: of each, in inches.
        across: how many stand beside each other before a new row begins.

    Raises:
        ValueError: another number of axes is given.
    """
    if given is None:
        from matplotlib.backends.backend_agg import FigureCanvasAgg

        across = min(count, across)
        down = -(-count // across)
        figure = _shown()(figsize=(width * across, height * down), layout="constrained", dpi=120)
        FigureCanvasAgg(figure)
        grid = figure.subplots(down, across, squeeze=False)
        axes = list(grid.flat)
        for unused in axes[count:]:
            unused.remove()
        return figure, axes[:count]
    axes = list(given) if hasattr(given, "__iter__") else [given]
    if len(axes) != count:
        raise ValueError(f"this picture needs {count} axes, got {len(axes)}")
    return axes[0].get_figure(root=True), axes


def class_colours(count: int) -> list[Any]:
    """One colour a class: ten distinct ones, or a perceptually even scale for more.

    Args:
        count: of the classes.
    """
    if count <= len(CLASSES):
        return list(CLASSES[:count])
    from matplotlib import colormaps

    return [colormaps["viridis"](i / (count - 1)) for i in range(count)]


def class_names(classes: Sequence[str] | None, count: int) -> list[str]:
    """The given names, or the class numbers.

    Args:
        classes: the names; None for none.
        count: how many classes there are.

    Raises:
        ValueError: not one name a class.
    """
    if classes is None:
        return [str(c) for c in range(count)]
    if len(classes) != count:
        raise ValueError(f"classes must have one name a class, got {len(classes)} names for {count} classes")
    return list(classes)


def require_mapping(values: Any, name: str, wanted: str) -> None:
    """Raise a TypeError unless `values` are a mapping from names, which the plot needs to tell them apart.

    Args:
        values: what was given.
        name: of the argument, for the message.
        wanted: what each name stands for, for the message.
    """
    if not isinstance(values, Mapping):
        example = f'{{"all": {name}}}'
        raise TypeError(
            f"{name} must be a mapping, name -> {wanted}, got {type(values).__name__}; for a single one give {example}"
        )
