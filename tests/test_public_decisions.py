"""No record decides what is public: the split of other records, classes, names, failures, warnings, charges."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset

from distillkit.data import Split, clients, load_domains, load_folder, open_folder, partition, split_by
from distillkit.normalization import IDENTITY, Normalization
from distillkit.privacy import (
    Ledger,
    Passes,
    PrivacyError,
    PublicEmbedders,
    class_sums,
    condense_private,
    image_sgd,
    separable,
    train_private,
)
from distillkit.rng import derive
from distillkit.sets import LabeledImages, as_set
from distillkit.study import Task, as_split
from fl import ClientDP, FedAvg, Filtered, simulate
from fl.addons import DPSGD
from fl.methods import PrivateFedDM, SummedFedDM
from tests.refused import refused

HALF = Normalization((0.5,), (0.5,))
CLASSES = ("a", "b", "c")


def records(count: int = 40, seed: int = 0) -> LabeledImages:
    """Return a set whose last record is the only one of class 2; the first two images are equal."""
    pixels = torch.randint(256, (count, 1, 8, 8), generator=derive(seed)).float() / 255
    pixels[1] = pixels[0]
    labels = torch.arange(count) % 2
    labels[-1] = 2
    columns = {"patient": torch.arange(count) // 3}
    return LabeledImages.from_pixels(pixels, labels, num_classes=3, normalization=HALF, columns=columns)


def without(data: LabeledImages, record: int) -> LabeledImages:
    return data[[i for i in range(len(data)) if i != record]]


def contents(data: Any) -> list[bytes]:
    data = data.read() if hasattr(data, "read") else data
    return sorted(bytes((image * 255).round().byte().numpy()) for image in data.pixels())


def as_folder(data: LabeledImages, path: Path) -> Path:
    for i, (image, label) in enumerate(zip(data.pixels(), data.labels.tolist())):
        (path / CLASSES[label]).mkdir(parents=True, exist_ok=True)
        name = path / CLASSES[label] / f"{i:03d}.png"
        Image.fromarray((image[0] * 255).round().byte().numpy()).save(name)
    return path


FOLDER: dict[str, Any] = {"classes": CLASSES, "hold_out": "content", "normalization": HALF, "test_fraction": 0.3}


def task(data: LabeledImages, tuning: bool, **options: Any) -> list[Any]:
    one = Task("t", Split(data, data[:3], CLASSES), partial(_everything), hold_out="content", **options)
    given = one.assign(one.load(), 0, validation=tuning)
    pooled, _ = one.pooled(one.load(), validation=tuning)
    assert contents(pooled) == contents(given.clients[0])
    return [
        given.clients[0],
        given.test if tuning else data[:0],
        *given.server.values(),
        *filter(None, given.own_tests),
    ]


def _everything(labels: Tensor) -> list[Tensor]:
    return [torch.arange(len(labels))]


SPLITS: dict[str, Callable[[LabeledImages, Path], Any]] = {
    "load_folder": lambda data, path: [*load_folder(as_folder(data, path / "f"), **FOLDER)],
    "open_folder": lambda data, path: [*open_folder(as_folder(data, path / "f"), cache=path / "c", **FOLDER)],
    "load_domains": lambda data, path: [*load_domains({"f": as_folder(data, path / "f")}, **FOLDER)],
    "split_by": lambda data, path: [*split_by(data, "patient", 0.3, hold_out="content")],
    "validation": lambda data, path: task(data, True, validation=0.3),
    "own tests": lambda data, path: task(data, False, own_tests=0.3, server_share=0.3),
    "all in tuning": lambda data, path: task(data, True, own_tests=0.3, server_share=0.3, validation=0.3),
}


@pytest.mark.parametrize("how", sorted(SPLITS))
def test_a_record_changes_neither_the_split_of_others_nor_the_classes(how: str, tmp_path: Path) -> None:
    data = records()
    before = SPLITS[how](data, tmp_path / "all")
    parts = [contents(one) for one in before]
    assert len(data) - sum(map(len, parts)) in ((0,) if how != "all in tuning" else range(3, 20))
    assert sum(map(bool, parts)) >= 2
    assert all(one.info["hold_out"] == "content" for one in before[:1])
    if how != "split_by":
        assert any(part.count(contents(data[:1])[0]) == 2 for part in parts)  # equal records go together
    for record in (0, 7, len(data) - 1):  # the last one is the only one of its class
        after = SPLITS[how](without(data, record), tmp_path / str(record))
        changed = [contents(one) for one in after]
        gone = contents(data[[record]])[0]
        assert sum(gone in part for part in parts) <= 1
        for old, new in zip(parts, changed, strict=True):
            if gone in old:
                old = old.copy()
                old.remove(gone)
            assert new == old
        for old_set, new_set in zip(before, after, strict=True):
            assert (new_set.num_classes, new_set.class_names) == (old_set.num_classes, old_set.class_names)
            assert (new_set.classes_given, new_set.info) == (True, old_set.info)


def test_loaded_and_opened_folders_hold_out_the_same_pictures(tmp_path: Path) -> None:
    path = as_folder(records(60), tmp_path / "f")
    for size in (None, 5):
        loaded = load_folder(path, size=size, **FOLDER)
        opened = open_folder(path, size=size, cache=tmp_path / "c", **FOLDER)
        assert [contents(one) for one in loaded] == [contents(one) for one in opened]
    refused(lambda: image_sgd(opened.train, size=60, sigma=2.0), TypeError, "^images must be in memory, but ")
    assert abs(len(loaded.test) - 18) < 12
    assert loaded.test.info["hold_out"] == "content"
    assert "hold_out" not in load_folder(path, classes=CLASSES, test_fraction=0).train.info


class Tiny(nn.Module):
    """Smallest network with the split; with `bad`, its Python code reads pixels, so it cannot be captured."""

    def __init__(self, outputs: int = 3, bad: bool = False) -> None:
        super().__init__()
        self.first, self.classifier, self.bad = nn.Linear(64, 4), nn.Linear(4, outputs), bad

    def features(self, x: Tensor) -> Tensor:
        return self.first(x.flatten(1)) * (2 if self.bad and bool(x.sum() > 0) else 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.features(x))


class Later:
    """Sampler whose networks from the third draw on cannot be captured."""

    fixed = False

    def __init__(self) -> None:
        self.draws = 0

    def draw(self, generator: torch.Generator) -> Any:
        self.draws += 1
        return Tiny(bad=self.draws > 3).eval()


class Always:
    fixed = False

    def draw(self, generator: torch.Generator) -> Any:
        return Tiny().eval()


def weighted(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits, labels, weight=torch.ones(3), reduction="none")


@separable
def branching(embedding: Tensor, mean: Tensor) -> Tensor:
    return (embedding - mean).square().sum(1) * (1 if bool(mean.isfinite().all()) else 2)


PASSES: dict[str, Any] = {"num_networks": 1, "passes": Passes(first_num_networks=1, first_steps=1)}
SET: dict[str, Any] = {"ipc": 1, "steps": 4, "progress": False}
FEDDM: dict[str, Any] = {"factory": Tiny, "sigma": 2.0, "sizes": [9, 9, 9], "num_networks": 1, "ipc": 1, "steps": 1}


def run(method: Any, data: LabeledImages, ledger: Ledger) -> Any:
    how: dict[str, Any] = {"rounds": 1, "progress": False, "ledger": ledger, "seed": 0}
    return simulate(method, [data, records(9, seed=1)], **how).rows[0]["failed"]


PROGRAMS: dict[str, Callable[[LabeledImages, Ledger], Any]] = {
    **{
        f"{name} {sampler.__name__}": partial(call, sampler)
        for sampler in (Later, Always)
        for name, call in {
            "condense_private": lambda sampler, data, ledger: condense_private(
                data, epsilon=2.0, networks=sampler(), num_networks=4, ledger=ledger, **SET,
                passes=Passes(first_num_networks=1, first_steps=1),
            ),
            "image_sgd": lambda sampler, data, ledger: image_sgd(
                data, size=40, sigma=2.0, rate=0.05, networks=sampler(), clip=1.0, ledger=ledger, **SET
            ),
            "class_sums": lambda sampler, data, ledger: class_sums(
                *data, PublicEmbedders(sampler(), 4, like=data), num_classes=3
            ),
        }.items()
    },
    "image_sgd loss": lambda data, ledger: image_sgd(
        data, size=40, sigma=2.0, rate=0.05, loss=branching, clip=1.0, ledger=ledger, **SET
    ),
    "train_private": lambda data, ledger: train_private(Tiny(), data, size=40, sigma=2.0, steps=2, ledger=ledger),
    "train_private weights": lambda data, ledger: train_private(
        Tiny(), *data, size=40, sigma=2.0, steps=2, loss=weighted, ledger=ledger
    ),
    "train_private pixels": lambda data, ledger: train_private(
        Tiny(), 3 * data.images, data.labels, size=40, sigma=2.0, steps=2, ledger=ledger
    ),
    "condense_private pixels": lambda data, ledger: condense_private(
        3 * data.images, data.labels, num_classes=3, epsilon=2.0, ledger=ledger, **PASSES, **SET
    ),
    "DPSGD": lambda data, ledger: run(
        FedAvg(DPSGD(sigma=1.0, rate=0.1, size=40), factory=Tiny, weights="uniform", steps=1), data, ledger
    ),
    "PrivateFedDM": lambda data, ledger: run(PrivateFedDM(server_epochs=1, **FEDDM), data, ledger),
    "image_sgd FedDM": lambda data, ledger: run(
        PrivateFedDM(server_epochs=1, mechanism="image_sgd", **FEDDM), data, ledger
    ),
    "SummedFedDM": lambda data, ledger: run(SummedFedDM(server_epochs=1, **FEDDM), data, ledger),
}  # fmt: skip


def outcome(program: Callable[[LabeledImages, Ledger], Any], data: LabeledImages) -> Any:
    """Return everything public of a call except for noised values: failure, warnings, charges, shapes, info."""
    ledger, result = Ledger(), None
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        try:
            result = program(data, ledger)
        except Exception as error:
            result = (type(error), str(error))
    if isinstance(result, LabeledImages):
        info = {k: v for k, v in result.info.items() if k != "created"}
        result = (result.images.shape, result.labels.tolist(), result.class_names, info)
    if isinstance(result, Tensor | Ledger):
        result = type(result)
    return result, ledger.events, [str(w.message) for w in heard]


@pytest.mark.filterwarnings("ignore:delta=")
@pytest.mark.parametrize("name", sorted(PROGRAMS))
def test_no_failure_warning_or_charge_depends_on_a_record(name: str) -> None:
    data = records(8)
    if "pixels" in name:
        data.images[-1] *= 30  # one record looks as if it was not normalized
    wanted = outcome(PROGRAMS[name], data)
    if "Later" in name or "loss" in name:
        assert "NotCapturable" in str(wanted)
    for some in (without(data, len(data) - 1), data[:0]):
        assert outcome(PROGRAMS[name], some) == wanted


CALLS: dict[str, Callable[[LabeledImages], Any]] = {
    "condense_private": lambda data: condense_private(data, epsilon=2.0, num_classes=3, num_networks=1, **SET),
    "image_sgd": lambda data: image_sgd(data, size=40, sigma=2.0, num_classes=3, **SET),
    "train_private": lambda data: train_private(Tiny(), data, size=40, sigma=2.0, steps=1),
    **{
        name: partial(lambda method, data: simulate(method, [data, data], rounds=1, progress=False), method)
        for name, method in {
            "DPSGD": FedAvg(DPSGD(sigma=1.0, rate=0.1, size=40), factory=Tiny, weights="uniform", steps=1),
            "PrivateFedDM": PrivateFedDM(**FEDDM),
            "SummedFedDM": SummedFedDM(**FEDDM),
            "ClientDP": Filtered(FedAvg(factory=Tiny, weights="uniform"), ClientDP(1.0, 0.5, clip=0.1)),
        }.items()
    },
}


def held_out_by_position(tmp_path: Path) -> dict[str, LabeledImages]:
    data = records()
    path = as_folder(data, tmp_path / "f")
    loaded = load_folder(path, classes=CLASSES, normalization=HALF).train
    tuned = Task("t", Split(data, data[:3], CLASSES), _everything)
    domains = load_domains({"f": path}, classes=CLASSES, normalization=HALF).train
    return {
        "loaded": loaded,
        "subset": loaded[:9],
        "client": clients(loaded, partition.iid(loaded.labels, 2))[1],
        "renormalized": loaded.renormalize(IDENTITY),
        "saved": LabeledImages.load(loaded.save(tmp_path / "s.safetensors")),
        "domains": domains,
        "split": split_by(data, "patient", 0.3).train,
        "split again": split_by(split_by(data, "patient", 0.3).train, "patient", 0.3, hold_out="content").train,
        "tuning": tuned.pooled(tuned.load(), validation=True)[0],
        "tuning client": tuned.assign(tuned.load(), 0, validation=True).clients[0],
    }


def test_private_calls_refuse_records_held_out_by_position(tmp_path: Path) -> None:
    made = held_out_by_position(tmp_path)
    for data in made.values():
        refused(partial(condense_private, data, epsilon=2.0, num_classes=3), PrivacyError, r"hold_out='content'")
    for call in CALLS.values():
        with pytest.raises(PrivacyError, match=r"hold-out by position.*load_folder\(.*Task\(..., hold_out='content'\)"):
            call(made["subset"])
    tuned = Task("t", Split(records(), records()[:3], CLASSES), _everything)
    assert "hold_out" not in tuned.pooled(tuned.load())[0].info  # nothing is held out for the final run


def test_classes_that_were_found_in_the_data_are_not_given(tmp_path: Path) -> None:
    path = as_folder(records(), tmp_path / "f")
    found = load_folder(path, normalization=HALF, test_fraction=0).train
    assert (found.classes_given, found.class_names) == (False, CLASSES)
    assert not open_folder(path, cache=tmp_path / "c").train.classes_given
    for data in (found, found.replace(num_classes=3), found[:5]):
        for call in CALLS.values():
            refused(partial(call, data), PrivacyError, r"load_folder\(path, classes=")
    refused(lambda: load_folder(path, classes=CLASSES[:2]), ValueError, "not in classes; add or move them: f/c")
    more = load_folder(path, classes=("c", "none", "b", "a"), test_fraction=0)
    assert (more.train.classes_given, more.classes) == (True, ("c", "none", "b", "a"))
    assert more.train.counts().tolist() == [1, 0, 19, 20]

    class Pairs(Dataset[Any]):
        classes = CLASSES

        def __len__(self) -> int:
            return 6

        def __getitem__(self, index: int) -> tuple[Tensor, int]:
            return records().images[index] * 0.5 + 0.5, index % 3

    data = as_set(Pairs(), progress=False)
    assert (data.classes_given, data.class_names) == (False, CLASSES)
    declared = LabeledImages.from_dataset(Pairs(), num_classes=3, progress=False)
    assert declared.classes_given
    small = condense_private(declared, epsilon=2.0, num_networks=1, **SET)
    assert small.class_names == ()  # a name that was found in the data is not published
    pairs = (records().images[:6], torch.tensor([0, 1, 2, 0, 1, 2]))
    split = as_split(as_set(*pairs, normalization=HALF), as_set(*pairs, normalization=HALF))
    assert not split.train.classes_given
