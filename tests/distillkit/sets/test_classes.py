"""Row lists of images by class, and random images of each class."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from distillkit import LabeledImages
from distillkit.rng import derive
from distillkit.sets._class_index import class_indices, class_labels, class_rows, random_rows
from tests.refused import refused

LABELS = st.lists(st.integers(0, 4), min_size=1, max_size=30)


def a_set(labels: list[int]) -> LabeledImages:
    pixels = torch.rand(len(labels), 1, 2, 2, generator=derive(0))
    return LabeledImages(pixels, torch.tensor(labels), num_classes=5)


@given(LABELS)
def test_every_image_is_in_its_class_list_once_and_in_order(labels: list[int]) -> None:
    rows = class_rows(a_set(labels))
    assert list(rows) == sorted(set(labels))
    for c, own in rows.items():
        assert own.tolist() == [i for i, label in enumerate(labels) if label == c]
        assert own.dtype == torch.int64


@given(LABELS, st.data())
def test_random_rows_repeat_images_only_in_too_small_classes(labels: list[int], data: st.DataObject) -> None:
    rows = class_rows(a_set(labels))
    counts = [data.draw(st.integers(0, 8)) for _ in rows]
    seed = data.draw(st.integers(0, 9))
    chosen, short = random_rows(rows, counts, derive(seed))
    assert torch.equal(chosen, random_rows(rows, counts, derive(seed))[0])
    assert short == [c for (c, own), count in zip(rows.items(), counts, strict=True) if count > len(own)]
    for (c, own), part in zip(rows.items(), chosen.split(counts), strict=True):
        drawn = Counter(part.tolist())
        assert set(drawn) <= set(own.tolist())
        if c in short:
            assert set(drawn) == set(own.tolist()), "all of its own come first"
        else:
            assert max(drawn.values(), default=1) == 1


def test_all_images_of_a_class_are_drawn_at_some_time() -> None:
    rows = {1: torch.tensor([3, 5, 8])}
    for count in (1, 4):  # of which the last one is drawn again
        drawn = Counter(int(random_rows(rows, [count], derive(seed))[0][-1]) for seed in range(90))
        assert set(drawn) == {3, 5, 8}
        assert min(drawn.values()) > 15


@given(st.lists(st.integers(0, 4), min_size=1, unique=True))
def test_classes_are_sorted_for_any_numbers(classes: list[int]) -> None:
    assert class_indices(classes, 5) == sorted(classes)
    assert class_indices([torch.tensor(c) for c in classes], 5) == sorted(classes)


@pytest.mark.parametrize("classes", [[], [1, 1], [5, 1], [-1], [True], [0.5], "01", 3])
def test_unknown_classes_are_refused_by_name(classes: Any) -> None:
    words = {"[-1]": "at least 0, got -1", "01": "a list of class indices, got str", "3": "a list of .*, got int"}
    words |= {"[True]": "an int, got bool", "[0.5]": "an int, got float"}
    distinct = rf"distinct and in \[0, 5\), at least one, got {re.escape(str(classes))}"
    wanted = f"^classes must be {words.get(str(classes), distinct)}$"
    refused(lambda: class_indices(classes, 5), (TypeError, ValueError), wanted)


@pytest.mark.parametrize("column", [torch.tensor([1, 1]).int(), torch.ones(2), torch.ones(2, 1).long()], ids=repr)
def test_only_a_column_of_indices_overrides_the_largest_entry(column: torch.Tensor) -> None:
    soft = LabeledImages(torch.rand(2, 1, 2, 2, generator=derive(0)), torch.eye(2), columns={"class": column})
    indices = column.ndim == 1 and column.dtype == torch.int32
    assert torch.equal(class_labels(soft), column.long() if indices else torch.arange(2))
    for wrong in ([0, 2], [-1, 1]):
        words = rf"^the column 'class' must be in \[0, 2\), got {wrong[0]} to {wrong[1]}$"
        refused(lambda w=wrong: class_labels(soft.replace(columns={"class": torch.tensor(w)})), ValueError, words)


def test_label_rows_and_empty_sets_have_no_classes() -> None:
    soft = LabeledImages(torch.rand(2, 1, 2, 2, generator=derive(0)), torch.eye(2))
    refused(lambda: class_rows(soft), ValueError, r"must be class indices \[N\], got rows of shape \[2, 2\]")
    refused(lambda: class_rows(a_set([0])[:0]), ValueError, "at least one image")
