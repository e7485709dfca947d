from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from distillkit import LabeledImages, Normalization
from distillkit.data import Split, StoredSplit, split_by
from distillkit.data._hold_out import hold_out, hold_out_content
from distillkit.rng import derive
from tests.refused import refused


def slices(patients: int, each: int, seed: int = 0) -> LabeledImages:
    """Return some pictures of each patient, shuffled; each patient has one class."""
    patient = torch.arange(patients).repeat_interleave(each)[torch.randperm(patients * each, generator=derive(seed))]
    images = torch.rand(len(patient), 1, 2, 2, generator=derive(seed, "pixels"))
    return LabeledImages(images, patient % 2, num_classes=2, columns={"patient": 7 * patient, "age": 7 * patient})


@given(seed=st.integers(0, 100), patients=st.integers(4, 12), each=st.integers(1, 4))
def test_no_patient_is_in_both_sets(seed: int, patients: int, each: int) -> None:
    data = slices(patients, each, seed)
    split = split_by(data, "patient", 0.5)
    trained, tested = (set(part.columns["patient"].tolist()) for part in split)
    assert not trained & tested
    assert trained | tested == {7 * k for k in range(patients)}
    assert sum(len(part) for part in split) == len(data)
    of_class = {k: sum(p // 7 % 2 == k for p in tested) for k in range(2)}
    assert all(n == round(0.5 * len(range(k, patients, 2))) for k, n in of_class.items())


def test_images_keep_their_order_and_info_names_the_column(global_rng_untouched: None) -> None:
    data = slices(6, 3)
    split = split_by(data, "patient", 0.5, classes=("well", "ill"))
    again = split_by(data.replace(class_names=("a", "b")), "patient", 0.5)
    for part, other in zip(split, again, strict=True):
        assert torch.equal(part.images, other.images)
        rows = torch.isin(data.columns["patient"], part.columns["patient"].unique())
        assert torch.equal(part.images, data.images[rows])
    facts = {"split": "test", "test_fraction": 0.5, "apart": "patient", "hold_out": "random"}
    assert split.test.info == facts
    for made, names in ((split, ("well", "ill")), (again, ("a", "b"))):
        assert made.classes == made.train.class_names == made.test.class_names == names


def test_content_decides_anew_in_a_second_split() -> None:
    data = slices(40, 2)
    first = split_by(data, "patient", 0.5, hold_out="content")
    second = split_by(first.train, "patient", 0.5, hold_out="content")
    assert first.train.info["hold_out"] == second.test.info["hold_out"] == "content"
    values = first.train.columns["patient"]
    purpose = "test patient after {'hold_out': 'content', 'apart': 'patient', 'test_fraction': 0.5}"
    chosen = hold_out_content([str(value).encode() for value in values.tolist()], 0.5, purpose)[1]
    assert torch.equal(second.test.columns["patient"], values[chosen])
    last = split_by(split_by(first.train, "patient", 0.4, hold_out="content").train, "patient", 0.5, hold_out="content")
    assert len(last.train) / 2 < len(last.test) < 2 * len(last.train)
    for before in ({}, {"hold_out": "random", "apart": "patient", "test_fraction": 0.5}):
        many = slices(400, 1).replace(info=before)
        for _ in range(4):  # the third and later splits, or all of them, have the column and share of the one before
            left = split_by(many, "patient", 0.5, hold_out="content")
            assert len(many) / 4 < len(left.test) < 3 * len(many) / 4
            many = left.train
    ages = split_by(data, "age", 0.5, hold_out="content").test.columns["age"]
    assert not torch.equal(ages, first.test.columns["age"])
    for one, other in ((first.train, "random"), (split_by(data, "patient", 0.5).train, "content")):
        info = split_by(one, "age", 0.5, hold_out=other).train.info  # type: ignore[arg-type]
        assert (info["hold_out"], info["apart"]) == ("random", "age")
    alone = data[(data.columns["patient"] == 0).nonzero().flatten()]
    assert sorted(map(len, split_by(alone, "patient", 0.5, hold_out="content"))) == [0, 2]
    whole = split_by(data.replace(info={"domains": ["a", "b"]}), "patient", 0.0)
    assert ("hold_out" in whole.train.info, whole.train.class_names, whole.domains) == (False, (), ("a", "b"))
    assert whole.classes == ("0", "1")


def test_content_holds_out_the_share_and_anew_for_each_purpose() -> None:
    digests = [str(number).encode() for number in range(20_000)]
    for fraction, low, high in ((0.001, 5, 40), (0.3, 5750, 6250)):
        kept, held_out = hold_out_content(digests, fraction, "a")
        assert low < len(held_out) < high
        assert torch.equal(torch.cat([kept, held_out]).sort().values, torch.arange(20_000))
    other = hold_out_content(digests, 0.3, "b")[1]
    assert 1600 < len(set(other.tolist()) & set(held_out.tolist())) < 2000
    assert [rows.tolist() for rows in hold_out_content([], 0.3, "a")] == [[], []]


def test_choices_are_the_same_in_all_versions() -> None:
    """They define the test sets of `digits` and of folders, of which results are published."""
    assert hold_out(torch.arange(12) % 2, 0.34)[1].tolist() == [2, 3, 9, 10]
    assert hold_out_content([b"%d" % i for i in range(12)], 0.5, "test")[1].tolist() == [1, 5]


def test_label_rows_are_split_too() -> None:
    data = slices(6, 2)
    rows = data.replace(labels=torch.nn.functional.one_hot(data.labels, 2).float())
    assert [len(part) for part in split_by(rows, "patient", 0.5)] == [6, 6]
    assert [len(part) for part in split_by(rows, "patient", 0.0)] == [12, 0]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"column": "user"}, "column must be one of age, patient, weight; got 'user'"),
        ({"column": 5}, "column must be one of age, patient, weight; got 5,"),
        ({"column": "weight"}, "column 'weight' must be class indices"),
        ({"test_fraction": -0.1}, "test_fraction must be at least 0, got -0.1"),
        ({"test_fraction": 1.0}, "test_fraction must be less than 1, got 1"),
        ({"test_fraction": 0.1}, "test_fraction=0.1 of 4 values of 'patient' leaves no test set"),
        ({"test_fraction": 0.9}, "test_fraction=0.9 of 4 values of 'patient' leaves no train set"),
        ({"classes": ()}, "classes must be 2 names, got 0"),
    ],
)
def test_impossible_splits_are_refused(options: dict[str, Any], words: str) -> None:
    data = slices(4, 2)
    data = data.replace(columns={**data.columns, "weight": torch.rand(8, generator=derive(0))})
    refused(lambda: split_by(data, **{"column": "patient", **options}), (TypeError, ValueError), words)


@pytest.mark.parametrize("kind", [Split, StoredSplit])
@pytest.mark.parametrize("rows", [0, 8])
@pytest.mark.parametrize("part", ["test", "validation"])
def test_parts_of_a_split_have_one_form(part: str, rows: int, kind: Any) -> None:
    """The rule holds for parts without images, too."""
    one = slices(4, 2)
    others = {
        "shape": LabeledImages(torch.rand(8, 1, 2, 3), one.labels, num_classes=2),
        "normalization": one.renormalize(Normalization([0.5], [0.5])),
        "num_classes": one.replace(num_classes=3),
    }
    for what, other in others.items():
        words = f"train and {part} must have the same {what}, got {getattr(one, what)} and {getattr(other, what)}"
        words += "; give size= or channels=" if what == "shape" else ""
        with pytest.raises(ValueError, match=re.escape(words) + "$"):
            kind(one, **{"test": one[:rows], "validation": None, "classes": ("a", "b"), part: other[:rows]})
    refused(lambda: kind(one, one[:rows], ("a", "b", "c")), ValueError, "classes must be 2 names, got 3")
    refused(lambda: setattr(kind(one, one, ("a", "b")), "tests", one), AttributeError, "cannot assign to field 'tests'")


def test_class_of_a_value_is_that_of_its_first_image() -> None:
    first, pixels = torch.arange(40) % 2, torch.rand(80, 1, 2, 2, generator=derive(0))
    chosen = [
        split_by(LabeledImages(pixels, labels, columns={"id": torch.arange(40).repeat(2)}), "id").test.columns["id"]
        for labels in (first.repeat(2), torch.cat([first, 1 - first]), torch.cat([first, first * 0]))
    ]
    assert torch.equal(chosen[0], chosen[1])
    assert torch.equal(chosen[0], chosen[2])
