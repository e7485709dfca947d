"""Any dataset in a file: what is stored, what is refused, and what happens after an interruption."""

from __future__ import annotations

import os
import sys
from collections import UserDict
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset

from distillkit import LabeledImages, Normalization
from distillkit.data import _cache, store_dataset
from distillkit.locking import locked
from distillkit.sets import as_set
from tests.refused import refused
from tests.stored import require_same_set

SPACE = Normalization([0.4, 0.5, 0.6], [0.2, 0.3, 0.25])
DRAWS = torch.Generator().manual_seed(0)
PIXELS = torch.randint(0, 256, (75, 3, 10, 9), generator=DRAWS, dtype=torch.uint8)
LABELS = torch.randint(0, 4, (75,), generator=DRAWS)
PICTURES = [Image.fromarray(one.permute(1, 2, 0).numpy()) for one in PIXELS]
WORDS = [*(["owl", "cat", "ant", "dog"][int(c)] for c in LABELS[:-1]), "bee"]  # of which no other image is


class Pairs(Dataset[Any]):
    classes = ("a", "b", "c", "d", "e")

    def __init__(self, items: list[Any]) -> None:
        self.items, self.reads = items, 0

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> Any:
        self.reads += 1
        return self.items[index]


class Stream(IterableDataset[Any]):
    def __len__(self) -> int:
        return 7  # for example, that of one worker

    def __iter__(self) -> Iterator[Any]:
        yield from zip(PIXELS, LABELS.tolist())


TORN, MORE = (
    type("Torn", (), {"__len__": lambda _, n=n: n, "__iter__": lambda _: zip(PIXELS[:35], LABELS)})() for n in (36, 34)
)
FLOATS = SPACE.encode(PIXELS.float() / 255)
SOURCES: dict[str, Any] = {
    "list of pairs": list(zip(PIXELS, LABELS)),
    "tuple of pairs": tuple(zip(PIXELS, LABELS)),
    "values": dict(enumerate(zip(PIXELS, LABELS))).values(),
    "generator": iter(list(zip(PIXELS, LABELS.tolist()))),
    "stream": Stream(),
    "arrays": (PIXELS.permute(0, 2, 3, 1).numpy(), LABELS.numpy()),
    "tensors": (PIXELS, LABELS),
    "pictures": list(zip(PICTURES, LABELS.tolist())),
    "rows": [{"image": one, "label": int(c)} for one, c in zip(PICTURES, LABELS)],
    "stream of rows": iter([{"image": one, "label": int(c)} for one, c in zip(PICTURES, LABELS)]),
    "floats": list(zip(FLOATS, LABELS)),
    "loader": DataLoader(list(zip(FLOATS, LABELS)), batch_size=20),  # type: ignore[arg-type]
    "loader of rows": DataLoader([UserDict(image=x, label=c) for x, c in zip(PIXELS, LABELS)], batch_size=7),  # type: ignore[arg-type]
    "words": list(zip(PIXELS, WORDS)),
    "label rows": list(zip(PIXELS, torch.eye(4)[LABELS])),
}


@pytest.mark.parametrize("name", SOURCES)
def test_the_stored_set_equals_the_set_in_memory(name: str, tmp_path: Path) -> None:
    source = SOURCES[name]
    options = {"normalization": SPACE, "progress": False}
    stored = store_dataset(source, tmp_path / "a.npy", **options)
    whole = [*zip(*source)] if name in ("arrays", "tensors") else [*zip(PIXELS, WORDS if name == "words" else LABELS)]
    if name == "label rows":
        whole = [*zip(PIXELS, torch.eye(4)[LABELS])]
    require_same_set(stored.read(), LabeledImages.from_dataset(whole, **options))  # type: ignore[arg-type]
    assert np.array_equal(np.load(tmp_path / "a.npy"), PIXELS.numpy())
    assert [p.name for p in sorted(tmp_path.iterdir()) if p.name[0] != "."] == ["a.npy", "a.safetensors"]


def test_a_complete_file_is_opened_without_the_dataset(tmp_path: Path) -> None:
    data, path = Pairs(list(zip(PIXELS, LABELS))), tmp_path / "a.npy"
    first = store_dataset(data, path)
    assert (data.reads, first.class_names, first.num_classes, first.classes_given) == (75, data.classes, 5, False)
    assert first.info == {"classes": "dataset"}
    again = store_dataset(data, path, normalization=SPACE, class_names=["v", "w", "x", "y", "z"])
    assert (data.reads, again.normalization, again.class_names[0], again.classes_given) == (75, SPACE, "v", True)
    assert again.info == {}
    assert torch.equal(again.labels, LABELS)
    assert torch.equal(again.digests, first.digests)
    others: Any = ((Pairs(data.items[1:]), {}), (iter(data.items), {"size": (9, 10)}), (data, {"channels": 1}))
    for source, options in others:
        call = partial(store_dataset, source, path, **options)
        refused(call, ValueError, r"a\.npy holds 75 images 3x10x9, but this call asks for other ones .*delete the file")
    refused(lambda: store_dataset(data, path, num_classes=2), ValueError, "num_classes=2")
    refused(lambda: store_dataset(Subset(first, [0]), path), TypeError, "this Subset is of a set")
    refused(lambda: store_dataset(data, path, class_names=["v", "w"]), ValueError, "num_classes=2")
    odd: dict[str, Any] = {"num_classes": 5, "class_names": ["v", "w"]}
    refused(lambda: store_dataset(data, path, **odd), ValueError, "class_names must be 5 names")
    assert store_dataset(data, path, num_classes=9).class_names == ()
    loaded = store_dataset(DataLoader(data, batch_size=9), tmp_path / "c.npy")
    assert (loaded.class_names, loaded.info) == (first.class_names, first.info)
    data.find_classes = list  # type: ignore[attr-defined]
    path.unlink()
    assert store_dataset(data, path).info == {"classes": "folders"}
    names = ("owl", "cat", "ant", "dog", "bee")
    rows = [{"a": word, "b": one, "c": "owl"} for one, word in zip(PIXELS, WORDS)]
    named = store_dataset(rows, tmp_path / "b.npy", image="b", label="a", class_names=names)
    assert named.labels.tolist() == [names.index(word) for word in WORDS]


def test_an_interrupted_call_starts_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, items, waits = tmp_path / "a.npy", list(zip(PIXELS, LABELS)), list[float]()
    module: Any = sys.modules["distillkit.data.store_dataset"]
    monkeypatch.setattr(module, "locked", lambda *lock, wait: waits.append(wait) or locked(*lock, wait=wait))

    def stopping() -> Iterator[Any]:
        yield from ((255 - x, y) for x, y in items[:40])
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        store_dataset(stopping(), path)
    assert not path.with_suffix(".safetensors").exists()
    assert torch.equal(store_dataset(iter(items[:20]), path).read().images, PIXELS[:20].float() / 255)
    path.with_suffix(".safetensors").unlink()
    with monkeypatch.context() as patch:
        patch.setattr(_cache, "write_tensors", lambda *_: (_ for _ in ()).throw(OSError("full")))
        refused(lambda: store_dataset(items[:50], path), OSError, "full")
    assert len(store_dataset(iter(items[:33]), path)) == 33
    assert waits == [24 * 3600] * 4
    whole = path.read_bytes()
    for damaged in (whole[:-1], whole + b"x"):
        path.write_bytes(damaged)
        refused(lambda: store_dataset(items, path), ValueError, "a.npy is damaged.*delete both")
    for other, words in ((PIXELS[:20], "a.npy is damaged"), (PIXELS.char(), r"uint8, got int8 \[75, 3, 10, 9\]"), (
        PIXELS.permute(3, 2, 1, 0), r"uint8, got uint8 \[9, 10, 3, 75\]")):  # fmt: skip
        np.save(path, other.numpy())
        refused(lambda: store_dataset(items, path), ValueError, words)


def test_pictures_are_resized_and_rounded(tmp_path: Path) -> None:
    mixed = [(one.resize((8 + i % 3, 12)) if i % 2 else one.convert("L"), i % 4) for i, one in enumerate(PICTURES)]
    options: dict[str, Any] = {"size": (6, 5), "channels": 3, "num_classes": 9}
    stored = store_dataset(mixed, tmp_path / "a.npy", **options)
    expected = LabeledImages.from_dataset(mixed, **options)
    require_same_set(stored.read(), expected, images=False)
    assert 0 < float((stored.read().images - expected.images).abs().max()) <= 0.5001 / 255
    refused(lambda: store_dataset(mixed, tmp_path / "b.npy"), ValueError, "one shape and dtype.*size=")


@pytest.mark.parametrize(("value", "stored"), [(-0.002, None), (-0.0005, 0.0), (1.0005, 1.0), (1.002, None)])
def test_floats_are_pixels_up_to_rounding(value: float, stored: float | None, tmp_path: Path) -> None:
    images = torch.full((40, 1, 4, 5), 0.2)
    images[35, 0, 2, 3] = value
    call = partial(store_dataset, list(zip(images, [0, 1] * 20)), tmp_path / "a.npy", progress=False)
    if stored is None:
        low, high = sorted((0.2, value))
        words = rf"must give pixels in \[0, 1\], .* items 32 and later have values from {low} to {high}"
        refused(call, ValueError, words)
    else:
        assert float(call().read().images[35, 0, 2, 3]) == stored


def test_a_pass_over_a_loader_leaves_the_global_random_state(tmp_path: Path) -> None:
    before = torch.get_rng_state()
    loader = DataLoader([*zip(PIXELS, range(20))], batch_size=6, shuffle=True)  # type: ignore[arg-type]
    stored = store_dataset(loader, tmp_path / "a.npy")
    assert torch.equal(before, torch.get_rng_state())
    assert stored.labels.tolist() != list(range(20))
    assert sorted(stored.labels.tolist()) == list(range(20))
    assert torch.equal(stored.read().images, store_dataset(loader, tmp_path / "a.npy").read().images)


def test_a_dataset_larger_than_memory_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    data, pages = Pairs(list(zip(PIXELS, LABELS))), 4 * PIXELS.numel() // 60
    monkeypatch.setattr(os, "sysconf", {"SC_PAGE_SIZE": 60, "SC_PHYS_PAGES": pages - 1}.__getitem__)
    refused(lambda: as_set(data), ValueError, r"take 81 kB as floats.*use distillkit\.data\.store_dataset\(\.\.\.\)")
    assert data.reads == 1
    assert len(store_dataset(data, tmp_path / "a.npy")) == 75
    monkeypatch.setattr(os, "sysconf", {"SC_PAGE_SIZE": 60, "SC_PHYS_PAGES": pages}.__getitem__)
    with pytest.warns(UserWarning, match="store_dataset"):
        assert len(as_set(data)) == 75


@pytest.mark.parametrize(
    ("dataset", "error", "words"),
    [
        (list(zip(FLOATS, LABELS)), ValueError, "must give pixels in .0, 1., or bytes, but items 0 .*normalization="),
        ([*zip(PIXELS[:40], LABELS), (PIXELS[0, :, :5], 1)], ValueError, r"of item 32 and later|one shape"),
        ([*zip(PIXELS[:32], LABELS), (PIXELS[0, :, :5], 1)], ValueError, r"those of item 32 and later have shapes"),
        ([*zip(PIXELS[:32], LABELS), (PIXELS[0, :1], 1)], ValueError, r"item 32 .* shapes \(1, 10, 9\) and \[\];"),
        ([*zip(PIXELS[:32], LABELS), (PIXELS[0], [0.5, 0.5])], ValueError, "those of item 32 and later"),
        ([*zip(PIXELS[:32], torch.eye(32)), (PIXELS[0], [0.5, 0.5])], ValueError, r"item 32 .* \(3, 10, 9\) and \[2\]"),
        (TORN, ValueError, "must hold 36 items, .* but gave 35"),
        (MORE, ValueError, "must hold 34 items, .* but gave 35"),
        (pd.DataFrame({"image": [1], "label": [2]}), TypeError, "dataset must be a torch.utils.data.Dataset"),
        ([*zip(PIXELS[:32], LABELS), PIXELS[0]], TypeError, r"counted from item 32 of the dataset"),
        ([PIXELS[0]], TypeError, r"item 0 is Tensor \[3, 10, 9\]$"),
        ([], ValueError, "at least one item"),
        (iter([]), ValueError, "at least one item"),
        (PIXELS, TypeError, "dataset must be a torch.utils.data.Dataset"),
        ({"image": [1], "label": [2]}, TypeError, "dataset must be"),
        (7, TypeError, "dataset must be a torch.utils.data.Dataset"),
        (Subset(LabeledImages(FLOATS, LABELS), [0]), TypeError, "but this Subset is of a set; keep it with save"),
        ("pictures", TypeError, "read it first"),
    ],
)
def test_what_cannot_be_stored_is_refused(dataset: Any, error: type[Exception], words: str, tmp_path: Path) -> None:
    refused(lambda: store_dataset(dataset, tmp_path / "a.npy"), error, words)
    refused(lambda: store_dataset(dataset, tmp_path / "a.nonpy"), ValueError, r"path must end in \.npy, got .*nonpy$")
