"""Figures of a study: learning curves, and images of the condensed sets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from distillkit import plot
from distillkit._utils import check
from distillkit.plot.figure import subplots
from distillkit.sets import LabeledImages
from distillkit.study._records import Group, RecordsLike, group_records

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_BY = ("round", "bytes", "bytes_up", "bytes_down", "client_seconds", "seconds")


def curves(records: RecordsLike, *, by: str = "round", task: str | None = None, column: str = "accuracy") -> Figure:
    """Draw learning curves of the candidates of a study: the mean over seeds, with a band of one standard deviation.

    Args:
        records: records of a study's finished runs, or the study's folder.
        by: quantity on the x axis: "round", or a cumulative cost: "bytes" (of all messages), "bytes_up", "bytes_down",
            "client_seconds", or "seconds".
        task: name of the task to draw; default: all tasks, one panel per task.
        column: quantity on the y axis, by its name in the runs' histories.

    Returns:
        The matplotlib figure (`figure.savefig("curves.png")`). A candidate without rounds, such as a condensed set on
        which networks are trained, is a dashed horizontal line at its accuracy. Candidates with missing seeds are
        marked. Candidates without a value are named in the title.

    Raises:
        ValueError: there are no records, `by` or `task` is unknown, or no candidate of a task has rounds with this
            column.
    """
    check.one_of(by, "by", _BY)
    if not isinstance(column, str):
        raise TypeError(f"column must be the name of a column of the rounds, got {type(column).__name__}")
    found = _of_task(task, group_records(records))
    tasks = list(dict.fromkeys(g.task for g in found))
    figure, axes = subplots(None, len(tasks), 5.2, 3.6, columns=2)
    for ax, name in zip(axes, tasks):
        own = [g for g in found if g.task == name]
        drawn = {_label(g): values for g in own if (values := _values(g, column))}
        if not any(isinstance(v[0], list) for v in drawn.values()):
            raise ValueError(f"records must hold runs whose rounds have the column {column!r}; {name!r} has none")
        plot.curves(drawn, x=by, y=column, ax=ax)
        left = [_label(g) for g in own if _label(g) not in drawn]
        notes = f"\nwithout a number: {', '.join(left)}" if left else ""
        ax.set_title(f"{name}{notes}", fontsize=9)
    return figure


def pictures(records: RecordsLike, *, task: str | None = None, per_class: int = 3, classes: int = 10) -> Figure:
    """Draw the images of the condensed sets, one row per class.

    For each candidate, the set of the first finished seed is drawn.

    Args:
        records: records read from a study's folder, or the folder. The sets are in the runs' folders
            (`set.safetensors`).
        task: name of the task to draw; default: all tasks.
        per_class: maximum number of images per class.
        classes: maximum number of classes; only the first classes are drawn.

    Returns:
        The matplotlib figure, one panel per candidate and task.

    Raises:
        ValueError: there is no such task, or no run made a set.
    """
    check.positive_int(per_class, "per_class")
    check.positive_int(classes, "classes")
    found = _of_task(task, group_records(records))
    several = len({g.task for g in found}) > 1
    paths = {(g.task, g.method): [r.folder / "set.safetensors" for r in g.records if r.folder] for g in found}
    sets = {}
    for (task_name, method), several_paths in paths.items():
        if first := next((path for path in several_paths if path.is_file()), None):
            one = LabeledImages.load(first)
            if one.num_classes > classes and one.labels.ndim == 1:
                names = one.class_names[:classes]
                one = one[one.labels < classes].replace(num_classes=classes, class_names=names)
            sets[f"{task_name}: {method}" if several else method] = one
    if not sets:
        raise ValueError("records must hold a run whose folder has a set.safetensors; none has")
    most = max(one.num_classes for one in sets.values())
    figure, axes = subplots(None, len(sets), 0.5 * per_class + 0.8, 0.5 * most + 0.6)
    for ax, (name, one) in zip(axes, sets.items()):
        plot.grid(one, per_class=per_class, ax=ax)
        ax.set_title(name, fontsize=9)
    return figure


def _of_task(task: str | None, found: Sequence[Group]) -> list[Group]:
    if task is not None:
        check.one_of(task, "task", tuple(dict.fromkeys(g.task for g in found)))
    return [g for g in found if task in (None, g.task)]


def _label(group: Group) -> str:
    done, expected = sum(not r.failed for r in group.records), len(group.expected_seeds)
    return group.method if done == expected else f"{group.method} ({done} of {expected} seeds)"


def _values(group: Group, column: str) -> list[Any]:
    """Return the histories that have a column; for a method without rounds, the column's final value in each run."""
    rows = [[*r.rows] for r in group.records if not r.failed and any(row.get(column) is not None for row in r.rows)]
    if rows or any(r.rows for r in group.records):
        return rows
    return [v for v in group.values(f"{column}_last") if v is not None]
