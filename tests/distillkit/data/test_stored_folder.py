"""Cached pictures: equality with `load_folder`, reuse, resuming and changed sources."""

from __future__ import annotations

import hashlib
import os
import pickle
import shutil
import warnings
import zipfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial
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
from distillkit.data import _cache as caches
from distillkit.data import clients, load_folder, load_npz, load_table, open_folder, open_npz, partition
from distillkit.data.readers import _picture_list
from distillkit.sets import as_set
from tests.pictures import class_folder, npz_arrays
from tests.refused import refused
from tests.stored import require_same, require_same_set

HALF = Normalization([0.5], [0.5])


made = partial(class_folder, shape=(9, 7, 3))
arrays = partial(npz_arrays, (6, 5, 3), train=70, val=True)


@pytest.fixture(scope="module")
def pets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made(tmp_path_factory.mktemp("source") / "pets", each=6)


class Decoded(list[str]):
    """Names of decoded pictures, after `limit` of which a call is interrupted."""

    limit = 1000


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> Decoded:
    found, read = Decoded(), _picture_list.read_picture

    def counted(file: Path, *options: Any) -> torch.Tensor:
        if len(found) > found.limit:
            raise KeyboardInterrupt
        found.append(file.name)
        return read(file, *options)

    monkeypatch.setattr(_picture_list, "read_picture", counted)
    return found


def cut_off(path: Path, cache: Path, decoded: Decoded, after: int) -> None:
    """Open a folder and interrupt the call after the given number of pictures."""
    decoded.limit = after
    with pytest.raises(KeyboardInterrupt):
        open_folder(path, cache=cache, workers=1)
    decoded.limit = Decoded.limit


def indices(count: int) -> st.SearchStrategy[Any]:
    """Generate slices, masks, index tensors and lists, in any order and with repetitions."""
    numbers = st.lists(st.integers(-count, count - 1), max_size=2 * count)
    return st.one_of(
        st.slices(count).filter(lambda s: s.step is None or s.step > 0),
        st.lists(st.booleans(), min_size=count, max_size=count).map(torch.tensor),
        numbers,
        numbers.map(lambda n: torch.tensor(n, dtype=torch.int64)),
    )


@settings(max_examples=40, deadline=None)
@given(data=st.data(), size=st.sampled_from([None, (9, 7), 5, (13, 8)]), channels=st.sampled_from([None, 1, 3]))
def test_stored_pictures_equal_loaded_ones(
    data: st.DataObject, size: Any, channels: int | None, pets: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Equal bits if no picture is resized or turned grey, else every pixel within half a byte's step."""
    options: dict[str, Any] = {"size": size, "channels": channels, "normalization": HALF, "test_fraction": 0.34}
    loaded = load_folder(pets, **options)
    stored = open_folder(pets, cache=tmp_path_factory.getbasetemp() / "cache", **options)
    exact = size in (None, (9, 7)) and channels in (None, 3)
    for one, other in zip(loaded, stored, strict=True):
        which = data.draw(indices(len(one)))
        wanted, part = one[which], other[which]
        found = other.read(which)
        require_same_set(part.read(), found)
        require_same_set(found, wanted, images=exact)
        assert (part.shape, len(part), part.classes_given) == (wanted.shape, len(wanted), False)
        assert torch.equal(part.counts(), wanted.counts())
        if len(wanted):
            assert float((found.pixels() - wanted.pixels()).abs().max()) <= 1 / 510 + 1e-6


def test_integer_index_and_dataloader(pets: Path, tmp_path: Path) -> None:
    stored = open_folder(pets, cache=tmp_path).train[[3, 0, 5, 9]]
    whole = stored.read()
    for image, label in (zip(*stored), zip(*DataLoader(pickle.loads(pickle.dumps(stored)), batch_size=None))):  # type: ignore[arg-type]
        assert torch.equal(torch.stack([*image]), whole.images)
        assert torch.equal(torch.stack([*label]), whole.labels)
    assert torch.equal(stored[-1][0], whole.images[3])
    for row, one in zip(stored.digests.tolist(), (255 * whole.pixels()).round().byte().numpy(), strict=True):
        assert bytes(row) == hashlib.blake2b(one.tobytes(), digest_size=16).digest()
    refused(lambda: stored[4], IndexError, "index must be in")


def test_the_normalization_is_that_of_the_training_pictures(tmp_path: Path, global_rng_untouched: None) -> None:
    made(tmp_path / "pets")
    for file in (tmp_path / "pets").rglob("*.png"):  # a channel that is constant
        array = np.array(Image.open(file))
        array[..., 1] = 77
        Image.fromarray(array).save(file)
    train, test = open_folder(tmp_path / "pets", cache=tmp_path / "cache", size=(5, 4))
    wanted = Normalization.of(train.replace(normalization=Normalization([0.0], [1.0])).read().images)
    assert train.mean == pytest.approx(wanted.mean, abs=1e-6)
    assert train.std == pytest.approx(wanted.std, abs=1e-6)
    assert (train.std[1], train.normalization.measured) == (1.0, True)
    assert test.normalization == train.normalization


def test_a_cache_is_written_once_and_reused_without_writing(
    pets: Path, tmp_path: Path, decoded: Decoded, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits, locked = list[float](), caches.locked
    monkeypatch.setattr(caches, "locked", lambda *lock, wait: waits.append(wait) or locked(*lock, wait=wait))
    first = open_folder(pets, cache=tmp_path / "a", workers=3)
    assert waits == [24 * 3600]
    assert len(decoded) == 12 + 1  # the first one for its shape
    monkeypatch.setattr(caches, "locked", None)  # what would lock, and so write
    again = open_folder(pets, cache=tmp_path / "a")
    assert len(decoded) == 12 + 2
    assert again.train.path == first.train.path
    assert np.load(first.train.path, mmap_mode="r").shape == (12, 3, 9, 7)
    assert not list((tmp_path / "a").glob("*.rows"))
    assert caches.open_written(first.train.path.with_suffix(".safetensors"))[2]["source"] == str(pets)
    copied = partial(shutil.copytree, tmp_path / "a", tmp_path / "b", dirs_exist_ok=True)
    monkeypatch.setattr(caches, "locked", lambda *_, wait: copied() and nullcontext())  # by a process with the lock
    open_folder(pets, cache=tmp_path / "b")
    assert len(decoded) == 12 + 3


def test_a_folder_that_has_changed_gets_a_new_cache(tmp_path: Path) -> None:
    name = os.fsdecode(b"pets [1] \xff")  # no UTF-8
    path, cache = made(tmp_path / name), tmp_path / "cache"
    first, outside = path / "cat" / "0.png", made(tmp_path / "outside", shift=500) / "cat" / "0.png"
    changes: list[Callable[[], object]] = [
        lambda: (shutil.copy(path / "dog" / "0.png", first), os.utime(first, ns=(1, 1))),
        lambda: os.utime(first, ns=(1, 2)),
        lambda: (first.write_bytes(first.read_bytes() + b" "), os.utime(first, ns=(1, 2))),
        lambda: first.rename(path / "cat" / os.fsdecode(b"\xff.png")),
        lambda: (path / "dog").rename(path / "eel"),
        (path / "cat" / "1.png").unlink,
        lambda: ((path / "cat" / "2.png").unlink(), (path / "cat" / "2.png").symlink_to(outside)),
        lambda: os.utime(outside, ns=(1, 3)),
    ]
    for change in changes:
        old = open_folder(path, cache=cache).train
        change()
        new, wanted = open_folder(path, cache=cache, normalization=HALF), load_folder(path, normalization=HALF)
        require_same(new, wanted)
        assert new.train.path != old.path
        assert len(list(cache.glob("*.npy"))) == len(list(cache.glob("*.safetensors"))) == 1
    refused(lambda: old.read([0]), FileNotFoundError, "open the source again")
    open_folder(made(tmp_path / "other" / name, shift=1000), cache=cache)  # of the same name
    refused(
        lambda: open_folder(path, cache=tmp_path / "other" / name),
        ValueError,
        "must be .* UTF-8, got .*/pets .1. \ufffd;",
    )
    require_same_set(new.train.read(), wanted.train)
    turned = made(tmp_path / "turned", shape=(7, 9, 3))
    (turned / "cat" / "0.png").unlink()
    others = [open_folder(folder, cache=cache).train.path for folder in (tmp_path / "other" / name, turned)]

    def swap(file: Path, other: Path) -> None:
        for suffix in (".npy", ".safetensors"):
            shutil.copy(other.with_suffix(suffix), file.with_suffix(suffix))

    for damage in (lambda file: os.truncate(file, 300), os.unlink, *(partial(swap, other=other) for other in others)):
        damage(new.train.path)
        require_same(open_folder(path, cache=cache, normalization=HALF), wanted)


def test_an_interrupted_cache_is_resumed(tmp_path: Path, decoded: Decoded, monkeypatch: pytest.MonkeyPatch) -> None:
    path = made(tmp_path / "pets", each=40)
    cut_off(path, tmp_path / "cache", decoded, 50)
    done = len(decoded) - 1
    assert 0 < done < 80
    assert not list((tmp_path / "cache").glob("*.safetensors"))
    [pixels] = (tmp_path / "cache").glob("*.npy")
    with pixels.open("r+b") as file:  # a picture that did not get to the disk
        file.seek(-80 * 3 * 9 * 7 + 10 * 3 * 9 * 7, os.SEEK_END)
        file.write(bytes(100))
    with pixels.with_suffix(".rows").open("r+b") as file:  # and one of which only the hash did not
        file.seek(3 * (16 + 3 * 16))
        file.write(bytes(16))
    decoded.clear()
    with monkeypatch.context() as patch:
        patch.setattr(caches, "write_tensors", None)
        refused(lambda: open_folder(path, cache=tmp_path / "cache"), TypeError, "not callable")
    assert len(decoded) == 1 + 80 - done + 2
    stored = open_folder(path, cache=tmp_path / "cache", normalization=HALF).train
    assert len(decoded) == 1 + 80 - done + 2 + 1
    assert torch.equal(stored.read().images, load_folder(path, normalization=HALF).train.images)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda file: file.write_bytes(bytes(16) + file.read_bytes()[16:]),
        lambda file: file.write_bytes(b"\x93NUMPY\x01\x00\xff\xff" + file.read_bytes()[10:]),
        lambda file: file.write_bytes(b""),
        lambda file: np.save(file, np.zeros((11, 3, 9, 7), np.uint8)),
        lambda file: np.save(file, np.zeros((10, 3, 9, 8), np.uint8)),
        Path.unlink,
        lambda file: file.with_suffix(".rows").unlink(),
    ],
    ids=["zeros", "header", "empty", "more pictures", "another shape", "no pixels", "no hashes"],
)
def test_an_interrupted_cache_that_was_spoiled_is_written_again(
    spoil: Callable[[Path], object], tmp_path: Path, decoded: Decoded
) -> None:
    """After a power cut a file may have its length but not its first bytes."""
    path = made(tmp_path / "pets")
    cut_off(path, tmp_path / "cache", decoded, 3)
    [pixels] = (tmp_path / "cache").glob("*.npy")
    spoil(pixels)
    stored = open_folder(path, cache=tmp_path / "cache", normalization=HALF).train
    assert torch.equal(stored.read().images, load_folder(path, normalization=HALF).train.images)


def test_threads_write_one_cache(pets: Path, tmp_path: Path, decoded: Decoded) -> None:
    with ThreadPoolExecutor(3) as pool:
        found = [*pool.map(lambda _: open_folder(pets, cache=tmp_path).train.path, range(3))]
    assert len(set(found)) == 1
    assert len(decoded) == 12 + 3


def test_the_folder_and_the_size_of_a_cache_are_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = made(tmp_path / "pets.v2")
    monkeypatch.delenv("DISTILLKIT_CACHE", raising=False)
    with pytest.warns(UserWarning, match=r"1.89 kB is written to .*pets.v2.cache; give cache="):
        data = open_folder(path).train
    assert data.path.parent == tmp_path / "pets.v2.cache"
    monkeypatch.chdir(tmp_path)
    assert open_folder("pets.v2").train.path == data.path
    monkeypatch.setenv("HOME", str(tmp_path))
    assert open_folder(path, cache="~/my/own").train.path.parent == tmp_path / "my" / "own"
    monkeypatch.setenv("DISTILLKIT_CACHE", str(tmp_path / "elsewhere"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert open_folder(path).train.path.parent == tmp_path / "elsewhere"
    monkeypatch.setattr(shutil, "disk_usage", lambda where: shutil._ntuple_diskusage(10**9, 10**9, 1000))
    words = r"^\[Errno 28\] .*1.89 kB to .*full.*1 kB are free\); give cache=, a folder with enough space"
    refused(lambda: open_folder(path, cache=tmp_path / "full"), OSError, words)
    (tmp_path / "file").write_text("", encoding="utf-8")
    words = rf"^\[Errno 17\] cannot write a cache of 1.89 kB to {tmp_path}/file \(File exists\); give cache="
    refused(lambda: open_folder(path, cache=tmp_path / "file"), OSError, words)


def test_open_folder_refuses_what_load_folder_refuses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = made(tmp_path / "pets")
    made(path / "deeper", each=2, shape=(4, 4, 3))
    (path / "cat" / "9.png").write_bytes(b"no picture")
    refused(lambda: open_folder(path, size=4, cache=tmp_path / "cache"), ValueError, r"9\.png")
    (path / "cat" / "9.png").unlink()
    open_folder(path, size=(9, 7), cache=tmp_path / "cache")  # a cache of the first picture's own shape
    for load in (load_folder, partial(open_folder, cache=tmp_path / "cache")):
        refused(partial(load, path), ValueError, "4 pictures without the .*give size=")
    refused(lambda: open_folder(tmp_path / "nowhere"), FileNotFoundError, "no folder")
    mixed = made(tmp_path / "mixed")
    made(mixed / "deeper", each=2, shape=(9, 7))
    open_folder(mixed, channels=3, cache=tmp_path / "cache")
    refused(lambda: open_folder(mixed, cache=tmp_path / "cache"), ValueError, "4 pictures without the 3 channels")
    (mixed / "none").mkdir()  # a complete cache does not hide what is wrong with the folder
    call = partial(open_folder, mixed, channels=3, cache=tmp_path / "cache")
    refused(call, FileNotFoundError, "- 1 missing pictures .*: mixed/none")
    (mixed / "none").rmdir()
    with monkeypatch.context() as patch:  # pictures that changed after they were checked
        patch.setattr(_picture_list.PictureList, "require_readable", lambda *_, **__: None)
        cases = (path, r"is \[3, 9, 7\] .*deeper/.* is \[3, 4, 4\]; give size="), (mixed, "channels=1 or")
        for folder, words in cases:
            for load in (load_folder, partial(open_folder, cache=tmp_path / "other")):
                refused(partial(load, folder), ValueError, f"pictures differ: .*{words}")
    (content := tmp_path / "content").mkdir()
    for part in ("train", "val"):
        made(content / part, each=9, shift=1000 * len(part))
    call = partial(open_folder, made(tmp_path / "all"), cache=tmp_path / "cache", hold_out="content")
    refused(lambda: call(test_fraction=1 - 1e-9), ValueError, "^cannot measure a normalization .*give normalization=$")
    options: dict[str, Any] = {"hold_out": "content", "test_fraction": 0.5, "normalization": HALF}
    require_same(open_folder(content, cache=tmp_path / "cache", **options), load_folder(content, **options))


def test_components_explain_how_to_read_stored_images(pets: Path, tmp_path: Path) -> None:
    data = open_folder(pets, cache=tmp_path).train
    words = r"must be in memory.*data\.read\(indices\).*all 10 with `data.read\(\)` \(7.56 kB as floats\)"
    for images in (data, Subset(data, [0, 1]), DataLoader(data)):
        refused(partial(as_set, images, name="real"), TypeError, rf"^real {words}")
    refused(lambda: LabeledImages.from_dataset(Subset(data, [0])), TypeError, f"^dataset {words}")
    refused(lambda: data.images, AttributeError, "the images of this StoredImages are in a file: read a part")
    assert as_set(data.read([0, 1])).info == data.info


def test_clients_of_a_stored_set_read_nothing(pets: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = open_folder(pets, cache=tmp_path).train
    monkeypatch.setattr(caches.PixelFile, "read", None)
    held = clients(data, partition.iid(data.labels, 3))
    assert [len(client) for client in held] == [4, 3, 3]
    assert held[1].info == {**data.info, "client": 1, "clients": 3}
    assert torch.equal(torch.cat([client.digests for client in held]).unique(dim=0), data.digests.unique(dim=0))


def test_invalid_changes_of_a_stored_set_are_refused(pets: Path, tmp_path: Path) -> None:
    data = open_folder(pets, cache=tmp_path).train
    refused(lambda: data.replace(images=1, a=1), TypeError, "replace takes labels, .*, got a, images; the pic")
    refused(lambda: data.replace(num_classes=1), ValueError, "below num_classes=1")
    refused(lambda: data.replace(labels=data.labels[:3]), ValueError, "one entry per image: got 3 for 10 images")
    refused(lambda: data.replace(normalization=Normalization([0.5, 0.5], [1.0, 1.0])), ValueError, "2 channels|has 2")
    refused(lambda: data.replace(columns={"user": torch.arange(3)}), ValueError, "column 'user' must have 10 rows")
    rows = data.replace(labels=torch.eye(2)[data.labels])
    assert (rows.counts().tolist(), len(rows[:0].read())) == ([5, 5], 0)
    assert rows[torch.tensor([8])].read().labels.tolist() == [[0.0, 1.0]]


@pytest.mark.parametrize(("shape", "dtype"), [((6, 5, 3), np.uint8), ((6, 5), np.uint8), ((6, 5, 1), np.float64)])
@pytest.mark.parametrize(("size", "channels"), [(None, None), (4, None), (None, 3), (3, 1)])
def test_a_stored_npz_equals_the_loaded_one(tmp_path: Path, shape: Any, dtype: Any, size: Any, channels: Any) -> None:
    path = tmp_path / "noise.npz"
    np.savez_compressed(path, **npz_arrays(shape, dtype, 70, val=True))
    options = {"size": size, "channels": channels, "normalization": HALF}
    opened_, loaded = open_npz(path, cache=tmp_path / "cache", **options), load_npz(path, **options)
    require_same(opened_, loaded, images=size is None)  # repeated grey, and floats that were bytes, are exact, too
    for part in ("train", "test", "validation"):
        one, other = getattr(opened_, part).read(), getattr(loaded, part)
        assert float((one.pixels() - other.pixels()).abs().max()) <= 1 / 510 + 1e-6
    assert opened_.train.path == open_npz(path, cache=tmp_path / "cache", **options).train.path
    np.savez_compressed(path, **{key: held[::-1] for key, held in npz_arrays(shape, dtype, 70, val=True).items()})
    assert not torch.equal(open_npz(path, cache=tmp_path / "cache", **options).test.read().images, loaded.test.images)


def test_an_npz_may_have_headers_of_version_2(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "noise.npz"
    monkeypatch.setenv("DISTILLKIT_CACHE", str(tmp_path / "cache"))
    with zipfile.ZipFile(path, "w") as archive:
        for name, array in arrays().items():
            with archive.open(f"{name}.npy", "w") as file:
                np.lib.format.write_array(file, array, version=(2, 0))
    stored = open_npz(path, normalization=HALF)
    require_same(stored, load_npz(path, normalization=HALF))
    assert stored.train.path.parent == tmp_path / "cache"


def test_an_npz_that_cannot_be_streamed_is_refused(tmp_path: Path) -> None:
    path, cache = tmp_path / "noise.npz", tmp_path / "cache"
    good = arrays()

    def rejected(match: str, **changes: Any) -> None:
        np.savez_compressed(path, **{k: v for k, v in {**good, **changes}.items() if v is not None})
        refused(lambda: open_npz(path, cache=cache), ValueError, match)

    for name in ("train", "test"):
        rejected(f"{name}_images of .* Fortran", **{f"{name}_images": np.asfortranarray(good[f"{name}_images"])})
    gray = {f"{name}_images": np.asfortranarray(good[f"{name}_images"][..., 0]) for name in ("train", "test")}
    rejected("train_images of .* Fortran", **gray)
    rejected(r"val_images has pictures of \[1, 6, 5\] .* \[3, 6, 5\]; give", val_images=np.zeros((3, 6, 5), np.uint8))
    rejected(r"val_images has pictures of \[3, 7, 5\].*; give size=", val_images=np.zeros((3, 7, 5, 3), np.uint8))
    np.savez_compressed(path, **good)
    data = bytearray(path.read_bytes())
    data[2000:2100] = bytes(100)
    path.write_bytes(data)
    refused(lambda: open_npz(path, cache=cache), ValueError, "is damaged")
    refused(lambda: open_npz(tmp_path / "nothing.npz"), FileNotFoundError, "expected an .npz")


def test_pictures_that_exceed_memory_are_refused_before_reading(
    pets: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pages = {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": 2}  # the twelve pictures take 9,072 bytes
    monkeypatch.setattr(os, "sysconf", pages.__getitem__)
    words = r"12 pictures of \[3, 9, 7\] take 9.07 kB as floats, .* 8.19 kB of memory; use open_folder\(\.\.\.\)"
    refused(lambda: load_folder(pets), ValueError, words)
    table = {"file": [f"{name}/{i}" for name in ("cat", "dog") for i in range(6)], "label": ["a"] * 12}
    refused(lambda: load_table(table, folder=pets), ValueError, r"12 pictures .*; use open_table\(\.\.\.\)")
    open_folder(pets, cache=tmp_path)
    with monkeypatch.context() as elsewhere:
        elsewhere.delattr(os, "sysconf")  # where nobody says how much there is, nothing is refused
        assert len(load_folder(pets).train) > 0
    pages["SC_PHYS_PAGES"] = 4
    with pytest.warns(UserWarning, match="16.4 kB of memory; use open_folder"):
        load_folder(pets)
    pages |= {"SC_PAGE_SIZE": 9072, "SC_PHYS_PAGES": 2}  # just half
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load_folder(pets)
