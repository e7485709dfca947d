"""Conversion to sets: arrays, pairs, datasets and loaders of labelled images; lazy ones are read once."""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import (
    ConcatDataset,
    DataLoader,
    Dataset,
    IterableDataset,
    Subset,
    TensorDataset,
    WeightedRandomSampler,
)

from distillkit import LabeledImages, Normalization
from distillkit._utils.conversion import as_tensor
from distillkit.condense import herding, random_subset
from distillkit.data import Split
from distillkit.evaluate import evaluate
from distillkit.networks import ConvNet
from distillkit.sets import as_set
from distillkit.training import Protocol
from tests.refused import refused

HALF = Normalization([0.5], [0.25])
PIXELS = torch.arange(6 * 2 * 4 * 4).view(6, 2, 4, 4).float() / 200
LABELS = torch.tensor([0, 1, 2, 0, 1, 2])


class Lazy(Dataset[tuple[Any, Any]]):
    """Dataset that counts reads of each item."""

    def __init__(self, images: Any = PIXELS, labels: Any = LABELS) -> None:
        self.images, self.labels, self.reads = images, labels, [0] * len(images)

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        self.reads[index] += 1
        return self.images[index], self.labels[index]


class Stream(IterableDataset[tuple[Tensor, int]]):
    def __iter__(self) -> Iterator[tuple[Tensor, int]]:
        return iter(zip(PIXELS, LABELS.tolist()))


SOURCES: dict[str, Any] = {
    "a pair": (PIXELS, LABELS),
    "a list": [PIXELS, LABELS],
    "a pair of arrays": (PIXELS.numpy(), LABELS.numpy()),
    "a float64 array and a list": (PIXELS.double().numpy(), LABELS.tolist()),
    "TensorDataset": TensorDataset(PIXELS, LABELS),
    "Dataset of tensors": Lazy(),
    "Dataset of arrays and numbers": Lazy(PIXELS.numpy(), LABELS.numpy()),
    "IterableDataset": Stream(),
    "ConcatDataset": ConcatDataset([Lazy(PIXELS[:2], LABELS[:2]), Lazy(PIXELS[2:], LABELS[2:])]),
    "Subset": Subset(Lazy(PIXELS.repeat(2, 1, 1, 1), LABELS.repeat(2)), range(6)),
    "DataLoader": DataLoader(Lazy(), batch_size=4),
    "shuffled DataLoader": DataLoader(Lazy(), batch_size=4, shuffle=True),
    "DataLoader of a stream": DataLoader(Stream(), batch_size=4),
}


@pytest.mark.parametrize("source", SOURCES.values(), ids=SOURCES)
def test_all_sources_of_equal_images_give_equal_sets(source: Any, global_rng_untouched: None) -> None:
    made = as_set(source, progress=False)
    assert made.images.dtype == torch.float32
    assert torch.equal(made.images, PIXELS)
    assert torch.equal(made.labels, LABELS)
    assert (made.num_classes, str(made.normalization)) == (3, "pixels in [0, 1]")


def test_lazy_dataset_is_read_once() -> None:
    lazy = Lazy()
    as_set(DataLoader(lazy, batch_size=2, shuffle=True))
    assert lazy.reads == [1] * 6


def test_components_accept_all_sources() -> None:
    want = random_subset(PIXELS, LABELS, ipc=1)
    for source in SOURCES.values():
        assert torch.equal(random_subset(source, ipc=np.int64(1)).images, want.images)
    assert torch.equal(herding(PIXELS.numpy(), LABELS.tolist(), ipc=1).images, herding(Lazy(), ipc=1).images)
    ways = [
        evaluate(
            data, test, lambda: ConvNet((2, 4, 4), 3, width=4, depth=1), num_networks=1, protocol=Protocol(epochs=1)
        )
        for data, test in (((PIXELS, LABELS), Lazy()), (Lazy(), TensorDataset(PIXELS, LABELS)))
    ]
    assert ways[0].rows[0].accuracies == ways[1].rows[0].accuracies


def test_uint8_and_pil_images_are_normalized_and_floats_kept() -> None:
    from PIL import Image

    raw = torch.randint(0, 256, (4, 3, 5, 6), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    pictures = [Image.fromarray(one.permute(1, 2, 0).numpy()) for one in raw]
    grey = [Image.fromarray(one[0].numpy()) for one in raw]
    want = LabeledImages.from_pixels(raw, [0, 1, 0, 1], normalization=HALF)
    for source in (raw, raw.numpy(), None):
        given = {} if source is None else {"labels": [0, 1, 0, 1]}
        made = as_set(Lazy(pictures, [0, 1, 0, 1]) if source is None else source, normalization=HALF, **given)
        assert torch.equal(made.images, want.images)
        assert made.normalization == HALF
    assert torch.equal(as_set(Lazy(grey, [0, 1, 0, 1])).images, raw[:, :1].float() / 255)
    already = as_set(Lazy(list(want.images), [0, 1, 0, 1]), normalization=HALF)
    assert torch.equal(already.images, want.images)


def test_label_rows_are_kept() -> None:
    rows = torch.rand(6, 5)
    assert torch.equal(as_set(Lazy(PIXELS, rows)).labels, rows)
    assert torch.equal(LabeledImages(PIXELS, rows.double().numpy()).labels, rows)


def test_class_names_of_a_dataset_determine_num_classes() -> None:
    named = Lazy()
    named.classes = ["a", "b", "c", "never seen"]  # type: ignore[attr-defined]
    for source in (named, Subset(named, [0, 1]), DataLoader(named)):
        assert as_set(source).num_classes == 4
    assert as_set(named, num_classes=7).num_classes == 7


def test_subset_of_a_set_keeps_its_space() -> None:
    whole = LabeledImages.from_pixels(PIXELS, LABELS, normalization=HALF, columns={"n": torch.arange(6)})
    first, second = torch.utils.data.random_split(
        whole,  # type: ignore[arg-type]
        [4, 2],
        generator=torch.Generator().manual_seed(0),
    )
    made = as_set(Subset(first, [3, 1]))
    assert made.normalization == HALF
    assert made.num_classes == 3
    assert sorted([*as_set(first).columns["n"].tolist(), *as_set(second).columns["n"].tolist()]) == list(range(6))
    assert made.columns["n"].tolist() == [first.indices[3], first.indices[1]]


def test_from_dataset() -> None:
    made = LabeledImages.from_dataset(Lazy(), normalization=HALF, num_classes=5)
    assert (made.normalization, made.num_classes) == (HALF, 5)
    refused(lambda: LabeledImages.from_dataset(PIXELS), TypeError, "dataset must be a torch")


class Rows:
    """Dataset of Hugging Face: rows are dicts, and the class is no PyTorch dataset."""

    column_names: ClassVar = ["id", "img", "label"]

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> dict[str, Any]:
        if index >= 6:
            raise IndexError
        return {"id": index, "img": PICTURES[index], "label": int(LABELS[index])}


PICTURES = [Image.fromarray((one * 255).round().byte().permute(1, 2, 0).numpy()) for one in PIXELS[:, [0, 1, 0]]]
ROWS = r"LabeledImages\.from_dataset\(\[\(row\['img'\], row\['label'\]\) for row in {}\]\)"


def test_the_advice_for_rows_and_pictures_works() -> None:
    wanted = torch.stack([torch.from_numpy(np.array(one)) for one in PICTURES]).permute(0, 3, 1, 2) / 255
    rows = Rows()
    for pairs in ([(row["img"], row["label"]) for row in rows], list(zip(PICTURES, LABELS))):  # type: ignore[attr-defined]
        data = LabeledImages.from_dataset(pairs)
        assert torch.equal(data.images, wanted)
        assert torch.equal(data.labels, LABELS)
    assert len(LabeledImages.from_dataset([(PICTURES[0], 0), (PICTURES[1], 0)])) == 2
    with pytest.raises(TypeError, match=rf"a list of pairs or a DataLoader, got .*Rows; .*{ROWS.format('dataset')}"):
        LabeledImages.from_dataset(rows)  # type: ignore[arg-type]
    refused(lambda: LabeledImages.from_dataset([]), ValueError, "dataset must hold at least one item")


SPLIT = Split(LabeledImages(PIXELS, LABELS), LabeledImages(PIXELS, LABELS), ("a", "b", "c"))

REFUSED: dict[str, tuple[Any, dict[str, Any], type[Exception], str]] = {
    "a path": ("pets", {}, TypeError, r"read a folder of pictures first: load_folder\('pets'\)\.train"),
    "a split": (SPLIT, {}, TypeError, r"data must be one part of the Split; pass data\.train"),
    "no labels": (PIXELS, {}, TypeError, "labels must be given, because data is a Tensor, which has none"),
    "labels twice": ((PIXELS, LABELS), {"labels": LABELS}, TypeError, "labels must be left out"),
    "labels beside a dataset": (Lazy(), {"labels": LABELS}, TypeError, "labels must be left out when data is a Lazy"),
    "a triple": ((PIXELS, LABELS, LABELS), {}, TypeError, r"a pair of such images.*got a tuple of 3 Tensor items"),
    "none": (None, {}, TypeError, "data must be a LabeledImages, .* or a DataLoader, got NoneType$"),
    "rows": (Rows(), {}, TypeError, rf"got .*Rows; read its rows: {ROWS.format('data')}"),
    "rows and labels": (Rows(), {"labels": LABELS}, TypeError, rf"read its rows: {ROWS.format('data')}"),
    "a dict of parts": ({"train": Rows()}, {}, TypeError, r"got dict; pass one of its values \(train\)"),
    "a list of rows": (list(Rows()), {}, TypeError, rf"list of 6 dict items; read its rows: {ROWS.format('data')}"),
    "a loader of rows": (DataLoader(Rows()), {}, TypeError, rf"item 0 is a dict of id, .*: {ROWS.format('data')}"),
    "pictures": (
        PICTURES,
        {},
        TypeError,
        r"list of 6 Image items; join it .*from_dataset\(list\(zip\(data, labels\)\)\)",
    ),
    "pictures and labels": (PICTURES, {"labels": LABELS}, TypeError, r"list of 6 Image items; join it with its labels"),
    "two pictures": (PICTURES[:2], {}, TypeError, "got one PIL picture; join pictures with their labels"),
    "pairs": (
        list(zip(PICTURES, LABELS)),
        {},
        TypeError,
        r"read its pairs: LabeledImages\.from_dataset\(list\(data\)\)",
    ),
    "two pairs": ([(PICTURES[0], 0), (PICTURES[1], 1)], {}, TypeError, r"LabeledImages\.from_dataset\(data\)"),
    "empty": (Lazy(PIXELS[:0], LABELS[:0]), {}, ValueError, "data must hold at least one item"),
    "items without label": (TensorDataset(PIXELS), {}, TypeError, "data must give pairs.*item 0 is a tuple of 1"),
    "flat images": (Lazy(PIXELS.flatten(1)), {}, TypeError, r"data\[0\] must be an image.*Tensor \[32\]"),
    "grey arrays": (Lazy(PIXELS[:, 0].numpy()), {}, TypeError, r"data\[0\] must be an image.*ndarray \[4, 4\]"),
    "other sizes": (
        Lazy([PIXELS[0], PIXELS[1, :, :3]], [0, 1]),
        {},
        ValueError,
        r"image of item 1 is torch.float32 \[2, 3, 4\].*item 0 torch.float32 \[2, 4, 4\]; convert them",
    ),
    "words as labels": (Lazy(PIXELS, list("abcdef")), {}, TypeError, r"label of data\[0\] must be a class index"),
    "float labels": (Lazy(PIXELS, LABELS.float()), {}, TypeError, "integer dtype"),
    "words in an array": (np.array([["a"]]), {"labels": [0]}, TypeError, "data must hold numbers"),
    "ragged labels": (PIXELS, {"labels": [[0], [1, 2]]}, TypeError, "labels must be a tensor or a regular list"),
    "a sampler": (
        DataLoader(Lazy(), sampler=WeightedRandomSampler([1.0] * 6, 6)),
        {},
        TypeError,
        "WeightedRandomSampler.*Subset",
    ),
    "half a loader": (DataLoader(Lazy(), batch_sampler=[[0, 1], [2]]), {}, TypeError, "DataLoader with a list"),
    "a collate_fn": (DataLoader(Lazy(), collate_fn=lambda items: items), {}, TypeError, "its own collate_fn"),
}


@pytest.mark.parametrize(("source", "options", "error", "words"), REFUSED.values(), ids=REFUSED)
def test_other_objects_are_refused(source: Any, options: dict[str, Any], error: type[Exception], words: str) -> None:
    refused(lambda: as_set(source, name="data", **options), error, words)


def test_quick_call_shows_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = io.StringIO()
    screen.isatty = lambda: True  # type: ignore[method-assign]
    monkeypatch.setattr("sys.stderr", screen)
    as_set(Lazy())
    assert screen.getvalue() == ""


@pytest.mark.parametrize("dtype", ["uint16", "uint32", ">u2"])
def test_wide_unsigned_labels_keep_their_values(dtype: str) -> None:
    """PyTorch computes with none of these types; values too large for another type would wrap."""
    labels = np.array([0, 3, 60000], dtype=dtype)
    found = as_tensor(labels, "labels")
    assert found.dtype == torch.int64
    assert found.tolist() == [0, 3, 60000]
