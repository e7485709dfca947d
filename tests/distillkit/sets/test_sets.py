from __future__ import annotations

import base64
import copy
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import ConcatDataset, DataLoader, Subset, SubsetRandomSampler, TensorDataset

from distillkit import LabeledImages, Normalization
from distillkit._utils.display import as_png
from distillkit._utils.files import write_tensors
from distillkit.data import clients
from distillkit.normalization import IDENTITY, ZCA
from distillkit.sets import as_set
from distillkit.sets.as_set import open_set
from tests.refused import refused
from tests.stored import require_same_set, write_pixels

HALF = Normalization([0.5], [0.25])


def make(
    n: int = 6,
    shape: tuple[int, int, int] = (1, 3, 2),
    k: int = 3,
    *,
    kind: str = "index",
    zca: bool = False,
    columns: bool = False,
    known: bool = True,
    info: dict[str, Any] | None = None,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> LabeledImages:
    g = torch.Generator().manual_seed(seed)
    images = torch.randn(n, *shape, generator=g).to(dtype)
    labels = torch.rand(n, k, generator=g) if kind == "rows" else torch.randint(k, (n,), generator=g)
    whitening = None
    if zca:
        d = images[0].numel() if n else int(np.prod(shape))
        matrix = torch.eye(d) + 0.1 * torch.rand(d, d, generator=g)
        whitening = ZCA(torch.rand(d, generator=g), matrix, matrix.inverse())
    mean, std = torch.rand(shape[0], generator=g).tolist(), (torch.rand(shape[0], generator=g) + 0.1).tolist()
    extra = {"column.logits": torch.randn(n, 2, 5, generator=g), "client": torch.arange(n), "": torch.ones(n) > 0}
    return LabeledImages(
        images,
        labels,
        num_classes=k,
        normalization=Normalization(mean, std, whitening, measured=not known),
        columns=extra if columns else None,
        info=info,
        classes_given=known,
        class_names=[f"class {c}" for c in range(k)] if columns == known else (),
    )


json_values = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text()),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(), inner, max_size=3)),
    max_leaves=6,
)
sets = st.builds(
    make,
    st.integers(0, 5),
    st.tuples(st.integers(1, 4), st.integers(1, 3), st.integers(1, 3)),
    st.integers(1, 4),
    kind=st.sampled_from(["index", "rows"]),
    zca=st.booleans(),
    columns=st.booleans(),
    known=st.booleans(),
    info=st.dictionaries(st.text(), json_values, max_size=3),
    dtype=st.sampled_from([torch.float16, torch.bfloat16, torch.float32, torch.float64]),
    seed=st.integers(0, 99),
)


# Files


@given(sets)
def test_saved_set_is_loaded_bitwise(tmp_path: Path, data: LabeledImages) -> None:
    require_same_set(LabeledImages.load(data.save(tmp_path / "set.safetensors")), data)
    assert [p.name for p in tmp_path.iterdir()] == ["set.safetensors"]


@pytest.mark.parametrize("meta", [None, "{", "{}", "[]"])
def test_inconsistent_file_is_refused(tmp_path: Path, meta: str | None) -> None:
    tensors = {"images": torch.zeros(1, 1, 1, 1), "labels": torch.zeros(1, dtype=torch.long)}
    odd = {**tensors, "images": tensors["images"].to(torch.float8_e4m3fn)}  # of which PyTorch computes little
    whole = json.dumps(make(1, (1, 1, 1), 1).parts()[1])
    cases = (tensors, meta, "KeyError|JSONDecodeError|TypeError"), (odd, whole, "NotImplementedError")
    for parts, text, words in cases:
        header = {"format": "distillkit.LabeledImages/1"} | ({} if text is None else {"set": text})
        path = write_tensors(tmp_path / "set.safetensors", parts, header)
        refused(lambda path=path: LabeledImages.load(path), ValueError, f"^{path} is damaged: ({words})")


def test_unknown_part_is_refused() -> None:
    tensors, facts = make().parts()
    odd = {**tensors, "column": torch.ones(6), "a.column.": torch.ones(6)}
    words = "tensors must be parts of a set, got column, a.column.$"
    refused(lambda: LabeledImages.from_parts(odd, facts), ValueError, words)
    for name in facts:
        some = {key: value for key, value in facts.items() if key != name}
        refused(lambda some=some: LabeledImages.from_parts(tensors, some), KeyError, name)


# Reading


def test_set_works_with_a_data_loader() -> None:
    data = make(5)
    assert [*map(id, data)] == [id(data.images), id(data.labels)]
    batches = list(DataLoader(data, batch_size=2, shuffle=False))
    assert torch.equal(torch.cat([x for x, _ in batches]), data.images)
    assert torch.equal(torch.cat([y for _, y in batches]), data.labels)
    some = DataLoader(data, sampler=SubsetRandomSampler([0, 1]))
    for call in (as_set, open_set):
        refused(lambda call=call: call(some, name="real"), TypeError, "real is a DataLoader with a SubsetRandomSampler")
    refused(lambda: LabeledImages.from_dataset(some), TypeError, "dataset is a DataLoader with a SubsetRandomSampler")


@given(sets, st.data())
def test_subset_selects_rows_of_all_columns(data: LabeledImages, draw: st.DataObject) -> None:
    n = len(data)
    mask = draw.draw(st.lists(st.booleans(), min_size=n, max_size=n))
    rows = [i for i in range(n) if mask[i]]
    columns = {k: v[rows] for k, v in data.columns.items()}
    wanted = data.replace(images=data.images[rows], labels=data.labels[rows], columns=columns)
    numbers, chosen = torch.tensor(rows, dtype=torch.long), torch.tensor(mask, dtype=torch.bool)
    for index in (rows, numbers, chosen, np.array(rows, int)):
        require_same_set(data[index], wanted)
    if n:
        require_same_set(data[mask], wanted)
    require_same_set(data[:], data)
    require_same_set(data[::-2], data[list(range(n))[::-2]])


@pytest.mark.parametrize("index", [0, 1, 5, -1, -6, np.int64(1), torch.tensor(1)])
def test_integer_index_returns_the_pair(index: Any) -> None:
    data = make(6)
    image, label = data[index]
    assert torch.equal(image, data.images[int(index)])
    assert int(label) == int(data.labels[int(index)])
    refused(lambda: data[0.5:], TypeError, r"index must be a slice of ints, got slice\(0.5, None, None\)")  # type: ignore[misc]
    for odd, words in (([], "float32"), ([1j], "complex64"), ([[0]], "int64")):
        shape = re.escape(str([*torch.tensor(odd).shape]))
        refused(
            lambda odd=odd: data[torch.tensor(odd)], TypeError, rf"index must be .*, got torch.{words} of shape {shape}"
        )
    refused(lambda: data[None], TypeError, "index must be an int, a slice, a mask or a list of ints, got None")  # type: ignore[index]
    refused(lambda: data[torch.empty(2, device="meta").long()], ValueError, "index must have values")
    for mask in (torch.ones(5) > 0, torch.ones(7) > 0, torch.tensor(True)):
        words = f"a mask of 6 values, one per image, got shape {re.escape(str([*mask.shape]))}"
        refused(lambda m=mask: data[m], IndexError, words)
    for wrong in (6, -7, [0, 6], torch.tensor([-7])):
        refused(lambda wrong=wrong: data[wrong], IndexError, r"index must be in \[-6, 6\), got (-7|0|6) to (-7|6)")


@given(sets)
def test_shape_mean_std_and_counts(data: LabeledImages) -> None:
    assert data.shape == tuple(data.images.shape[1:])
    assert (data.mean, data.std) == (data.normalization.mean, data.normalization.std)
    counts = data.counts()
    assert counts.shape == (data.num_classes,)
    assert counts.dtype == torch.int64
    for c in range(data.num_classes):
        own = data.labels[:, c] > 0.5 if data.labels.ndim == 2 else data.labels == c
        assert int(counts[c]) == int(own.sum())
    halves = LabeledImages(torch.zeros(2, 1, 4, 4), torch.tensor([[0.5, 0.6], [0.5, 0.4]]), normalization=HALF)
    assert halves.counts().tolist() == [0, 1]


def test_repr_shows_the_content() -> None:
    images = torch.zeros(4, 1, 8, 9)
    balanced = LabeledImages(images, torch.tensor([0, 0, 1, 1]), info={"method": "DM", "steps": 3})
    assert repr(balanced) == "LabeledImages(4 images 1x8x9; 2 classes (2 each); pixels in [0, 1]; method=DM, steps=3)"
    options: dict[str, Any] = {"columns": {"b": images, "a": images}, "info": {"ipc": [1, 2], "epsilon": None}}
    other = LabeledImages(images, torch.tensor([0, 0, 2, 0]), normalization=HALF, **options)
    told = "columns a, b; no guarantee: no reason is recorded, 2 facts in info"
    assert repr(other) == f"LabeledImages(4 images 1x8x9; 3 classes (0 to 3 each); mean (0.5) std (0.25); {told})"
    assert "9; rows of 7; pixels" in repr(LabeledImages(images, torch.zeros(4, 7)))
    assert repr(balanced[[]]).startswith("LabeledImages(0 images 1x8x9; 2 classes; pixels")
    long = {"method": "DM", "networks": "x" * 500, "epsilon": 0.0, "client": 3}
    assert repr(balanced.replace(info=long)).endswith("; method=DM, epsilon=0.0, client=3, 4 facts in info)")


def test_info_of_numpy_numbers_becomes_python_numbers() -> None:
    info = {"steps": np.int64(3), "rate": np.float32(0.5), "pair": (np.bool_(True), 1)}
    assert make(info=info).info == {"steps": 3, "rate": 0.5, "pair": [True, 1]}
    refused(lambda: make(info={"a": {1}}), TypeError, "info must be a mapping of JSON values: set is not a JSON value")
    info["itself"] = info
    refused(lambda: make(info=info), TypeError, "info must be a mapping of JSON values: Circular reference")


def test_info_is_a_copy() -> None:
    info = {"nested": {"a": [1, 2]}}
    data = make(info=info)
    info["nested"]["a"].append(3)
    assert data.info == {"nested": {"a": [1, 2]}}
    columns = {"a": Y}
    data = LabeledImages(X, Y, columns=columns)
    columns.clear()
    assert list(data.columns) == ["a"]
    require_same_set(copy.deepcopy(data), data)


# Pixels and spaces


@pytest.mark.parametrize("value", [255.0, 1.0011, -0.0011])
def test_out_of_range_floats_are_refused_as_pixels(value: float) -> None:
    pixels = torch.tensor([0.5, value]).view(1, 1, 1, 2)
    low, high = sorted((0.5, value))
    with pytest.raises(ValueError, match=rf"pixels must be in \[0, 1\], got {low:.4g} to {high:.4g}; .* LabeledI"):
        LabeledImages.from_pixels(pixels, torch.tensor([0]))
    near = pixels.clamp(-0.0009, 1.0009)  # such as after resizing
    assert torch.equal(LabeledImages.from_pixels(near, torch.tensor([0])).images, near)
    refused(lambda: LabeledImages.from_pixels(pixels.long(), torch.tensor([0])), TypeError, "pixels must")


def test_pixels_are_clamped_and_renormalizing_is_not() -> None:
    images = torch.tensor([-9.0, 0.0, 9.0]).view(1, 1, 1, 3)
    data = LabeledImages(images, [0], normalization=HALF, columns={"a": torch.ones(1)}, info={"b": 1})
    assert data.pixels().flatten().tolist() == [0.0, 0.5, 1.0]
    wanted = data.replace(images=torch.tensor([-1.75, 0.5, 2.75]).view(1, 1, 1, 3), normalization=IDENTITY)
    require_same_set(data.renormalize(IDENTITY), wanted)


def test_to_converts_images_and_rows_but_not_classes() -> None:
    moved = make(kind="rows", columns=True).to("cpu", torch.float64)
    dtypes = [one.dtype for one in (moved.images, moved.labels, moved.columns["client"])]
    assert dtypes == [torch.float64, torch.float64, torch.int64]
    assert make().to(dtype=torch.float16).labels.dtype == torch.int64


# Joining


@given(sets, st.data())
def test_concatenating_the_parts_gives_the_whole(data: LabeledImages, draw: st.DataObject) -> None:
    cut = draw.draw(st.integers(0, len(data)))
    require_same_set(LabeledImages.concatenate([data[:cut], data[cut:]]), data)


def test_concatenate_refuses_differences_with_a_remedy() -> None:
    a, moved = LabeledImages(torch.zeros(2, 1, 2, 2), Y, columns={"y": Y}), Normalization([0], [0.5])
    changes: list[tuple[dict[str, Any], str]] = [
        ({"normalization": moved}, r": pixels .* std \(0.5\); .*`b\.renormalize\(a\.normalization\)`"),
        ({"images": torch.zeros(2, 3, 2, 2)}, r"shapes: \(1, 2, 2\) and \(3, 2, 2\); resize"),
        ({"images": torch.zeros(2, 1, 2, 3)}, r"shapes: \(1, 2, 2\) and \(1, 2, 3\); resize"),
        ({"num_classes": 5}, r"counts: 2 and 5; .* `b\.replace\(num_classes=a\.num_classes\)`"),
        ({"columns": {"x": Y, "y": Y}}, r"columns: \['y'\] and \['x', 'y'\]; .* `b\.replace\(columns=\{\.\.\.\}\)`"),
        ({"labels": torch.eye(2)}, r"class indices and rows; .*one_hot"),
    ]
    for change, words in changes:
        with pytest.raises(ValueError, match=f"^the sets have .*different .*{words}"):
            LabeledImages.concatenate([a, a, a.replace(**change)])
        with pytest.raises(ValueError, match="^the sets have .*different .*; "):
            LabeledImages.concatenate([a.replace(**change), a])
    refused(lambda: LabeledImages.concatenate([]), ValueError, "at least one set, got none")
    refused(lambda: LabeledImages.concatenate([a, Y]), TypeError, r"^sets\[1\] must be .*, got Tensor")  # type: ignore[list-item]
    rows = [a.replace(labels=torch.eye(2, dtype=dtype)) for dtype in (torch.float32, torch.float64)]
    assert LabeledImages.concatenate(rows).labels.tolist() == [[1, 0], [0, 1]] * 2


# The grid


@given(st.integers(1, 7), st.integers(1, 4), st.integers(0, 3), st.integers(1, 3), st.integers(1, 4))
def test_every_image_is_in_its_place_of_the_grid(n: int, columns: int, padding: int, h: int, w: int) -> None:
    pixels = torch.rand(n, 2, h, w, generator=torch.Generator().manual_seed(n)) * 0.9
    labels = torch.zeros(n, dtype=torch.long)
    sheet = LabeledImages.from_pixels(pixels, labels, normalization=HALF).grid(columns, padding)
    rows = -(-n // columns)
    assert sheet.shape == (2, padding + rows * (h + padding), padding + columns * (w + padding))
    white = sheet.clone()
    for i in range(n):
        y, x = padding + i // columns * (h + padding), padding + i % columns * (w + padding)
        assert torch.allclose(sheet[:, y : y + h, x : x + w], pixels[i])
        white[:, y : y + h, x : x + w] = 1
    assert bool((white == 1).all())


def test_default_grid_has_ten_columns() -> None:
    assert make(3, (1, 2, 2)).grid().shape == (1, 2 + 4, 2 + 3 * 4)
    assert make(11, (1, 2, 2)).grid().shape == (1, 2 + 2 * 4, 2 + 10 * 4)
    refused(lambda: make(0).grid(), ValueError, "an empty set has no grid")
    refused(lambda: make(1).grid(padding=-1), ValueError, "padding must be at least 0")


# Bad input

X, Y = torch.zeros(2, 1, 3, 3), torch.tensor([0, 1])
ODD = torch.tensor([0.0, torch.nan, torch.inf])


@pytest.mark.parametrize(
    ("arguments", "options", "error", "words"),
    [
        ((X.long(), Y), {}, TypeError, "images must be floating point"),
        ((X[:0].long(), Y[:0]), {"num_classes": 2}, TypeError, "images must be floating point"),
        ((X[:0, 0], Y[:0]), {"num_classes": 2}, ValueError, "images must have 4 dimensions"),
        ((X[..., :0], Y), {}, ValueError, "images must not be empty"),
        ((ODD.view(3, 1, 1, 1), [0, 1, 1]), {}, ValueError, r"but 2 of 3 images hold NaN or Inf \(first: 1\)"),
        ((X, Y[:1]), {}, ValueError, "labels must have one entry per image"),
        ((X, Y - 1), {}, ValueError, "labels must be at least 0"),
        ((X, Y), {"num_classes": 1}, ValueError, "labels must be below num_classes=1"),
        ((X[:0], Y[:0]), {}, ValueError, "num_classes must be given for an empty set"),
        ((X[:0], Y[:0]), {"num_classes": 0}, ValueError, "num_classes must be at least 1"),
        ((X, Y), {"num_classes": 10**6 + 1}, ValueError, "num_classes must be at most 1000000"),
        ((X, torch.zeros(3, 2)), {}, ValueError, "labels must be 2 finite rows"),
        ((X, torch.tensor([[0.5, 0.5], [0, -torch.inf]])), {}, ValueError, r"labels .* 2 finite rows, .* \[2, 2\]"),
        ((X, torch.zeros(2, 4)), {"num_classes": 3}, ValueError, "4 columns, but num_classes=3"),
        ((X, torch.zeros(2, 4)), {"num_classes": 5}, ValueError, "4 columns, but num_classes=5"),
        ((X, Y), {"normalization": Normalization([0.0] * 3, [1.0] * 3)}, ValueError, "1 channels, normalization has 3"),
        ((X.repeat(1, 3, 1, 1), Y), {"normalization": Normalization([0.0] * 2, [1.0] * 2)}, ValueError, "3 .* has 2;"),
        ((X, Y), {"columns": {"a": torch.zeros(3)}}, ValueError, "column 'a' must have 2 rows"),
        ((X, Y), {"columns": {"a": torch.tensor(1.0)}}, ValueError, "column 'a' must have 2 rows"),
        ((X, Y), {"columns": {"a": [1, 2]}}, TypeError, r"column 'a' must be a torch\.Tensor, got list"),
        ((X, Y), {"columns": {"a": np.arange(2)}}, TypeError, r"must be a torch\.Tensor, got ndarray"),
        ((X, Y), {"classes_given": "no"}, TypeError, "classes_given must be"),
        ((X, Y), {"info": {"a": Y[0]}}, TypeError, "info must be a mapping of JSON values"),
        ((X, Y), {"info": [1]}, TypeError, "info must be a mapping of JSON values"),
        ((X, Y), {"normalization": ()}, TypeError, "normalization must be a Normalization"),
        ((X, torch.eye(2).long()), {}, ValueError, "labels must"),
    ],
)
def test_invalid_input_is_named(arguments: Any, options: Any, error: type[Exception], words: str) -> None:
    refused(lambda: LabeledImages(*arguments, **options), error, words)


def test_from_pixels_refuses_the_same_input_as_the_class() -> None:
    refused(lambda: LabeledImages.from_pixels([[0.0]], Y), TypeError, r"pixels must be a torch\.Tensor")
    refused(lambda: LabeledImages.from_pixels(X[:0, 0], Y), ValueError, "pixels must have 4 dimensions")
    assert len(LabeledImages.from_pixels(X[:0], Y[:0], num_classes=2)) == 0


def test_sets_are_made_on_the_cpu_under_any_default_device(tmp_path: Path) -> None:
    data = LabeledImages(X, Y)
    stored = write_pixels(tmp_path / "a.npy", X.byte(), Y, num_classes=2)
    folders = [data.export(tmp_path / "a"), data[:0].export(tmp_path / "b")]
    with torch.device("meta"):
        made = [as_set(list(zip(X, [0, 1]))), as_set(Subset(data, [1, 0])), data[[]], data[::-1]]
        made += [stored.read(), stored._empty, *map(LabeledImages.load, folders)]
    assert {str(part.device) for one in made for part in (one.images, one.labels)} == {"cpu"}


# as_set


def test_as_set_accepts_tensors_or_a_set() -> None:
    data = LabeledImages(X, Y, num_classes=4, normalization=HALF)
    assert as_set(data) is as_set(data, num_classes=4, normalization=Normalization([0.5], [0.25])) is data
    require_same_set(as_set(X, Y, num_classes=4, normalization=HALF), data)
    mixed: Any = ConcatDataset([LabeledImages(X, Y), TensorDataset(X, Y)])
    assert as_set(mixed).labels.tolist() == [0, 1, 0, 1]
    assert as_set(X, torch.ones(2, 1)).labels.shape == (2, 1)
    grey = torch.tensor([0, 255], dtype=torch.uint8).view(2, 1, 1, 1)
    large = LabeledImages.from_dataset(list(zip(grey, Y)), size=2, normalization=HALF).images
    assert large.flatten(1).tolist() == [[-2.0] * 4, [2.0] * 4]
    for pair in ([X, Y], (X, Y), [data], [[*X], Y]):
        with pytest.raises(TypeError, match="dataset must be a torch.utils.data.Dataset"):
            LabeledImages.from_dataset(pair)
    refused(lambda: LabeledImages.from_dataset(Subset(data, [0]), size=2), TypeError, "but dataset is a LabeledImages")


def test_as_set_refuses_contradictions() -> None:
    data = LabeledImages(X, Y, num_classes=2)
    for source in (data, TensorDataset(X, Y), (X, Y)):
        words = f"labels must be left out when real is a {type(source).__name__}"
        refused(lambda source=source: as_set(source, Y, name="real"), TypeError, words)
    for images, kind in ((X, "Tensor"), ([*X], "list")):
        words = f"^labels must be given, because images is a {kind}, which has none"
        refused(lambda x=images: as_set(x), TypeError, words)
    for k in (1, 3):
        refused(lambda k=k: as_set(data, num_classes=k), ValueError, f"num_classes={k}, but the set has 2")
    refused(lambda: as_set(X, Y, normalization=(0.5,)), TypeError, "normalization must be a Normalization")  # type: ignore[arg-type]
    refused(lambda: as_set(data, normalization=HALF), ValueError, r"is mean \(0\.5\) .*, but the set's is pixels")
    for space in (Normalization([0.5], [0.5]), IDENTITY):
        refused(lambda s=space: as_set(data.replace(normalization=HALF), normalization=s), ValueError, "set's is mean")
    overwritten = LabeledImages(X.clone(), Y)
    for value in (torch.nan, torch.inf):
        overwritten.images[1] = value
        refused(lambda: as_set(overwritten, name="real"), ValueError, "^real must be finite, but 1 of 2")


def test_set_records_whether_its_class_count_was_given() -> None:
    derived, given = LabeledImages(X, Y), LabeledImages(X, Y, num_classes=2)
    assert (derived.classes_given, given.classes_given) == (False, True)
    assert LabeledImages(X, torch.eye(2)).classes_given  # a width is no largest label
    for data in (derived, given):
        kept = [data[:2], data.replace(info={"a": 1}), data.to(dtype=torch.float64), data.renormalize(HALF)]
        kept += [LabeledImages.concatenate([data, data]), copy.deepcopy(data), *clients(data, [torch.arange(2)])]
        assert [k.classes_given for k in kept] == [data.classes_given] * len(kept)
        assert data.replace(num_classes=2).classes_given
    assert not LabeledImages.concatenate([given, derived]).classes_given
    assert as_set(derived, num_classes=5).num_classes == 5
    assert as_set(derived, num_classes=2).classes_given


@pytest.mark.parametrize(
    ("shape", "k", "kind"), [((1, 8, 8), 3, "index"), ((3, 7, 9), 25, "index"), ((5, 4, 4), 3, "rows")]
)
def test_notebook_shows_the_images_of_each_class(shape: tuple[int, int, int], k: int, kind: str) -> None:
    data = make(30, shape, k, kind=kind, info={"method": "<b>"})
    text = data._repr_html_()
    assert "method=&lt;b&gt;" in text
    assert f"zoom: {round(40 / max(shape[1:]))}" in text
    marks = data.labels if kind == "index" else data.labels.argmax(1)
    shown = as_png([data[marks == c].pixels()[:10] for c in marks.unique()[:10]])
    assert base64.b64encode(shown).decode() in text
    assert (f"the first 10 of {len(marks.unique())} " in text) == (len(marks.unique()) > 10)
    assert "img" not in data[:0]._repr_html_()
