from __future__ import annotations

import math
import os
from decimal import Decimal
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from distillkit._utils import check, options
from distillkit._utils.threads import thread_pool
from tests.refused import refused

good_shapes = st.tuples(*[st.integers(1, 3)] * 4)


@given(good_shapes, st.sampled_from([torch.float16, torch.bfloat16, torch.float32, torch.float64]))
def test_valid_images_pass_unchanged(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    images = torch.zeros(shape, dtype=dtype)
    assert check.batch_of_images(images) is images


@given(good_shapes, st.sampled_from([math.nan, math.inf, -math.inf]), st.data())
def test_single_invalid_value_is_found_and_located(shape: tuple[int, ...], value: float, data: st.DataObject) -> None:
    images = torch.zeros(shape)
    at = [data.draw(st.integers(0, size - 1)) for size in shape]
    images[tuple(at)] = value
    with pytest.raises(ValueError, match=rf"1 of {shape[0]} images hold NaN or Inf \(first: {at[0]}\)"):
        check.batch_of_images(images)


@given(st.lists(st.integers(0, 3), max_size=6).filter(lambda shape: len(shape) != 4 or 0 in shape))
def test_other_shapes_are_refused_with_the_shape(shape: list[int]) -> None:
    with pytest.raises(ValueError, match="pictures must") as refusal:
        check.batch_of_images(torch.zeros(shape), "pictures")
    assert str(shape) in str(refusal.value)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int64, torch.bool, torch.complex64])
def test_integer_images_and_lists_are_refused(dtype: torch.dtype) -> None:
    integers, listed = torch.zeros(1, 1, 2, 2, dtype=dtype), [[0.0]]
    words = r"images must be floating point, got torch\.\w+; uint8 .* / 255"
    refused(lambda: check.batch_of_images(integers), TypeError, words)
    words = r"images must be a torch\.Tensor \[N, C, H, W\], got list"
    refused(lambda: check.batch_of_images(listed), TypeError, words)  # type: ignore[arg-type]


@given(st.lists(st.integers(0, 9), max_size=8), st.sampled_from([torch.uint8, torch.int32, torch.int64]))
def test_valid_labels_become_int64(values: list[int], dtype: torch.dtype) -> None:
    labels = check.class_labels(torch.tensor(values, dtype=dtype), len(values), 10)
    assert labels.dtype == torch.int64
    assert labels.tolist() == values == check.class_labels(labels, None, None).tolist()


@pytest.mark.parametrize(
    ("labels", "error", "words"),
    [
        ([0, 1], TypeError, "got list"),
        (torch.zeros(2), TypeError, r"got torch\.float32"),
        (torch.zeros(2, dtype=torch.bool), TypeError, r"got torch\.bool"),
        (torch.zeros(2, dtype=torch.complex64), TypeError, r"got torch\.complex64"),
        (torch.zeros(2, 1, dtype=torch.long), ValueError, r"one dimension \[N\], got shape \[2, 1\]"),
        (torch.zeros(3, dtype=torch.long), ValueError, "got 3 for 2 images"),
        (torch.tensor([0, 1]).to_sparse(), ValueError, r"dense tensor, got one of the layout torch\.sparse_coo"),
        (torch.tensor([0, -1]), ValueError, "at least 0, got -1"),
        (torch.tensor([0, 5]), ValueError, "below num_classes=5, got 5"),
    ],
)
def test_invalid_labels_are_refused(labels: Any, error: type[Exception], words: str) -> None:
    refused(lambda: check.class_labels(labels, 2, 5, "marks"), error, "marks must.*" + words)


def test_labels_imply_a_number_of_classes_unless_they_are_ids() -> None:
    for largest in (0, 3, 999_999):
        assert check.classes_of(torch.tensor([0, largest])) == largest + 1
    assert check.classes_of(torch.zeros(0, dtype=torch.int64)) == 1
    too_large = torch.tensor([1_000_000])
    refused(lambda: check.classes_of(too_large, "marks"), ValueError, "marks must be class indices from 0")


@given(st.integers(-3, 9), st.integers(-2, 3), st.one_of(st.none(), st.integers(3, 6)))
def test_positive_int_accepts_its_interval(value: int, least: int, most: int | None) -> None:
    if value >= least and (most is None or value <= most):
        found = check.positive_int(np.int8(value), "count", least, most)  # type: ignore[arg-type]
        assert (type(found), found) == (int, value)
    else:
        words = f"count must be at (least|most) -?[0-9]+, got {value}"
        refused(lambda: check.positive_int(value, "count", least, most), ValueError, words)


@pytest.mark.parametrize("value", [True, 1.0, "1", None])
def test_positive_int_refuses_other_types(value: Any) -> None:
    refused(lambda: check.positive_int(value, "count"), TypeError, "count must be an int, got")


@given(st.floats(-9, 9), st.booleans())
def test_real_number_accepts_its_interval(value: float, closed: bool) -> None:
    limits = {"least": -1.0, "most": 2.0} if closed else {"above": -1.0, "below": 2.0}
    if (-1 <= value <= 2) if closed else (-1 < value < 2):
        assert check.real_number(value, "rate", **limits) == value
    else:
        refused(lambda: check.real_number(value, "rate", **limits), ValueError, "rate must be")


@pytest.mark.parametrize(
    ("value", "limits", "words"),
    [
        (-1, {"least": 0.0}, "rate must be at least 0, got -1"),
        (3, {"most": 2.5}, r"rate must be at most 2\.5, got 3"),
        (3, {"least": 0.0, "most": 2.0}, r"rate must be in \[0, 2\], got 3"),
        (0, {"above": 0.0}, "rate must be greater than 0, got 0"),
        (1, {"below": 1.0}, "rate must be less than 1, got 1"),
        (math.nan, {}, "rate must be finite, got nan"),
        (math.inf, {}, "rate must be finite, got inf"),
    ],
)
def test_real_number_names_its_interval(value: float, limits: dict[str, float], words: str) -> None:
    refused(lambda: check.real_number(value, "rate", **limits), ValueError, words)


@pytest.mark.parametrize("value", [True, "1", None, 1j, Fraction(1, 2), Decimal(1)])
def test_real_number_refuses_other_types_and_makes_integers_floats(value: Any) -> None:
    assert isinstance(check.real_number(3, "rate"), float)
    refused(lambda: check.real_number(value, "rate"), TypeError, "rate must be a number, got")


@pytest.mark.parametrize(("kind", "inside", "outside"), [
    ("Positive", [1e-9], [0.0]), ("NonNegative", [0.0], [-1e-9]), ("Fraction", [0, 1], [-0.1, 1.1]),
    ("Decay", [0, 0.99], [-0.1, 1.0]), ("Share", [0.1], [0.0, 1.0]), ("Rate", [0.1, 1], [0.0, 1.1]),
    ("PositiveInt", [1], [0]), ("NonNegativeInt", [0], [-1]), ("AtLeastTwo", [2], [1]), ("Rounds", [(1, 2)], [(0,)]),
    ("Temperature", [1e-6], [9e-7]), ("LearningRate", [1e-9, 1e37], [0.0, 1.1e37]),
])  # fmt: skip
def test_types_of_options_have_their_bounds(kind: str, inside: list[Any], outside: list[Any]) -> None:
    _, checked = get_args(getattr(options, kind))
    for value in inside:
        assert checked(value, "it") == value
    for value in outside:
        refused(partial(checked, value, "it"), ValueError, "it must be")


def test_paths_and_names() -> None:
    assert check.folder("~/a", "it") == check.path("~/a", "it") == Path.home() / "a"
    for text in ("", "a\0b"):
        refused(partial(check.path, text, "it"), ValueError, "it must be the path of a file or folder")
    refused(partial(check.path, next(os.scandir(b"/")), "it"), TypeError, "it must be a path, .* got DirEntry")
    with pytest.raises(NotADirectoryError, match="it must be a folder, but .*test_check.py is a file"):
        check.folder(f"{__file__}/a/b", "it")
    with pytest.raises(TypeError, match="it must have strings as names, got 1"):
        check.mapping({1: 2}, "it")  # type: ignore[dict-item]


def test_threads_of_a_pool_compute_alone_and_the_callers_number_returns() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with thread_pool(2, "test") as pool:
            assert {pool.submit(torch.get_num_threads).result() for _ in range(4)} == {1}
            torch.set_num_threads(3)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_rows() -> None:
    values = torch.zeros(2, 3)
    assert check.matrix(values, "embeddings") is values
    for bad, error, words in (
        ([[0.0]], TypeError, "got list"),
        (torch.zeros(2, 3, dtype=torch.long), TypeError, r"got torch\.int64"),
        (torch.zeros(3), ValueError, r"two dimensions, none empty, got shape \[3\]"),
        (torch.zeros(0, 3), ValueError, r"none empty, got shape \[0, 3\]"),
        (torch.full((2, 3), torch.inf), ValueError, "be finite"),
    ):
        refused(partial(check.matrix, bad, "embeddings"), error, "embeddings must.*" + words)  # type: ignore[arg-type]


def test_results_without_a_gradient_are_refused() -> None:
    assert check.differentiable(leaf := torch.zeros(1, requires_grad=True), "it", "them") is leaf
    for context in (torch.enable_grad(), torch.no_grad()):
        with context:
            words = "it must be differentiable with respect to them, but its result has no gradient; remove detach and"
            refused(lambda: check.differentiable(torch.zeros(1), "it", "them"), ValueError, words)


def test_one_of_and_instance() -> None:
    assert check.one_of("b", "kind", ("a", "b")) == "b"
    for value in ("c", True):
        words = f"kind must be one of 'a', 'b', got {value!r}"
        refused(partial(check.one_of, value, "kind", ("a", "b")), ValueError, words)
    assert check.instance(3, int, "count", "an integer") == 3
    for value, came in (("3", "str"), (int, "the class int")):
        words = f"count must be an integer, got {came}"
        refused(partial(check.instance, value, int, "count", "an integer"), TypeError, words)
