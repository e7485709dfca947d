"""Datasets of Hugging Face: rows become sets, whatever their format, and sets become rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader, Subset

from distillkit import LabeledImages
from distillkit.sets import as_set
from distillkit.study import as_split
from tests.refused import refused

datasets = pytest.importorskip("datasets")

NAMES = ("cat", "dog", "eel", "fox")  # there is no fox
ARRAYS = np.random.default_rng(0).integers(0, 256, (6, 12, 10, 3), dtype=np.uint8)
LABELS = [0, 2, 1, 2, 1, 0]


def rows(channels: int = 3, **columns: Any) -> Any:
    pictures = [Image.fromarray(one if channels == 3 else one[..., 0]) for one in ARRAYS]
    types = {"id": datasets.Value("string"), "image": datasets.Image(), "kind": datasets.ClassLabel(names=list(NAMES))}
    types |= {name: datasets.ClassLabel(num_classes=2) for name in columns}
    content = {"id": [f"n{i}" for i in range(6)], "image": pictures, "kind": LABELS, **columns}
    return datasets.Dataset.from_dict(content, features=datasets.Features(types))


FORMS = {
    "rows": lambda own: own,
    "torch": lambda own: own.with_format("torch"),
    "numpy": lambda own: own.with_format("numpy"),
    "streamed": lambda own: own.to_iterable_dataset(),
    "streamed tensors": lambda own: own.to_iterable_dataset().with_format("torch"),
    "a loader": lambda own: DataLoader(own, batch_size=2),
    "a subset": lambda own: Subset(own, range(6)),
    "encoded": lambda own: own.cast_column("image", datasets.Image(decode=False)),
}


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("form", FORMS)
def test_rows_in_all_formats_give_equal_sets(form: str, channels: int, global_rng_untouched: None) -> None:
    made = as_set(FORMS[form](rows(channels)), progress=False)
    assert torch.equal(made.images, torch.from_numpy(ARRAYS[..., :channels]).permute(0, 3, 1, 2) / 255)
    assert (made.labels.tolist(), made.class_names, made.classes_given) == (LABELS, NAMES, False)
    assert made.info == {"classes": "dataset"}


def test_tables_of_rows_are_read() -> None:
    want = as_set(rows())
    for table in (rows().to_pandas(), rows().data.table, rows()[:]):
        made = LabeledImages.from_dataset(table, label="kind")
        assert torch.equal(made.images, want.images)
        assert made.labels.tolist() == LABELS


def test_several_labels_need_a_choice() -> None:
    both = rows(wild=[0, 1, 1, 1, 1, 0])
    refused(lambda: as_set(both), TypeError, r"may be the label \(kind, wild\) among id, image, kind, wild; name")
    wild = LabeledImages.from_dataset(both, label="wild")
    assert (wild.labels.tolist(), wild.num_classes) == ([0, 1, 1, 1, 1, 0], 2)
    assert LabeledImages.from_dataset(both, label="kind").class_names == NAMES


def test_a_dictionary_of_splits_is_refused_with_the_remedy() -> None:
    whole = datasets.DatasetDict(train=rows(), test=rows())
    refused(lambda: as_set(whole, name="data"), TypeError, r"pass one of its values: data\['train'\] \(train, test\)")
    split = as_split(whole["train"], whole["test"].select([0, 2]))
    assert (split.classes, split.test.labels.tolist()) == (NAMES, [0, 1])


def test_the_folder_layout_with_a_table_is_read(tmp_path: Path) -> None:
    for i, one in enumerate(ARRAYS):
        Image.fromarray(one).save(tmp_path / f"{i}.png")
    lines = [f"{i}.png,{NAMES[k]}" for i, k in enumerate(LABELS)]
    (tmp_path / "metadata.csv").write_text("\n".join(["file_name,breed", *lines]), encoding="utf-8")
    found = datasets.load_dataset("imagefolder", data_dir=str(tmp_path), split="train", cache_dir=str(tmp_path / "c"))
    made = as_set(found, progress=False)
    assert made.class_names == NAMES[:3]
    order = [int(one.mul(255).round().byte()[0, 0, 0]) for one in made.images]
    assert sorted(zip(order, made.labels.tolist())) == sorted(zip(ARRAYS[:, 0, 0, 0].tolist(), LABELS))
