"""Class names travel with sets through slices, files, loaders, condensers and figures, but not through messages."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset, Subset

from distillkit import LabeledImages, plot
from distillkit.data import load, split_by
from distillkit.evaluate import evaluate
from distillkit.fingerprint import set_fingerprint
from distillkit.rng import derive
from distillkit.sets import as_set
from distillkit.study import as_split
from distillkit.training import Protocol
from fl import simulate
from fl._codec import decode, encode, to_parts
from fl.averaging import FedAvg
from fl.message import Entry, Message
from tests.refused import refused
from tests.stored import write_pixels

NAMES = ("cat", "dog", "eel")
X = torch.rand(9, 1, 8, 8, generator=derive(0))
Y = torch.arange(9) % 3
DATA = LabeledImages(X, Y, class_names=NAMES)


class Entries:
    """Declaration of a message with one set."""

    images = Entry[LabeledImages]("first")


class Named(Dataset[Any]):
    """Dataset with torchvision's attribute of class names."""

    classes = NAMES

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        if index >= 6:
            raise IndexError
        return X[index], int(Y[index])


class Rows(Named):
    """Dataset of label rows, whose width does not depend on the data."""

    def __getitem__(self, index: int) -> Any:
        image, label = super().__getitem__(index)
        return image, torch.eye(3)[label]


@pytest.mark.parametrize(
    ("names", "words"),
    [
        ("abc", "must be a sequence of strings, one per class, got 'abc'"),
        (["a", 1, "b"], r"must be a sequence of strings, one per class, got \['a', 1, 'b'\]"),
        ({"a", "b", "c"}, "must be a sequence of strings"),
        (["a", "b"], "must be 3 names, one per class and none empty"),
        (["a", "b", "c", "d"], "must be 3 names"),
        (["a", "b", ""], r"must be names, one per class and none empty, got \['a', 'b', ''\]"),
        ([*"edcab"] * 2, "must differ, but 'a' names several classes"),
    ],
)
def test_wrong_names_are_refused(names: Any, words: str) -> None:
    for call in (
        lambda: LabeledImages(X, Y, num_classes=3, class_names=names),
        lambda: DATA.replace(class_names=names),
    ):
        refused(call, (TypeError, ValueError), f"class_names {words}")


def test_derived_sets_keep_the_names() -> None:
    halves = [DATA[:4], DATA[DATA.labels == 1], DATA.to(dtype=torch.float64), DATA.replace(info={"a": 1})]
    assert all(one.class_names == NAMES for one in halves)
    assert DATA.replace(num_classes=3).class_names == NAMES
    assert DATA.replace(labels=2 - Y).class_names == DATA.replace(labels=torch.rand(9, 3)).class_names == NAMES
    assert DATA.replace(labels=2 - Y, num_classes=3).class_names == ()  # probably other classes
    assert DATA.replace(num_classes=4).class_names == DATA[Y < 2].replace(num_classes=2).class_names == ()
    assert DATA.replace(num_classes=4, class_names=(*NAMES, "fox")).class_names == (*NAMES, "fox")
    assert LabeledImages.concatenate([DATA.replace(class_names=()), DATA]).class_names == NAMES
    assert LabeledImages.concatenate([DATA, DATA.replace(class_names=("a", "b", "c"))]).class_names == ()


def test_the_same_names_in_another_order_are_refused() -> None:
    other = DATA.replace(class_names=("dog", "cat", "eel"))
    with pytest.raises(ValueError, match=r"same classes in another order: cat, dog, eel and dog, cat, eel"):
        DATA.require_compatible(other)
    words = "the sets have the class 'cat' in another order: cat, dog, eel and dog, cat, fox"
    refused(lambda: DATA.require_compatible(DATA.replace(class_names=("dog", "cat", "fox"))), ValueError, words)
    strangers = DATA.replace(class_names=("a", "b", "c"))
    DATA.require_compatible(strangers)
    with pytest.raises(ValueError, match="data and test have no class in common: cat, dog, eel and a, b, c"):
        DATA.require_compatible(strangers, names=("data", "test"))
    DATA.require_compatible(DATA.replace(class_names=()))
    DATA.require_compatible(DATA.replace(class_names=("a", "dog", "c")), names=("data", "test"))


@pytest.mark.parametrize(
    ("names", "refused"),
    [
        (("1", "10", "2"), True),
        (("class 2", "class 10", "class 0"), True),
        (("5", "7", "10"), False),
        (("a1", "b0", "c2"), False),
        (("2a", "10b", "3c"), False),
        (("3", "two", "1"), False),
    ],
)
def test_numbers_in_another_order_are_refused_beside_a_set_without_names(names: tuple[str, ...], refused: bool) -> None:
    folder, plain = DATA.replace(class_names=names), DATA.replace(class_names=())
    network = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 3))
    calls: list[Callable[[LabeledImages], object]] = [
        lambda other: folder.require_compatible(other, names=("train", "test")),
        lambda other: other.require_compatible(folder, names=("test", "train")),
        lambda other: as_split(folder, other),
        lambda other: evaluate(folder, other, lambda: network, num_networks=1, protocol=Protocol(epochs=1)),
        lambda other: simulate(FedAvg(factory=lambda k: network), [folder], test=other, rounds=1, progress=False),
    ]
    for call in calls:
        if refused:
            words = rf"only (.+) has .*: {', '.join(names)}, \.\.\.; if the labels of (\w+) have .*`\2\.repl.*=\1\."
            with pytest.raises(ValueError, match=words) as raised:
                call(plain)
            assert "only test has" not in str(raised.value)
        else:
            call(plain)
        call(plain.replace(class_names=names))
    assert LabeledImages.concatenate([folder, plain]).class_names == names  # as for sets in messages


def test_names_change_neither_fingerprints_nor_messages() -> None:
    plain = DATA.replace(class_names=())
    assert "class_names" not in plain.parts()[1]
    assert set_fingerprint(DATA) == set_fingerprint(plain)
    (_, sent), (_, wanted) = (to_parts(Message({Entries.images: one})) for one in (DATA, plain))
    assert sent == wanted
    assert decode(encode(Message({Entries.images: DATA})))[0][Entries.images].class_names == ()


def test_datasets_and_loaders_give_names(tmp_path: Path) -> None:
    for source in (Named(), Subset(Named(), [0, 1])):
        assert as_set(source, progress=False).class_names == NAMES
        assert LabeledImages.from_dataset(source, progress=False).class_names == NAMES
    assert as_set(Named(), num_classes=5, progress=False).class_names == ()
    known = [as_set(one, num_classes=k).classes_given for one, k in ((Named(), None), (Named(), 3), (Rows(), None))]
    assert known == [False, True, True]
    assert as_set(X, Y, class_names=NAMES).classes_given
    for rows in ([0, 0], torch.tensor([1, 1])):
        assert as_set(Subset(Named(), rows)).info == {"derived": "repeated images", "classes": "dataset"}  # type: ignore[arg-type]
    for other, names in ((DATA, r"\(cat, dog, eel\)"), (DATA.replace(class_names=()), r"\(none\)")):
        with pytest.raises(ValueError, match=f"class_names differ from those of the set {names}; omit them"):
            as_set(other, class_names=("dog", "cat", "eel"))
    with pytest.raises(ValueError, match="num_classes=5, but the labels name 3 classes; pass all by class_names="):
        as_set(X, [NAMES[k] for k in Y.tolist()], num_classes=5)
    options: dict[str, Any] = {"num_classes": 3, "classes_given": False, "class_names": NAMES}
    stored = write_pixels(tmp_path / "a.npy", (255 * X).byte(), Y, **options)
    assert stored.class_names == stored[:2].class_names == stored.read([0]).class_names == NAMES
    assert stored.replace(num_classes=3).class_names == NAMES
    assert (stored.classes_given, stored.replace(num_classes=3).classes_given) == (False, True)
    assert stored.replace(labels=2 - stored.labels, num_classes=3).class_names == ()
    assert stored.replace(num_classes=4).class_names == ()
    assert load("digits").train.class_names == tuple("0123456789")


def test_splits_keep_the_names() -> None:
    assert as_split(DATA, DATA).classes == NAMES
    whole = DATA.replace(columns={"patient": torch.arange(9)})
    assert split_by(whole, "patient", 0.34).classes == NAMES
    renamed = split_by(whole, "patient", 0.34, classes=("a", "b", "c"))
    assert renamed.classes == renamed.train.class_names == ("a", "b", "c")


def test_figures_show_the_names() -> None:
    for figure in (plot.grid(DATA), plot.real_and_synthetic(DATA.replace(class_names=()), DATA)):
        assert [text.get_text() for text in figure.axes[0].get_yticklabels()] == list(NAMES)
    figure = plot.grid(DATA, classes=("a", "b", "c"))
    assert [text.get_text() for text in figure.axes[0].get_yticklabels()] == ["a", "b", "c"]
