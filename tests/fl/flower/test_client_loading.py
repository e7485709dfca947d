"""Forms that `load_client` may return: each gives the same client data."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image as Pictures

from distillkit import LabeledImages
from distillkit.data import Split, load_folder, open_folder
from distillkit.data.partition import iid
from distillkit.normalization import IDENTITY
from distillkit.sets import StoredImages
from distillkit.study import Task
from fl import ClientData, FedAvg
from fl.deploy.flower import IncompatibleNode, client_app
from fl.deploy.flower._client_loading import to_client_data
from fl.engine._clients import ClientRegistry
from tests.fl.federations import images
from tests.fl.flower import fake_flower
from tests.fl.flower.test_runs import FAST, OPTIONS, run_on_grid
from tests.refused import refused


class Image:
    """Fake of the image feature of `datasets`."""


class ClassLabel:
    """Fake of the label feature of `datasets`."""

    def __init__(self, names: list[str]) -> None:
        self.names = names


class Table:
    """Fake of `datasets.Dataset`: named columns with features, rows as mappings, formats as views."""

    def __init__(self, rows: list[dict[str, Any]], features: dict[str, Any], kind: str | None = None) -> None:
        self._rows, self.features, self.format = rows, features, {"type": kind}
        self.column_names = list(features)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        if self.format["type"] == "torch":
            row = self._rows[index]
            return {k: v if isinstance(v, str) else torch.as_tensor(np.asarray(v)) for k, v in row.items()}
        return self._rows[index]

    def with_format(self, kind: str | None) -> Table:
        return Table(self._rows, self.features, kind)


PIXELS = torch.randint(256, (6, 1, 4, 4), generator=torch.Generator().manual_seed(3), dtype=torch.uint8)
LABELS = [0, 1, 2, 0, 1, 1]
NAMES = ["ape", "bat", "cat"]


def table(kind: str | None = None, names: list[str] = NAMES, **more: list[int]) -> Any:
    """Return rows of Hugging Face with the images, these class names, and further columns of classes."""
    datasets = pytest.importorskip("datasets")
    pictures = [Pictures.fromarray(x[0].numpy()) for x in PIXELS]
    content = {"id": [str(i) for i in range(6)], "img": pictures, "animal": LABELS, **more}
    types = {"id": datasets.Value("string"), "img": datasets.Image(), "animal": datasets.ClassLabel(names=names)}
    types |= {name: datasets.ClassLabel(num_classes=3) for name in more}
    return datasets.Dataset.from_dict(content, features=datasets.Features(types)).with_format(kind)


def faked(kind: str | None = None, **more: Any) -> Table:
    """Return the rows of `table`, which needs `datasets`, as a fake."""
    rows = [
        {"id": f"{i}", "img": Pictures.fromarray(x[0].numpy()), "animal": y, **dict.fromkeys(more, y)}
        for i, (x, y) in enumerate(zip(PIXELS, LABELS))
    ]
    return Table(rows, {"id": None, "img": Image(), "animal": ClassLabel(NAMES), **more}, kind)


def held(given: Any, partition: int = 0) -> tuple[ClientData, tuple[str, ...]]:
    found, names = to_client_data(given, partition)
    return ClientRegistry([found], None, False)[0], names


def assert_pixels(data: Any, which: list[int] | None = None) -> None:
    assert isinstance(data, LabeledImages)
    which = list(range(6)) if which is None else which
    assert torch.equal(data.images, PIXELS[which].float() / 255)
    assert data.labels.tolist() == [LABELS[i] for i in which]
    assert (data.num_classes, data.classes_given, data.normalization) == (3, False, IDENTITY)


@pytest.mark.parametrize("make", [table, faked])
@pytest.mark.parametrize("kind", [None, "torch"])
def test_flwr_datasets_table_loads(kind: str | None, make: Any) -> None:
    found, names = held(make(kind))
    assert_pixels(found.train)
    assert names == tuple(NAMES)


@pytest.mark.parametrize("make", [table, faked])
def test_train_and_test_tables_load(make: Any) -> None:
    whole = make()
    test = Table(whole._rows[:4], whole.features) if make is faked else whole.select(range(4))
    found, names = held({"test": test.with_format("torch"), "train": whole})
    assert_pixels(found.train)
    assert_pixels(found.test, [0, 1, 2, 3])
    assert names == tuple(NAMES)


@pytest.mark.parametrize("fake", [False, True])
def test_custom_table_transform_is_applied(fake: bool) -> None:
    if fake:
        rows = [{"image": x.float() / 255 - 1, "label": y} for x, y in zip(PIXELS, LABELS)]
        whole: Any = Table(rows, {"image": None, "label": None}, "custom")
    else:
        datasets = pytest.importorskip("datasets")
        changed = lambda row: {**row, "image": [PIXELS[i].float() / 255 - 1 for i in row["image"]]}  # noqa: E731
        whole = datasets.Dataset.from_dict({"image": list(range(6)), "label": LABELS}).with_transform(changed)
    found, names = held(whole)
    assert torch.equal(found.read()[0].images, PIXELS.float() / 255 - 1)
    assert names == ()


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (lambda: table(coarse=LABELS), r"may be the label \(animal, coarse\) among id, img"),
        (lambda: table().select([]), "the table must hold at least one item"),
        (lambda: {"validation": table()}, "must have the key train"),
        (lambda: faked(coarse=ClassLabel(["a", "b"])), r"may be the label \(animal, coarse\) among id, img"),
        (lambda: Table([], {"pixels": None, "label": None}), "the table must hold at least one item"),
        (lambda: {"validation": faked()}, "must have the key train"),
        (lambda: {"train": faked(), "test": faked(animal=ClassLabel(["bat", "ape", "cat"]))}, "same classes"),
        (lambda: {"train": table(), "test": table(names=["bat", "ape", "cat"])}, "same classes"),
    ],
    ids=[
        "two of a kind",
        "no pictures",
        "no train",
        "two of a kind, fake",
        "no pictures, fake",
        "no train, fake",
        "other order, fake",
        "other order",
    ],
)
def test_ambiguous_tables_are_refused(given: Any, said: str) -> None:
    refused(lambda: held(given()), (TypeError, ValueError), said)


def pictures(folder: Path, names: list[str] = NAMES) -> Path:
    """Write a folder of images with these class names."""
    for i, (x, y) in enumerate(zip(PIXELS, LABELS)):
        for part in ("train", "test"):
            path = folder / part / names[y] / f"{i}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Pictures.fromarray(x[0].numpy()).save(path)
    return folder


@pytest.mark.parametrize("form", [str, Path])
def test_image_folder_loads(form: Any, tmp_path: Path) -> None:
    found, names = held(form(pictures(tmp_path / "animals")))
    assert_pixels(found.train, [0, 3, 1, 4, 5, 2])
    assert_pixels(found.test, [0, 3, 1, 4, 5, 2])
    assert names == tuple(NAMES)


def test_splits_from_folder_loaders_load(tmp_path: Path) -> None:
    folder = pictures(tmp_path / "animals")
    read, names = held(load_folder(folder, normalization=IDENTITY, progress=False))
    stored, _ = held(open_folder(folder, normalization=IDENTITY, cache=tmp_path / "cache", progress=False))
    assert_pixels(read.train, [0, 3, 1, 4, 5, 2])
    assert isinstance(stored.train, StoredImages)
    assert_pixels(stored.read()[0], [0, 3, 1, 4, 5, 2])
    assert names == tuple(NAMES)
    whole = images(6, seed=1)
    assert held(Split(whole, whole[:0], ("a", "b", "c")))[0].test is None


def test_task_allocation_gives_the_partitions_part() -> None:
    whole = Split(images(12, seed=1), images(4, seed=2), ("a", "b", "c"))
    task = Task("t", data=whole, partition=iid_of_three, factory=FAST["factory"], own_tests=0.25)
    dealt = task.assign(task.load(), 5)
    for k in range(3):
        found, _ = held(task.assign(task.load(), 5), k)
        assert isinstance(found.train, LabeledImages)
        assert torch.equal(found.train.images, dealt.clients[k].images)
        assert found.test is not None
    refused(lambda: held(dealt, 3), ValueError, "the task has 3 clients, and this node is partition 3")


def iid_of_three(labels: torch.Tensor, generator: torch.Generator) -> Any:
    return iid(labels, 3, generator=generator)


def test_nodes_with_other_class_names_are_refused(tmp_path: Path) -> None:
    for k, names in enumerate((NAMES, ["ape", "bat", "dog"])):
        pictures(tmp_path / str(k), names)
    method = FedAvg(**FAST)
    app = client_app(method, lambda k: tmp_path / str(k), folder=tmp_path / "nodes")
    there = fake_flower.Grid(app, {100 + k: fake_flower.context(100 + k, k, 2) for k in range(2)})
    said = r'partition 1\) has the classes \["ape", "bat", "dog"\], partition 0 .*"cat"'
    refused(lambda: run_on_grid(there, method, **{**OPTIONS, "participation": 1.0}), IncompatibleNode, said)
