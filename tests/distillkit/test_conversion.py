"""Conversion to sets: arrays, pairs, datasets and loaders of labelled images; lazy ones are read once."""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import Any, ClassVar

import numpy as np
import pandas as pd
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
from distillkit.study import as_split
from distillkit.training import Protocol
from fl import simulate
from fl.averaging import FedAvg
from fl.engine._clients import ClientRegistry
from tests.refused import refused
from tests.stored import require_same_set

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


def encoded(picture: Image.Image) -> dict[str, Any]:
    file = io.BytesIO()
    picture.save(file, "PNG")
    return {"bytes": file.getvalue(), "path": "name of the original.png"}


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
    "DataLoader without batches": DataLoader(Lazy(), batch_size=None),
}


@pytest.mark.parametrize("source", SOURCES.values(), ids=SOURCES)
def test_all_sources_of_equal_images_give_equal_sets(source: Any, global_rng_untouched: None) -> None:
    lazy = source.dataset if isinstance(getattr(source, "dataset", None), Lazy) else source
    if isinstance(lazy, Lazy):
        lazy.reads = [0] * len(lazy)
    require_same_set(as_set(source, progress=False), LabeledImages(PIXELS, LABELS))
    assert not isinstance(lazy, Lazy) or lazy.reads[:6] == [1] * 6


def test_components_accept_all_sources() -> None:
    want = random_subset(PIXELS, LABELS, ipc=1)
    for source in SOURCES.values():
        assert torch.equal(random_subset(source, ipc=np.int64(1)).images, want.images)
    assert torch.equal(herding(PIXELS.numpy(), LABELS.tolist(), ipc=1).images, herding(Lazy(), ipc=1).images)
    how: Any = {"factory": lambda: ConvNet((2, 4, 4), 3, width=4, depth=1), "protocol": Protocol(epochs=1)}
    pairs = ((PIXELS, LABELS), Lazy()), (Lazy(), TensorDataset(PIXELS, LABELS))
    first, second = (evaluate(data, test, num_networks=1, **how) for data, test in pairs)
    assert first.accuracy == second.accuracy
    assert first.rows[0].accuracies == second.rows[0].accuracies


def test_uint8_and_pil_images_are_normalized_and_floats_kept() -> None:
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


def test_features_of_a_dataset_may_be_no_types() -> None:
    source = Lazy()
    source.features = torch.rand(6, 2)  # type: ignore[attr-defined]
    assert torch.equal(as_set(source).images, PIXELS)


def test_subset_of_a_set_keeps_its_space() -> None:
    whole = LabeledImages.from_pixels(PIXELS, LABELS, normalization=HALF, columns={"n": torch.arange(6)})
    inner: Any = Subset(whole, [5, 0, 3, 2])  # type: ignore[arg-type]
    require_same_set(as_set(Subset(inner, [3, 1])), whole[[2, 0]])
    require_same_set(as_set(ConcatDataset([inner, Subset(whole, [1])])), whole[[5, 0, 3, 2, 1]])  # type: ignore[arg-type]


PICTURES = [Image.fromarray((one * 255).round().byte().permute(1, 2, 0).numpy()) for one in PIXELS[:, [0, 1, 0]]]
STACKED = torch.stack([torch.from_numpy(np.array(one)) for one in PICTURES]).permute(0, 3, 1, 2) / 255
WORDS = [("cat", "dog", "eel")[k] for k in LABELS]


class Rows:
    """Dataset of Hugging Face without declared types: rows are dicts, and the class is no PyTorch dataset."""

    column_names: ClassVar = ["id", "img", "label"]

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> dict[str, Any]:
        if index >= 6:
            raise IndexError
        return {"id": index, "img": PICTURES[index], "label": int(LABELS[index])}


ROWS = list(Rows())  # type: ignore[call-overload]
TABLE = {"image": PICTURES, "label": LABELS.tolist()}
OF_PICTURES: dict[str, tuple[Any, dict[str, Any]]] = {
    "pictures and labels": (PICTURES, {"labels": LABELS}),
    "pictures and words": (PICTURES, {"labels": WORDS}),
    "a tensor and a series of words": (STACKED, {"labels": pd.Series(WORDS, index=[*"fedcba"])}),
    "pictures and a series of words": (PICTURES, {"labels": pd.Series(WORDS, index=[*"fedcba"])}),
    "a pair with a series": ((PICTURES, pd.Series(LABELS.numpy(), index=[*"fedcba"])), {}),
    "pictures and an array of words": (PICTURES, {"labels": np.array(WORDS)}),
    "a pair of lists": ((PICTURES, LABELS.tolist()), {}),
    "a pair of lists with words": ([PICTURES, WORDS], {}),
    "pairs": (list(zip(PICTURES, LABELS)), {}),
    "pairs with words": (list(zip(PICTURES, WORDS)), {}),
    "a dataset with words": (Lazy(PICTURES, WORDS), {}),
    "rows": (Rows(), {}),
    "a list of rows": (ROWS, {}),
    "a loader of rows": (DataLoader(Rows()), {}),  # type: ignore[arg-type]
    "columns": (TABLE, {}),
    "columns of words": ({"picture": PICTURES, "animal": WORDS}, {}),
    "encoded pictures": ([{"image": one, "label": k} for one, k in zip(map(encoded, PICTURES), WORDS)], {}),
    "a tuple of pictures": (tuple(PICTURES), {"labels": tuple(WORDS)}),
}


@pytest.mark.parametrize(("source", "options"), OF_PICTURES.values(), ids=OF_PICTURES)
def test_pictures_in_all_forms_give_equal_sets(
    source: Any, options: dict[str, Any], global_rng_untouched: None
) -> None:
    made = as_set(source, progress=False, **options)
    words = made.class_names == ("cat", "dog", "eel")
    facts: Any = {"class_names": ("cat", "dog", "eel"), "classes_given": False, "info": {"classes": "labels"}}
    require_same_set(made, LabeledImages(STACKED, LABELS, **(facts if words else {})))


SPLIT = Split(LabeledImages(PIXELS, LABELS), LabeledImages(PIXELS, LABELS), ("a", "b", "c"))

REFUSED: dict[str, tuple[Any, dict[str, Any], type[Exception], str]] = {
    "a path": ("pets", {}, TypeError, r"read it first: distillkit\.data\.load_folder\('pets'\)\.train"),
    "a split": (SPLIT, {}, TypeError, r"data must be one part of the Split; pass data\.train"),
    "no labels": (PIXELS, {}, TypeError, "labels must be given, because data is a Tensor, which has none"),
    "labels twice": ((PIXELS, LABELS), {"labels": LABELS}, TypeError, "labels must be left out"),
    "a triple": ((PIXELS, LABELS, LABELS), {}, TypeError, "a pair of both.*got a tuple of 3 Tensor items"),
    "none": (None, {}, TypeError, "data must be a LabeledImages, .* or a DataLoader, got NoneType$"),
    "no images": ((None, [0, 1]), {}, TypeError, "data must be a LabeledImages, .* or a DataLoader, got NoneType$"),
    "a dict of a pair": ({"train": (PIXELS, LABELS)}, {}, TypeError, "got dict"),
    "a dict of parts": ({"train": Rows()}, {}, TypeError, r"got dict; pass one of its values: data\['train'\]"),
    "pictures": (PICTURES, {}, TypeError, "labels must be given, because data is a list"),
    "one picture": (PICTURES[0], {"labels": [0]}, TypeError, "got one PIL picture; pass a list of pictures"),
    "paths": (["a.png", "b.png"], {"labels": [0, 1]}, TypeError, r"load_table\(\{'image': data, 'label': labels\}"),
    "rows of paths": ([{"image": "a.png", "label": 0}], {}, TypeError, r"got str; read files with .*load_table"),
    "a table": ("pets.csv", {}, TypeError, r"read it first: distillkit\.data\.load_table\('pets\.csv'\)\.train"),
    "too few labels": (PICTURES, {"labels": [0, 1]}, ValueError, "one entry per image: got 2 for 6"),
    "two image columns": (
        [{"image": PICTURES[0], "mask": PICTURES[1], "label": 0}], {}, TypeError,
        r"several columns may be the image \(image, mask\) among .*from_dataset\(data, image=\"...\", label",
    ),
    "no label column": (
        [{"image": PICTURES[0], "a": 1, "b": 0}], {}, TypeError, "no column is the label among image, a",
    ),
    "a missing word": (PICTURES, {"labels": [*WORDS[:5], None]}, ValueError, r"1 of 6 are not, such as .*\[5\].* None"),
    "another word": (
        PICTURES, {"labels": WORDS, "class_names": ("eel", "cat")}, ValueError, "among class_names .*got dog",
    ),
    "either axes": (
        np.zeros((2, 3, 5, 3), np.uint8), {"labels": [0, 1]}, ValueError, r"\.permute\(0, 3, 1, 2\) in the",
    ),
    "small items": (Lazy(np.zeros((6, 4, 4, 3))), {}, ValueError, r"data\[0\] of shape \[1, 4, 4, 3\] may be"),
    "transparent axes": (
        np.zeros((2, 8, 8, 4), np.uint8), {"labels": [0, 1]}, ValueError, r"looks like \[N, H, W, C\]",
    ),
    "empty": (Lazy(PIXELS[:0], LABELS[:0]), {}, ValueError, "data must hold at least one item"),
    "items without label": (TensorDataset(PIXELS), {}, TypeError, "data must give pairs.*item 0 is a tuple of 1"),
    "flat images": (Lazy(PIXELS.flatten(1)), {}, TypeError, r"data\[0\] must be an image.*Tensor \[32\]"),
    "other sizes": (
        Lazy([PIXELS[0], PIXELS[1, :, :3]], [0, 1]), {}, ValueError,
        r"image of item 1 is torch.float32 \[2, 3, 4\].*item 0 torch.float32 \[2, 4, 4\]; convert them",
    ),
    "other dtypes": (
        Lazy([PIXELS[0], PIXELS[1].double()], [0, 1]), {}, ValueError,
        r"image of item 1 is torch.float64 \[2, 4, 4\].*item 0 torch.float32 \[2, 4, 4\]",
    ),
    "an empty word": (PICTURES, {"labels": [*WORDS[:5], ""]}, ValueError, r"1 of 6 are not, such as .*\[5\]"),
    "no label": (Lazy(PIXELS, [None] * 6), {}, TypeError, r"label of data\[0\] must be a class index .*NoneType"),
    "a row as label": (Lazy(PIXELS, [{"a": 1, "b": 2}] * 6), {}, TypeError, r"got a dict of a, b$"),
    "float labels": (Lazy(PIXELS, LABELS.float()), {}, TypeError, "integer dtype"),
    "words in an array": (np.array([["a"]]), {"labels": [0]}, TypeError, "data must hold numbers"),
    "ragged labels": (PIXELS, {"labels": [[0], [1, 2]]}, TypeError, "labels must be a tensor or a regular list"),
    "a sampler": (
        DataLoader(Lazy(), sampler=WeightedRandomSampler([1.0] * 6, 6)), {}, TypeError, "WeightedRandomSampler.*Subset",
    ),
    "a collate_fn": (DataLoader(Lazy(), collate_fn=lambda items: items), {}, TypeError, "its own collate_fn"),
}  # fmt: skip


@pytest.mark.parametrize(("source", "options", "error", "words"), REFUSED.values(), ids=REFUSED)
def test_other_objects_are_refused(source: Any, options: dict[str, Any], error: type[Exception], words: str) -> None:
    refused(lambda: as_set(source, name="data", **options), error, words)


def test_arrays_are_copied_in_native_order_and_single_precision() -> None:
    array = np.arange(4)
    found = as_tensor(array, "a")
    array += 1
    assert found.tolist() == [0, 1, 2, 3]
    assert as_tensor(np.arange(4, dtype=np.float16), "a").dtype == torch.float32
    assert as_tensor(np.arange(4, dtype=">i4"), "a").tolist() == [0, 1, 2, 3]
    assert as_tensor(np.array([True, False]), "a").tolist() == [True, False]
    for dtype in ("uint16", "uint32", ">u2"):  # PyTorch computes with none of these
        found = as_tensor(np.array([0, 3, 60000], dtype=dtype), "labels")
        assert (found.dtype, found.tolist()) == (torch.int64, [0, 3, 60000])


LAST = (STACKED.repeat_interleave(2, 2).repeat_interleave(2, 3) * 255).byte()


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("kind", ["uint8", "float"])
@pytest.mark.parametrize("array", [True, False])
@pytest.mark.parametrize("items", ["a dataset", "a list", "rows", ""])
def test_channels_may_be_last_if_nothing_else_is_possible(channels: int, kind: str, array: bool, items: str) -> None:
    want = LAST[:, :channels].float() / 255
    images = LAST[:, :channels] if kind == "uint8" else want
    turned = images[:, 0] if channels == 1 and items else images.permute(0, 2, 3, 1)
    given: Any = turned.numpy() if array else turned
    rows = [{"id": 7, "image": one, "class": k} for one, k in zip(given, LABELS.tolist())]
    made = as_set({"a dataset": Lazy(given), "a list": (list(given), LABELS), "rows": rows, "": (given, LABELS)}[items])
    assert torch.equal(made.images, want)
    assert made.images.is_contiguous()
    for space in (Normalization([0.0], [1.0]), Normalization([0.0] * channels, [1.0] * channels)):
        assert torch.equal(as_set(given, LABELS, normalization=space).images, want)
    gray = as_set((given[..., 0] if channels == 3 or not items else given, LABELS))
    assert torch.equal(gray.images, want[:, :1])
    assert torch.equal(as_set(images.numpy() if array else images, LABELS[:, None]).images, want)


@pytest.mark.parametrize("side", [7, 8])
def test_a_few_rows_stay_channels(side: int) -> None:
    images = torch.zeros(2, side, 8, 1)
    assert as_set(images, [0, 1]).shape == ((1, 8, 8) if side == 8 else (7, 8, 1))
    many = as_set(images.repeat(1, 2, 1, 1), [0, 1], normalization=Normalization([0.0] * 2 * side, [1.0] * 2 * side))
    assert many.shape == (2 * side, 8, 1)


def test_a_dataset_of_rows_may_name_its_classes() -> None:
    class Named(Lazy):
        classes = ("ape", "bat", "cat", "dog")

        def __getitem__(self, index: int) -> Any:
            return {"image": self.images[index], "label": self.labels[index]}

    assert (as_set(Named()).class_names, as_set(DataLoader(Named())).num_classes) == (Named.classes, 4)


def test_columns_sizes_and_names_are_chosen() -> None:
    rows = [{"a": one, "b": other, "x": k, "y": 5} for one, other, k in zip(PICTURES, PICTURES[::-1], WORDS)]
    names = ("eel", "dog", "cat", "fox")
    made = LabeledImages.from_dataset(rows, image="b", label="x", class_names=names, normalization=HALF)
    assert torch.equal(made.images, HALF.encode(STACKED.flip(0)))
    assert made.labels.tolist() == [names.index(word) for word in WORDS]
    assert (made.class_names, made.classes_given, made.info) == (names, True, {})
    for alone in (PIXELS, [PIXELS, LABELS.tolist()]):
        refused(lambda: LabeledImages.from_dataset(alone), TypeError, "dataset must be a torch")  # noqa: B023
    refused(lambda: LabeledImages.from_dataset(rows, image="c"), ValueError, "one of the columns a, b, x, y, got 'c'")
    refused(lambda: LabeledImages.from_dataset(rows, image="a"), TypeError, "no column is the label among a, b, x, y")
    refused(lambda: as_set(made, class_names=names[:3]), ValueError, "class_names differ from those of the set")
    assert as_set(made, class_names=names) is made
    numbered = [{"class": 5, "image": one, "label": k} for k, one in enumerate(PICTURES)]
    assert as_set(numbered).labels.tolist() == [*range(6)]


def test_pictures_of_several_sizes_are_resized() -> None:
    pictures = [PICTURES[0], PICTURES[1].convert("L").resize((7, 9)), PICTURES[2].resize((3, 5))]
    pairs = list(zip(pictures, LABELS))
    refused(lambda: as_set(pairs), ValueError, r"from_dataset\(images, size=\.\.\., channels=3\)")
    made = LabeledImages.from_dataset(pairs, size=(6, 4), channels=3, normalization=HALF)
    assert (made.shape, made.normalization, made.labels.tolist()) == ((3, 6, 4), HALF, [0, 1, 2])
    assert torch.equal(made.images[1, 0], made.images[1, 2])
    one = [(PICTURES[0], 0)]
    assert torch.equal(LabeledImages.from_dataset(one, size=4).images, STACKED[:1])
    whole: Any = Subset(LabeledImages(PIXELS, LABELS), [0])  # type: ignore[arg-type]
    for floats in (Lazy(), Lazy(PIXELS.double()), whole):
        for option in ({"size": 4}, {"channels": 1}):
            refused(lambda: LabeledImages.from_dataset(floats, **option), TypeError, "size and channels are for uint8")  # noqa: B023
    for column in ({"image": "a"}, {"label": "a"}):
        refused(lambda: LabeledImages.from_dataset(pairs, **column), TypeError, "columns of rows, but item 0")  # noqa: B023


def test_names_that_would_move_are_refused() -> None:
    """A set without the middle class would number the last one differently, and lose its names when it is extended."""
    train, test = as_set(PIXELS, WORDS), as_set(PIXELS[[0, 2]], ["cat", "eel"])
    said = "train and test have the class 'eel' in another order.*class_names"
    refused(lambda: as_split(train, test), ValueError, said)
    refused(lambda: as_split(test, train), ValueError, "test and train have the class 'eel' in another order")
    method = FedAvg(factory=lambda k: ConvNet((2, 4, 4), k, width=4, depth=1))
    for clients in ([train, test], [test, train]):
        run = lambda clients=clients: simulate(method, clients, rounds=1, progress=False)  # noqa: E731
        refused(run, ValueError, "have the class 'eel' in another order")
    named = as_set(PIXELS[[0, 2]], ["cat", "eel"], class_names=("cat", "dog", "eel"))
    assert as_split(train, named).test.labels.tolist() == [0, 2]
    few = as_set(PIXELS[[0, 1]], ["cat", "dog"])
    assert as_split(train, few).classes == ("cat", "dog", "eel")
    assert simulate(method, [few, train], rounds=1, progress=False).rows[-1]["failed"] == {}
    assert ClientRegistry([few, train])[0].train.class_names == ("cat", "dog", "eel")
