"""Figures of a study show every candidate of its records and name what is missing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from matplotlib.figure import Figure

from distillkit import LabeledImages
from distillkit.study import Record, curves, pictures
from tests.distillkit.study.sample_records import record, write

RUNS = [
    *(record([0.1, 0.2 + 0.1 * seed], "FedAvg", seed) for seed in (0, 1)),
    record([0.1, 0.3], "FedProx"),
    *(record(0.4 + 0.1 * seed, "DM", seed) for seed in (0, 1)),
    *(record([None, None], "Local", seed) for seed in (0, 1)),
]


def legend(figure: Figure, panel: int = 0) -> list[str]:
    return [t.get_text() for t in figure.axes[panel].get_legend().get_texts()]


def test_every_candidate_is_drawn_or_named() -> None:
    figure = curves(RUNS)
    axes = figure.axes[0]
    assert legend(figure) == ["FedAvg", "FedProx (1 of 2 seeds)", "DM"]
    assert axes.get_title() == "digits\nwithout a number: Local"
    average, _, level = axes.lines
    assert [*average.get_ydata()] == pytest.approx([10, 25])
    assert [*level.get_ydata()] == pytest.approx([45, 45])
    assert axes.get_legend().get_title().get_text() == "mean ± std of 1 to 2 runs"
    loss = curves(RUNS, column="loss").axes[0]
    assert [[*line.get_ydata()] for line in loss.lines] == [[1.0, 1.0]] * 3
    assert loss.get_title() == "digits\nwithout a number: DM"


def test_tasks_are_drawn_by_cost_side_by_side_from_a_folder(tmp_path: Path) -> None:
    runs = [*RUNS, record([0.5, 0.6, 0.7], "FedAvg", task="other")]
    figure = curves(write(tmp_path, runs), by="bytes")
    assert [ax.get_title() for ax in figure.axes] == ["digits\nwithout a number: Local", "other"]
    assert [*figure.axes[1].lines[0].get_xdata()] == pytest.approx([3, 6, 9])
    ends = {"bytes_up": 3, "bytes_down": 6, "client_seconds": 6, "seconds": 9}
    for by, end in ends.items():
        [panel] = curves(tmp_path, task="other", by=by).axes
        assert panel.lines[0].get_xdata()[-1] == pytest.approx(end)


def test_failed_run_does_not_shorten_the_others() -> None:
    burnt = record([0.5], "FedAvg", 2, error="loss is nan", accuracy_last=None)
    figure = curves([*RUNS[:2], burnt])
    assert legend(figure) == ["FedAvg (2 of 3 seeds)"]
    assert len(figure.axes[0].lines[0].get_xdata()) == 2


def folder_with_sets(folder: Path, runs: list[Record], classes: int = 3) -> Path:
    """Return the folder with a set in each run of DM: of seed s, s + 1 images a class."""
    write(folder, runs)
    for r in (r for r in runs if r.method == "DM"):
        labels = torch.arange(classes).repeat(r.seed + 1)
        LabeledImages(torch.rand(len(labels), 1, 8, 8, generator=torch.Generator().manual_seed(0)), labels).save(
            folder / str(r.line["run"]) / "set.safetensors"
        )
    return folder


def test_images_are_of_the_first_seeds_set_one_panel_per_candidate(tmp_path: Path) -> None:
    figure = pictures(folder_with_sets(tmp_path, RUNS))
    assert [ax.get_title() for ax in figure.axes] == ["DM"]
    assert [t.get_text() for t in figure.axes[0].get_yticklabels()] == ["0", "1", "2"]
    (shown,) = figure.axes[0].get_images()
    assert shown.get_array().shape == (3 * 10, 1 * 10, 3)
    assert [*figure.get_size_inches()] == pytest.approx([0.5 * 3 + 0.8, 0.5 * 3 + 0.6])
    many = pictures(folder_with_sets(tmp_path / "b", [record(0.1, "DM", task=t) for t in ("a", "b")], 12), classes=4)
    assert [ax.get_title() for ax in many.axes] == ["a: DM", "b: DM"]
    assert len(many.axes[0].get_yticklabels()) == 4
    for path in (tmp_path / "b").rglob("set.safetensors"):
        LabeledImages.load(path).replace(class_names=tuple("abcdefghijkl")).save(path)
    named = pictures(tmp_path / "b", classes=4)
    assert [t.get_text() for t in named.axes[0].get_yticklabels()] == ["a", "b", "c", "d"]


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: curves(RUNS, by="rounds"), "by must be one of 'round', 'bytes'.*, got 'rounds'"),
        (lambda: curves(RUNS, task="x"), "task must be one of 'digits', got 'x'"),
        (lambda: pictures(RUNS, task="x"), "task must be one of 'digits', got 'x'"),
        (lambda: curves([record(0.5)]), "runs whose rounds have the column 'accuracy'; 'digits' has none"),
        (lambda: curves(RUNS, column="nothing"), "rounds have the column 'nothing'"),
        (lambda: pictures(RUNS), r"has a set\.safetensors; none has"),
        (lambda: pictures(RUNS, per_class=0), "per_class must be at least 1"),
        (lambda: pictures(RUNS, classes=0), "classes must be at least 1"),
    ],
)
def test_invalid_input_is_refused(call: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        call()


def test_so_many_images_of_a_class_are_drawn(tmp_path: Path) -> None:
    folder = folder_with_sets(tmp_path, [record(0.1, "DM", 3)])
    for options, columns in (({}, 3), ({"per_class": 2}, 2), ({"per_class": 9}, 4)):
        (shown,) = pictures(folder, **options).axes[0].get_images()
        assert shown.get_array().shape == (3 * 10, columns * 10, 3)
