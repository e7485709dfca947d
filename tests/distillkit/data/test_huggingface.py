"""Datasets of Hugging Face: rows become sets, whatever their format, and sets become rows."""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from torch.utils.data import DataLoader, Subset

from distillkit import LabeledImages, Normalization
from distillkit.data import store_dataset
from distillkit.normalization import IDENTITY, ZCA
from distillkit.rng import derive
from distillkit.sets import Tiles, as_set
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
    "a loader": lambda own: DataLoader(own.with_format("torch"), batch_size=2),  # whose batches are stored
    "a subset": lambda own: Subset(own, range(6)),
    "encoded": lambda own: own.cast_column("image", datasets.Image(decode=False)),
}


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("form", FORMS)
def test_rows_in_all_formats_give_equal_sets(
    form: str, channels: int, tmp_path: Path, global_rng_untouched: None
) -> None:
    source = FORMS[form](rows(channels))
    for made in (as_set(source, progress=False), store_dataset(source, tmp_path / "a.npy", progress=False).read()):
        assert torch.equal(made.images, torch.from_numpy(ARRAYS[..., :channels]).permute(0, 3, 1, 2) / 255)
        assert (made.labels.tolist(), made.class_names, made.classes_given) == (LABELS, NAMES, False)
        assert made.info == {"classes": "dataset"}


def test_a_transform_may_give_other_columns_than_those_declared() -> None:
    def transform(batch: dict[str, Any]) -> dict[str, Any]:
        return {"pixel_values": [torch.from_numpy(np.array(one)) for one in batch["image"]], "kind": batch["kind"]}

    made = as_set(rows().with_transform(transform))
    assert torch.equal(made.images, as_set(rows()).images)
    assert (made.labels.tolist(), made.class_names) == (LABELS, NAMES)


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
    paths = found.cast_column("image", datasets.Image(decode=False))
    assert torch.equal(as_set([{**row, "image": {**row["image"], "bytes": None}} for row in paths]).images, made.images)
    order = [int(one.mul(255).round().byte()[0, 0, 0]) for one in made.images]
    assert sorted(zip(order, made.labels.tolist())) == sorted(zip(ARRAYS[:, 0, 0, 0].tolist(), LABELS))


@settings(max_examples=12, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    channels=st.sampled_from([1, 3]),
    sides=st.tuples(st.integers(1, 9), st.integers(1, 9)),
    names=st.sampled_from([(), ("eel", "ape", "cat")]),
    soft=st.booleans(),
    normalization=st.sampled_from([IDENTITY, Normalization([0.4], [0.3])]),
)
def test_a_set_comes_back_from_rows(
    seed: int, channels: int, sides: tuple[int, int], names: tuple[str, ...], soft: bool, normalization: Normalization
) -> None:
    rng = derive(seed)
    pixels = torch.rand(5, channels, *sides, generator=rng)
    labels = torch.rand(5, 3, generator=rng).softmax(1) if soft else torch.randint(2, (5,), generator=rng)
    columns = {"class": torch.arange(5) % 2, "logits": torch.rand(5, 2, 3, generator=rng, dtype=torch.float64)}
    data = LabeledImages.from_pixels(
        pixels, labels, num_classes=3, class_names=names, normalization=normalization, columns=columns, info={"a": 1}
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rows = data.to_huggingface()
    again = as_set(rows, normalization=normalization, progress=False)
    assert torch.allclose(again.pixels(), pixels, atol=1 / 510 + 1e-6)
    assert torch.equal(again.labels, labels)
    assert again.num_classes == 3
    assert again.class_names == (() if soft else names or ("0", "1", "2"))
    assert rows.column_names == ["image", "label", "class", "logits"]
    assert rows["class"][:] == columns["class"].tolist()
    assert torch.equal(torch.tensor(rows["logits"][:], dtype=torch.float64), columns["logits"])
    facts = {"format": "distillkit.LabeledImages.export/2", **data.parts()[1]}
    assert json.loads(rows.info.description) == json.loads(json.dumps(facts))
    assert torch.equal(as_set(again.to_huggingface(), normalization=normalization).images, again.images)


def test_what_rows_cannot_hold_is_said() -> None:
    pixels, labels = torch.rand(4, 3, 8, 8, generator=derive(0)), torch.arange(4) % 2
    data = LabeledImages(pixels, labels)
    with pytest.warns(UserWarning, match="the stored form of 4 tiled images, which are decoded"):
        rows = Tiles(2).pack(data.renormalize(Normalization([0.4], [0.3]))).to_huggingface()
    facts = json.loads(rows.info.description)
    assert (len(rows), facts["mean"], facts["std"]) == (4, [0.4], [0.3])
    with pytest.warns(UserWarning, match="of the pixels, which lie outside"):
        LabeledImages(pixels * 2 - 0.5, labels).to_huggingface()
    whitened = Normalization([0.0], [1.0], ZCA.fit(torch.rand(400, 3, 2, 2, generator=derive(1))))
    small = LabeledImages.from_pixels(pixels[..., :2, :2], labels, normalization=whitened)
    with pytest.warns(UserWarning, match="leave out the whitening"):
        back = as_set(small.to_huggingface())
    assert torch.allclose(back.pixels(), pixels[..., :2, :2], atol=0.003)
    refused(lambda: LabeledImages(pixels[:, :2], labels).to_huggingface(), ValueError, "1 or 3 channels, got 2; export")
    taken = data.replace(columns={"label": labels})
    refused(taken.to_huggingface, ValueError, r"rename 'label' by data\.replace\(columns=")
    half = data.to(dtype=torch.bfloat16).replace(labels=torch.eye(2, dtype=torch.bfloat16)[labels])
    rows = half.replace(columns={"weight": torch.ones(4).double()}).to_huggingface()
    kinds = [rows.features[name] for name in ("label", "weight")]
    assert kinds == [datasets.List(datasets.Value("float32"), 2), datasets.Value("float64")]
    assert as_set(rows).labels.tolist() == torch.eye(2)[labels].tolist()


def test_missing_datasets_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    data = LabeledImages(torch.rand(1, 1, 2, 2), [0])
    refused(data.to_huggingface, ImportError, r"to_huggingface needs datasets: pip install 'distillkit\[data\]'")
