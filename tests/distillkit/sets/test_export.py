"""Exported sets come back: an `.npz` to the bit, a folder of PNGs up to rounding, and say what is lost."""

from __future__ import annotations

import csv
import hashlib
import json
import os
import shutil
import warnings
import zipfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torchvision.datasets import ImageFolder
from torchvision.transforms import Compose, Grayscale, ToTensor

from distillkit import LabeledImages, Normalization
from distillkit.data import DATASETS, load_folder, load_npz, load_set, load_table, open_dataset, open_folder, open_npz
from distillkit.labels import StoredLabels
from distillkit.normalization import IDENTITY, ZCA
from distillkit.rng import derive
from distillkit.sets import Tiles
from distillkit.sets._export import _FORMAT, _digest
from tests.refused import refused
from tests.stored import require_same_set


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_a_folder_holds_the_same_pictures_in_any_precision(dtype: torch.dtype, tmp_path: Path) -> None:
    data = LabeledImages(torch.rand(6, 1, 9, 9, generator=derive(0)).to(dtype), torch.arange(6) % 3, num_classes=3)
    pictures = [LabeledImages.load(one.export(tmp_path / name)).images for name, one in (
        ("a", data), ("b", data.to(dtype=torch.float32)))]  # fmt: skip
    assert torch.equal(*pictures)
    forms = [json.loads((tmp_path / name / "set.json").read_text(encoding="utf-8")) for name in "ab"]
    assert forms[0]["largest_error"] == pytest.approx(forms[1]["largest_error"], abs=1e-7)


def some(**changes: object) -> LabeledImages:
    pixels = torch.rand(6, 1, 4, 4, generator=derive(0))
    return LabeledImages(pixels, torch.arange(6) % 3, num_classes=3).replace(**changes)


@pytest.mark.parametrize(
    ("names", "folders"),
    [
        ((), "0 1 2"),
        (("Ant (1)", "b_d", "bd.d"), "Ant (1)|b_d|bd.d"),
        (("Coat", "T-shirt, /top", "U"), "0_Coat 1_T-shirt_top 2_U"),
        (("B", "a", "b"), "0_B 1_a 2_b"),
        (("a", "B", "c"), "0_a 1_B 2_c"),
        (("Bee", "ant", "cat"), "0_Bee 1_ant 2_cat"),
        (("Ape", "ape", "zoo"), "0_Ape 1_ape 2_zoo"),
        (("a.", "b", "c"), "0_a. 1_b 2_c"),
        ((".a", "b", "c"), "0_.a 1_b 2_c"),
    ],
)
def test_image_folder_reads_the_class_order(tmp_path: Path, names: tuple[str, ...], folders: str) -> None:
    data = some(class_names=names)
    read = ImageFolder(data.export(tmp_path / "out"), Compose([Grayscale(), ToTensor()]))
    order = [int(Path(path).stem) for path, _ in read.samples]
    assert [label for _, label in read.samples] == data.labels[order].tolist()
    assert torch.allclose(torch.stack([image for image, _ in read]), data.images[order], atol=1 / 500)
    assert read.classes == folders.split("|" if "|" in folders else None)


@pytest.mark.parametrize("count", [10, 11])
def test_files_and_folders_sort_as_numbers(count: int, tmp_path: Path) -> None:
    data = LabeledImages(torch.rand(count, 1, 2, 2), torch.arange(count))
    named = data.replace(class_names=[f"a/{k}" for k in range(count)])
    wanted = [f"{k:0{len(str(count - 1))}d}" for k in range(count)]
    for one, endings in ((data, [""] * count), (named, [f"_a_{k}" for k in range(count)])):
        read = ImageFolder(one.export(tmp_path / str(len(one.class_names))))
        assert read.classes == [k + ending for k, ending in zip(wanted, endings)]
        assert [Path(path).stem for path, _ in read.samples] == wanted


def test_labels_are_in_a_table(tmp_path: Path) -> None:
    rows = torch.tensor([[0.7, 0.2, 0.1]] * 5 + [[0.123456789, 0.3, 0.576543211]])
    cases = (rows, ("ant", "bee", "cat"), [1, 0, 0, 0, 0, 2]), (rows.argmax(1), (), [0] * 5 + [2])
    for labels, names, marks in cases:
        columns = {"class": torch.tensor(marks)} if names else {}
        folder = some(labels=labels, class_names=names, columns=columns).export(tmp_path / str(len(names)))
        table = list(csv.DictReader((folder / "labels.csv").open(encoding="utf-8")))
        for i, (row, c) in enumerate(zip(table, marks, strict=True)):
            file = f"{names[c] if names else c}/{i}.png"
            wanted = {"file": file, "label": str(c)} | ({"class": names[c]} if names else {})
            wanted["blake2b"] = hashlib.blake2b((folder / file).read_bytes(), digest_size=16).hexdigest()
            wanted |= {f"p{k}": str(one) for k, one in enumerate(rows[i].tolist())} if names else {}
            assert list(row.items()) == list(wanted.items())


def test_an_npz_is_readable_with_numpy_alone(tmp_path: Path) -> None:
    space = Normalization([0.4], [0.3])
    data = some(class_names=("ant", "bee", "cat")).renormalize(space)
    with np.load(data.export(tmp_path / "a.npz"), allow_pickle=False) as file:
        pixels = file["images"] * file["std"][:, None, None] + file["mean"][:, None, None]
        assert np.allclose(pixels, data.pixels(), atol=1e-6)
        assert file["class_names"].tolist() == ["ant", "bee", "cat"]
        assert file["labels"].tolist() == data.labels.tolist()


def test_a_folder_says_what_it_leaves_out(tmp_path: Path) -> None:
    whitened = some(images=some().images.repeat(4, 1, 1, 1), labels=torch.arange(24) % 3)
    whitened = whitened.renormalize(Normalization([0.0], [1.0], ZCA.fit(whitened.images)))
    data = whitened.replace(columns={"class": torch.zeros(24), "user": torch.zeros(24)})
    with pytest.warns(UserWarning, match="leave out the column 'class'; the column 'user'; the whitening"):
        loaded = LabeledImages.load(data.export(tmp_path / "a"))
    assert loaded.normalization == IDENTITY
    assert torch.allclose(loaded.images, whitened.pixels(), atol=1 / 500)
    assert LabeledImages.load(data.export(tmp_path / "a.npz")).normalization == data.normalization
    wide = torch.tensor([1.3, 1.003, -0.003, -0.001, 0, 0.5, 1, 1.001]).repeat(6, 2).view(6, 1, 4, 4)
    with pytest.warns(UserWarning, match=r"leave out 37\.5% of the .* and are clipped; the column 'user'\. An \.npz"):
        some(images=wide, columns={"user": torch.zeros(6)}).export(tmp_path / "b")
    form = json.loads((tmp_path / "b" / "set.json").read_text(encoding="utf-8"))
    assert form["largest_error"] == pytest.approx(0.3, abs=1e-3)
    assert form["left_out"] == ["37.5% of the pixels, which lie outside [0, 1] and are clipped", "the column 'user'"]


def test_wrong_targets_are_refused(tmp_path: Path) -> None:
    some()[:3].export(tmp_path / "a")
    (tmp_path / "a/0/0.png").rename(tmp_path / "a/0/.hidden")
    (tmp_path / "file").write_text("a", encoding="utf-8")
    for taken in ("a", "a/0", "file"):
        refused(partial(some().export, tmp_path / taken), FileExistsError, "is not an empty folder")
    (tmp_path / "empty.v2").mkdir()
    assert len(LabeledImages.load(some().export(tmp_path / "empty.v2"))) == 6
    (tmp_path / "a.csv").touch()
    for name in ("a.png", "a.NPZ", "a.csv"):
        with pytest.raises(ValueError, match=f"path must end in .npz, or be a folder without suffix, got '{name}'"):
            some().export(tmp_path / name)
    for parent in (tmp_path / "gone", tmp_path / "file"):
        path = os.path.relpath(parent / "a")
        words = f"cannot write {path}: the folder {parent} does not exist"
        refused(lambda path=path: some().export(path), FileNotFoundError, words)
    two = LabeledImages(torch.rand(3, 2, 4, 4), torch.arange(3))
    refused(lambda: two.export(tmp_path / "two"), ValueError, r"have 1 or 3 channels, got 2; export to an \.npz")
    assert LabeledImages.load(two.export(tmp_path / "two.npz")).shape == (2, 4, 4)
    column = some().replace(columns={"weight": torch.ones(len(some()), dtype=torch.bfloat16)})
    both = column.to(dtype=torch.bfloat16)
    for lacking, name in ((some().to(dtype=torch.bfloat16), "images"), (both, "images"), (column, ".*weight")):
        refused(partial(lacking.export, tmp_path / "half.npz"), ValueError, f"NumPy has no bfloat16, which {name} has")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a", "a.csv", "empty.v2", "file", "two.npz"]


@pytest.mark.parametrize("form", ["a", "a.npz"])
@pytest.mark.parametrize("error", [OSError, MemoryError])
def test_a_failed_export_leaves_nothing(
    form: str, error: type[Exception], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise error("No space left on device")

    monkeypatch.setattr(os if form == "a" else np, "replace" if form == "a" else "savez_compressed", full)
    refused(lambda: some().export(tmp_path / form), error, "No space left")
    assert not list(tmp_path.iterdir())


def edit(file: Path, old: str, new: str) -> None:
    text = file.read_text(encoding="utf-8")
    assert old in text
    file.write_text(text.replace(old, new, 1), encoding="utf-8")


def swap(folder: Path) -> None:
    (folder / "ant/0.png").rename(folder / "x")
    (folder / "ant/3.png").rename(folder / "ant/0.png")
    (folder / "x").rename(folder / "ant/3.png")


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "empty table": (lambda f: (f / "labels.csv").write_bytes(b""), r"labels\.csv is damaged, changed"),
    "no table": (lambda f: (f / "labels.csv").unlink(), r"without its labels\.csv"),
    "folder as table": (lambda f: (f / "labels.csv").rename(f / "a") and (f / "labels.csv").mkdir(), "without its"),
    "other label": (lambda f: edit(f / "labels.csv", "0.png,0,", "0.png,1,"), r"labels\.csv is damaged, changed"),
    "extra picture": (lambda f: shutil.copy(f / "ant/0.png", f / "bee/9.png"), r"bee/9\.png does not belong"),
    "extra picture above": (lambda f: shutil.copy(f / "ant/0.png", f / "9.PNG"), r"9\.PNG does not belong"),
    "extra link": (lambda f: (f / "cat/a.txt").symlink_to("no file"), r"a\.txt does not belong"),
    "extra class": (lambda f: shutil.copytree(f / "ant", f / "dog"), r"0\.png does not belong .*2 such files"),
    "picture deleted": (lambda f: (f / "cat/5.png").unlink(), r"/a/cat/5\.png is missing"),
    "pictures swapped": (swap, r"ant/0\.png is damaged, changed"),
    "other mean": (lambda f: edit(f / "set.json", "0.25", "0.5"), r"set\.json is damaged, changed"),
    "no epsilon": (lambda f: edit(f / "set.json", '"epsilon": 8.0', ""), r"set\.json is damaged, changed"),
    "no format": (lambda f: edit(f / "set.json", f'"format": "{_FORMAT}",', ""), r"json .*its format is not"),
    "no digests": (lambda f: edit(f / "set.json", '"digests"', '"digest"'), r"set\.json .* KeyError\('digests'\)"),
    "no digest": (lambda f: edit(f / "set.json", '"set.json"', '"set"'), r"set\.json .* KeyError\('set\.json'\)"),
    "no table digest": (lambda f: edit(f / "set.json", '"labels.csv"', '"labels"'), r"labels\.csv is .* KeyError"),
    "deep JSON": (lambda f: (f / "set.json").write_text("[" * 10**5, encoding="utf-8"), r"set\.json is damaged"),
    "a list": (lambda f: (f / "set.json").write_text("[1]", encoding="utf-8"), r"set\.json is damaged"),
    "set.json folder": (lambda f: (f / "set.json").rename(f / "a") and (f / "set.json").mkdir(), r"no set\.json, so"),
}  # fmt: skip


def soft() -> LabeledImages:
    rows = torch.tensor([[0.7, 0.2, 0.1], [0.1, 0.5, 0.4], [0.1, 0.2, 0.7]] * 2)
    data = some(labels=rows, class_names=("ant", "bee", "cat"), info={"epsilon": 8.0})
    return data.renormalize(Normalization([0.25], [0.5]))


@pytest.mark.parametrize("kind", DAMAGES)
def test_a_changed_folder_is_refused_and_the_file_named(kind: str, tmp_path: Path) -> None:
    folder = soft().export(tmp_path / "a")
    damage, message = DAMAGES[kind]
    damage(folder)
    refused(lambda: LabeledImages.load(folder), (ValueError, FileNotFoundError), message)
    for read in (load_folder, open_folder, load_set):
        words = r"LabeledImages\.load|load_folder"
        refused(lambda read=read: read(folder), (ValueError, FileNotFoundError), words)


@pytest.mark.parametrize(
    ("file", "old", "new", "words"),
    [
        ("labels.csv", "ant/0.png", "../0.png", r"labels\.csv is damaged: '\.\./0\.png' is not in the folder"),
        ("labels.csv", "ant/0.png", "a" * 140_000, r"labels\.csv is damaged, .* Error\('field larger"),
        ("labels.csv", "blake2b", "md5", r"labels\.csv is damaged, .* KeyError\('blake2b'\); restore it"),
        ("set.json", '"float32"', '"float33"', r"set\.json is damaged, .* AttributeError"),
        ("set.json", '"float32"', "null", r"set\.json is damaged, .* TypeError"),
        ("set.json", _FORMAT, "distillkit.LabeledImages.export/1", r"set\.json .*its format is not"),
        ("set.json", '"labels"', '"lables"', r"set\.json is damaged, .* KeyError\('labels'\)"),
    ],
)
def test_files_with_adapted_digests_are_refused(file: str, old: str, new: str, words: str, tmp_path: Path) -> None:
    """Digests have no key, so whoever changes a folder can adapt them."""
    folder = soft().export(tmp_path / "a")
    (folder / "ant/0.png").rename(tmp_path / "0.png")
    edit(folder / file, old, new)
    form = json.loads((folder / "set.json").read_text(encoding="utf-8"))
    form["digests"] = {"labels.csv": _digest((folder / "labels.csv").read_bytes())}
    form["digests"]["set.json"] = _digest({key: form[key] for key in form if key != "digests"})
    (folder / "set.json").write_text(json.dumps(form), encoding="utf-8")
    refused(lambda: LabeledImages.load(folder), ValueError, words)


def test_an_exported_folder_keeps_its_neighbours_and_becomes_pictures_on_request(tmp_path: Path) -> None:
    folder = soft().export(tmp_path / "train")
    (folder / ".thumbnails").mkdir()
    for name in ("README.md", ".DS_Store", "ant/._0.png", ".thumbnails/0.png"):
        (folder / name).write_text("text", encoding="utf-8")
    form = json.loads((folder / "set.json").read_text(encoding="utf-8"))
    (folder / "set.json").write_text(json.dumps(dict(reversed(form.items()))), encoding="utf-8")
    for read in (LabeledImages.load, load_set):
        require_same_set(read(folder), soft(), images=False)
        require_same_set(read(Path(os.path.relpath(folder))), soft(), images=False)
    refused(lambda: load_folder(tmp_path), ValueError, rf"exported LabeledImages.*LabeledImages\.load\('{folder}'\)")
    (folder / "labels.csv").unlink()
    (folder / "set.json").write_text('{"format": "that of another program"}', encoding="utf-8")
    assert len(load_folder(folder, test_fraction=0).train) == 6
    (folder / "set.json").unlink()
    for other in (b"\xff", b"file,label\n", b""):
        (folder / "labels.csv").write_bytes(other)
        plain = load_set(folder)
        assert (plain.labels.tolist(), plain.normalization) == ([0, 0, 1, 1, 2, 2], IDENTITY)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"column.a": None}, r"do not belong to the set: column\.a"),
        ({"other": np.zeros(2)}, "do not belong to the set: other"),
        ({"mean": np.array([0.3])}, "'mean' contradicts its array 'set'"),
        ({"std": None}, "'std' contradicts"),
        ({"class_names": np.array(["ant", "bee", "dog"])}, "'class_names' contradicts"),
        ({"labels": np.zeros(5)}, r"c\.npz is damaged"),
        ({"set": None}, "is not an exported LabeledImages: it holds class_names"),
        ({"set": np.array("[]")}, "its format is not"),
        ({"set": np.array('{"format": "distillkit.LabeledImages.export/1"}')}, "its format is not"),
        ({"other": np.array([None])}, "damaged.*allow_pickle=False"),
        (
            dict.fromkeys(["images", "labels", "mean", "std", "class_names", "column.a", "set"]),
            "it holds nothing; read",
        ),
    ],
)
def test_a_changed_npz_is_refused(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    data = soft().replace(columns={"a": torch.arange(6)})
    with np.load(data.export(tmp_path / "a.npz"), allow_pickle=False) as file:
        arrays = {name: file[name] for name in file.files} | change
    np.savez(tmp_path / "c.npz", **{k: v for k, v in arrays.items() if v is not None})
    refused(lambda: LabeledImages.load(tmp_path / "c.npz"), ValueError, message)


def test_a_damaged_npz_is_refused_and_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = soft().export(tmp_path / "a.npz")
    content = path.read_bytes()
    with zipfile.ZipFile(tmp_path / "b.npz", "w") as file:
        file.writestr("images.npy", b"\x93NUMPY\x01\x00\x0b\x00{'descr': (")
    for damaged in (b"", content[: len(content) // 2], content[:-9], (tmp_path / "b.npz").read_bytes()):
        path.write_bytes(damaged)
        refused(lambda: LabeledImages.load(path), ValueError, f"^{path} is damaged, changed .*; restore it or export")
    monkeypatch.setattr(np, "load", lambda *_, **__: bytearray(2**62))  # more than the memory
    refused(lambda: LabeledImages.load(path), MemoryError, "")


def whitened() -> LabeledImages:
    data = LabeledImages(torch.rand(12, 3, 4, 2, generator=derive(3)), torch.arange(12) % 3)
    return data.renormalize(Normalization(COLOUR.mean, COLOUR.std, ZCA.fit(data.images)))


COLOUR = Normalization([0.4, 0.5, 0.6], [0.2, 0.3, 0.4], measured=True)
ODD_NAMES = ("T-shirt/top", "Coat", 'a,"b"')
FORMS: dict[str, Callable[[], LabeledImages]] = {
    "soft": soft,
    "one row": lambda: soft()[:1],
    "with gradients": lambda: some(images=torch.rand(6, 1, 4, 4).requires_grad_()),
    "empty": lambda: some()[:0],
    "empty rows": lambda: soft()[:0],
    "wide colour": lambda: LabeledImages(torch.rand(3, 3, 2, 5), torch.arange(3), normalization=COLOUR),
    "whitened": whitened,
    "tiles": lambda: Tiles(2).pack(soft()[:4]),
    "columns": lambda: some(columns={"class": torch.arange(6) % 3, "logits": torch.rand(6, 3, dtype=torch.float64)}),
    "half rows": lambda: some(labels=torch.rand(6, 3).half(), class_names=ODD_NAMES, info={"steps": 3}),
    "double rows": lambda: some(labels=torch.rand(6, 3, dtype=torch.float64), images=torch.rand(6, 3, 1, 4)),
    "joined": lambda: LabeledImages.concatenate([soft(), soft().replace(info={"client": 1})]),
    "multi-label": lambda: some(labels=(torch.rand(6, 3) > 0.5).float()),
    "many": lambda: LabeledImages(torch.rand(12, 1, 2, 2), torch.rand(12, 12), class_names=[str(k) for k in range(12)]),
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_comes_back_from_every_file(form: str, tmp_path: Path) -> None:
    """An `.npz` to the bit, a folder up to half a step of 8 bits, and to the bit the second time."""
    data = FORMS[form]()
    for path in (data.save(tmp_path / "a.safetensors"), data.export(tmp_path / "a.npz").rename(tmp_path / "b.NPZ")):
        require_same_set(LabeledImages.load(path), data)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        loaded = LabeledImages.load(data.export(tmp_path / "a"))
    lost = {
        "tiles": ["the stored form of 4 tiled images, which are decoded"],
        "whitened": ["the whitening"],
        "columns": ["the column 'class'", "the column 'logits'"],
    }.get(form, [])
    words = f"PNG pictures leave out {'; '.join(lost)}. An .npz or .safetensors file keeps everything"
    assert [str(one.message) for one in said] == [words] * bool(lost)
    wanted = data.replace(info=data.info, columns={}, images=data.images)  # decoded, if it has tiles
    wanted = wanted.renormalize(Normalization([0], [1], measured=True)) if form == "whitened" else wanted
    require_same_set(loaded, wanted, images=False)
    error = float((loaded.pixels() - data.pixels()).abs().max()) if len(data) else 0.0
    assert error <= 1 / 510 + 1e-6
    told = json.loads((tmp_path / "a" / "set.json").read_text(encoding="utf-8"))
    assert (told["largest_error"], told["left_out"]) == (pytest.approx(error, abs=1e-6), lost)
    require_same_set(LabeledImages.load(loaded.export(tmp_path / "b")), loaded)
    for one in (tmp_path / "a").rglob("*.png"):
        assert one.read_bytes() == (tmp_path / "b" / one.relative_to(tmp_path / "a")).read_bytes()


TABLE = {"file": ["a.png"], "label": ["b"]}
PATHS: dict[str, Callable[[Any], object]] = {
    "save path": lambda p: some().save(p),
    "export path": lambda p: some().export(p),
    "LabeledImages.load path": LabeledImages.load,
    "load_set source": load_set,
    "load_folder path": load_folder,
    "open_folder path": open_folder,
    "load_npz path": load_npz,
    "open_npz path": open_npz,
    "load_table table": load_table,
    "load_table folder": lambda p: load_table(TABLE, folder=p),
    "cifar10c path": DATASETS["cifar10c"].load,
    "femnist path": DATASETS["femnist"].load,
    "celeba path": DATASETS["celeba"].load,
    "open_dataset root": lambda p: open_dataset("tinyimagenet", root=p),
    "StoredLabels.load path": StoredLabels.load,
    "StoredLabels.save path": StoredLabels(torch.zeros(1, 2, 3).half(), None, (0,), 3, None, 1.0, False, 0, {}).save,
}


@pytest.mark.parametrize("name", PATHS)
def test_wrong_paths_are_named(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    argument = name.split()[1]
    for wrong in (None, 3, 1.5, b"a", ["a"], some())[argument in ("folder", "root") :]:
        with pytest.raises(TypeError, match=rf"^{argument} must be a path, as a string or a pathlib\.Path, got"):
            PATHS[name](wrong)
    for wrong in ("", "a\0b", "~nobody-of-this-name/a")[argument == "root" :]:
        refused(partial(PATHS[name], wrong), ValueError, f"^{argument} must be")
    (tmp_path / "paths.csv").write_text("file,label\n", encoding="utf-8")
    (tmp_path / "empty.npz").touch()
    (tmp_path / "list.npz").write_text("[]", encoding="utf-8")
    np.save(tmp_path / "array.npy", np.zeros(3))
    (tmp_path / "array.npy").rename(tmp_path / "array.npz")
    for wrong in ("paths.csv", "empty.npz", "list.npz", "array.npz", "gone/a.npz", "gone/a", "."):
        if name == "export path" and wrong.endswith(".npz") and "gone" not in wrong:
            continue  # replaces the file
        if "save" in name and wrong not in (".", "gone/a"):
            continue
        message = "gone|missing|no file|lacks|folder|damaged|is not|must be|not empty|not exist|not an? |must end in"
        with pytest.raises((ValueError, OSError), match=message) as caught:
            PATHS[name](wrong)
        assert ".tmp" not in str(caught.value)
