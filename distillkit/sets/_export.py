"""Export of sets to `.npz` files and folders of PNG pictures, which programs without distillkit can read."""

from __future__ import annotations

import csv
import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from distillkit._utils.extras import optional
from distillkit._utils.files import atomic_replace
from distillkit._utils.user_warnings import warn
from distillkit.normalization import Normalization

_FORMAT = "distillkit.LabeledImages.export/2"
_STEP = 1 / 255
_DIGESTS = "blake2b"
_RESTORE = (
    "restore it or export the set again; to read only pictures, delete set.json and labels.csv and use "
    "distillkit.data.load_folder"
)
_FOR_READERS = ("mean", "std", "class_names")
"""JSON values that an `.npz` also contains as separate arrays, for programs that do not know the array `set`."""

Tensors = dict[str, Tensor]


def write_npz(path: Path, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
    """Write the parts of a set to an `.npz` file, without loss."""
    if lacking := [name for name, tensor in tensors.items() if tensor.dtype == torch.bfloat16]:
        raise ValueError(f"NumPy has no bfloat16, which {lacking[0]} has; export data.to(dtype=torch.float32)")
    arrays: dict[str, Any] = {name: tensor.detach().cpu().numpy() for name, tensor in tensors.items()}
    form = {"format": _FORMAT, "arrays": sorted(arrays), **facts}
    arrays |= {name: np.asarray(facts[name]) for name in _FOR_READERS if name in facts}
    arrays["set"] = np.asarray(json.dumps(form))
    with atomic_replace(path) as temporary, temporary.open("wb") as file:
        np.savez_compressed(file, allow_pickle=False, **arrays)


def read_npz(path: Path) -> tuple[Tensors, dict[str, Any]]:
    """Read the parts of a set (see `LabeledImages.parts`) from an `.npz` file that `write_npz` wrote."""
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist; it should hold an exported LabeledImages")
    with _explain_damage(path), np.load(path, allow_pickle=False) as file:
        arrays = {name: file[name] for name in file.files}
    if "set" not in arrays:
        raise ValueError(
            f"{path} is not an exported LabeledImages: it holds {', '.join(sorted(arrays)) or 'nothing'}; read "
            "training and test arrays with distillkit.data.load_npz"
        )
    with _explain_damage(path):
        facts = _checked_facts(json.loads(str(arrays.pop("set"))))
        copies = {name: arrays.pop(name, None) for name in _FOR_READERS}
        for name, copy in copies.items():
            if (None if copy is None else copy.tolist()) != facts.get(name):
                raise ValueError(f"its array {name!r} contradicts its array 'set'")
        if differing := sorted(set(arrays) ^ set(facts["arrays"])):
            raise ValueError(f"arrays are missing, or do not belong to the set: {', '.join(differing)}")
        if "stored" in arrays:  # of tiled images, which are decoded for other programs
            arrays["images"] = arrays.pop("stored")
        return {name: torch.from_numpy(array) for name, array in arrays.items()}, facts


def write_picture_folder(
    path: Path, pixels: Tensor, labels: Tensor, classes: Tensor, facts: Mapping[str, Any], lost: list[str]
) -> None:
    """Write a set as PNG pictures in one folder per class, with `labels.csv` and `set.json`."""
    target = Path(os.path.abspath(path))
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise FileExistsError(f"{path} exists and is not an empty folder; remove it, or give another path")
    if not target.parent.is_dir():
        raise FileNotFoundError(f"cannot write {path}: the folder {target.parent} does not exist; create it first")
    labels = labels.detach().cpu()
    pictures, error, lost = _as_pictures(pixels, lost)
    folders = _class_folders(facts.get("class_names", ()), facts["num_classes"])
    rows, width = classes.detach().cpu(), len(str(len(labels) - 1))
    files = [f"{folders[k]}/{i:0{width}d}.png" for i, k in enumerate(rows.tolist())]
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        digests = []
        for file, picture in zip(files, pictures):
            (temporary / file).parent.mkdir(parents=True, exist_ok=True)
            picture.save(temporary / file)
            digests.append(_digest((temporary / file).read_bytes()))
        temporary.mkdir(parents=True, exist_ok=True)
        _write_labels(temporary / "labels.csv", files, digests, rows, labels, facts.get("class_names", ()))
        form = {"format": _FORMAT, **facts, "shape": list(pixels.shape[1:]), "largest_error": error, "left_out": lost}
        form["labels"] = str(labels.dtype).removeprefix("torch.")
        form["digests"] = {"labels.csv": _digest((temporary / "labels.csv").read_bytes()), "set.json": _digest(form)}
        (temporary / "set.json").write_text(json.dumps(form, indent=2) + "\n", encoding="utf-8")
        os.replace(temporary, target)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _as_pictures(pixels: Tensor, lost: list[str]) -> tuple[list[Any], float, list[str]]:
    """Return pixels [N, C, H, W] as PIL pictures of 8 bits, with the largest error, and warn of all that is lost."""
    from PIL import Image

    if pixels.shape[1] not in (1, 3):
        raise ValueError(f"PNG pictures have 1 or 3 channels, got {pixels.shape[1]}; export to an .npz")
    pixels = pixels.detach().cpu().float()
    exported = (pixels.clamp(0, 1) * 255).round()
    outside = float(((pixels < -_STEP / 2) | (pixels > 1 + _STEP / 2)).float().mean()) if len(pixels) else 0.0
    error = float((exported / 255 - pixels).abs().max()) if len(pixels) else 0.0
    lost = [*([f"{outside:.1%} of the pixels, which lie outside [0, 1] and are clipped"] if outside else []), *lost]
    if lost:
        warn(f"PNG pictures leave out {'; '.join(lost)}. An .npz or .safetensors file keeps everything")
    arrays = exported.byte().permute(0, 2, 3, 1).numpy()
    return [Image.fromarray(one[..., 0] if one.shape[2] == 1 else one) for one in arrays], error, lost


def as_rows(
    pixels: Tensor, labels: Tensor, columns: Mapping[str, Tensor], facts: Mapping[str, Any], lost: list[str]
) -> Any:
    """Return a set as a `datasets.Dataset` with the columns `image`, `label` and those of the set."""
    datasets = optional("datasets", "data", "to_huggingface")
    if taken := {"image", "label"} & set(columns):
        raise ValueError(
            f"the columns image and label hold the set; rename {taken.pop()!r} by data.replace(columns=...)"
        )
    tensors = {name: one.detach().cpu() for name, one in {"label": labels, **columns}.items()}
    tensors = {name: one.float() if one.dtype == torch.bfloat16 else one for name, one in tensors.items()}
    types: dict[str, Any] = {"image": datasets.Image()}
    for name, one in tensors.items():
        types[name] = datasets.Value(str(one.dtype).removeprefix("torch."))
        for length in reversed(one.shape[1:]):
            types[name] = datasets.List(types[name], length)
    if labels.ndim == 1:
        names = facts.get("class_names") or [str(k) for k in range(facts["num_classes"])]
        types["label"] = datasets.ClassLabel(names=list(names))
    content = {"image": _as_pictures(pixels, lost)[0], **{name: one.tolist() for name, one in tensors.items()}}
    about = datasets.DatasetInfo(
        description=json.dumps({"format": _FORMAT, **facts}), features=datasets.Features(types)
    )
    return datasets.Dataset.from_dict(content, features=about.features, info=about)


def read_picture_folder(path: Path) -> tuple[Tensors, dict[str, Any]]:
    """Read the parts of a set (see `LabeledImages.parts`) from a folder that `write_picture_folder` wrote."""
    from PIL import Image

    if not (path / "set.json").is_file():
        raise FileNotFoundError(
            f"{path} has no set.json, so it is not a complete exported LabeledImages; read a folder of pictures with "
            "distillkit.data.load_folder"
        )
    with _explain_damage(path / "set.json"):
        facts = _checked_facts(json.loads((path / "set.json").read_text(encoding="utf-8")))
        digests = facts.pop("digests")
        if digests["set.json"] != _digest({"format": _FORMAT, **facts}):
            raise ValueError("it was changed after the export")
        shape, dtype = tuple(facts["shape"]), getattr(torch, facts["labels"])
        images = torch.empty(0, *shape, device="cpu")
    table = path / "labels.csv"
    if not table.is_file():
        raise FileNotFoundError(f"{path} is an exported set without its labels.csv; {_RESTORE}")
    with _explain_damage(table):
        if _digest(table.read_bytes()) != digests["labels.csv"]:
            raise ValueError("it was changed after the export")
        files, labels = _read_labels(table, dtype, facts["num_classes"])
    if extra := [file for file in _files_of_classes(path) if file not in files]:
        raise ValueError(f"{path / extra[0]} does not belong to the exported set ({len(extra)} such files); {_RESTORE}")
    pictures = []
    for file, digest in files.items():
        if not (inside := path / file).resolve().is_relative_to(path.resolve()):
            raise ValueError(f"{table} is damaged: {file!r} is not in the folder")
        if not inside.is_file():
            raise FileNotFoundError(f"{inside} is missing from the exported set; {_RESTORE}")
        with _explain_damage(inside):
            if _digest(inside.read_bytes()) != digest:
                raise ValueError("it was changed after the export")
            with Image.open(inside) as picture:
                array = np.array(picture.convert("L" if shape[0] == 1 else "RGB"))
            pictures.append(torch.from_numpy(array).reshape(*shape[1:], shape[0]).permute(2, 0, 1) / 255)
    images = torch.stack(pictures) if pictures else images
    return {"images": Normalization(facts["mean"], facts["std"]).encode(images), "labels": labels}, facts


def is_exported_folder(path: Path) -> bool:
    """Return whether a folder was written by `write_picture_folder`, even if its `set.json` is missing."""
    with suppress(ValueError, OSError, AttributeError, RecursionError):
        if json.loads((path / "set.json").read_text(encoding="utf-8")).get("format") == _FORMAT:
            return True
    with suppress(ValueError, OSError), (path / "labels.csv").open(encoding="utf-8", newline="") as file:
        return {"file", "label", _DIGESTS} <= set(next(csv.reader(file), []))
    return False


def _files_of_classes(path: Path) -> list[str]:
    """Return the visible files in sub-folders, and the pictures in the folder itself, as relative paths."""
    files = sorted(file.relative_to(path) for file in path.rglob("*") if not file.is_dir())
    visible = [file for file in files if not any(part.startswith(".") for part in file.parts)]
    return [file.as_posix() for file in visible if len(file.parts) > 1 or file.suffix.lower() == ".png"]


def _digest(content: bytes | Mapping[str, Any]) -> str:
    """Return the BLAKE2b hash of bytes or JSON values."""
    data = content if isinstance(content, bytes) else json.dumps(content, sort_keys=True).encode()
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def _class_folders(names: Sequence[str], num_classes: int) -> list[str]:
    """Return a folder name for each class, in the order of the classes.

    The alphabetical order of the folder names is the same.
    """
    width = len(str(num_classes - 1))
    if not names:
        return [f"{k:0{width}d}" for k in range(num_classes)]
    plain = all(re.fullmatch(r"\w([\w +().-]*[\w+)-])?", name) for name in names)
    folded = [name.casefold() for name in names]
    if plain and list(names) == sorted(names) and folded == sorted(set(folded)):
        return list(names)
    return [f"{k:0{width}d}_{re.sub(r'[^a-zA-Z0-9.-]+', '_', name)}" for k, name in enumerate(names)]


def _write_labels(
    path: Path, files: Sequence[str], digests: Sequence[str], classes: Tensor, labels: Tensor, names: Sequence[str]
) -> None:
    soft = labels.tolist() if labels.ndim == 2 else [[]] * len(files)
    columns = ["file", "label", *(["class"] if names else []), _DIGESTS]
    columns += [f"p{k}" for k in range(labels.shape[1])] if labels.ndim == 2 else []
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(columns)
        for name, digest, k, row in zip(files, digests, classes.tolist(), soft):
            writer.writerow([name, k, *([names[k]] if names else []), digest, *row])


def _read_labels(path: Path, dtype: torch.dtype, num_classes: int) -> tuple[dict[str, str], Tensor]:
    """Return the digest of each picture by file name, and the labels."""
    with path.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    files = {row["file"]: row[_DIGESTS] for row in rows}
    if dtype.is_floating_point:
        soft = [[float(row[f"p{k}"]) for k in range(num_classes)] for row in rows]
        return files, torch.tensor(soft, dtype=torch.float64, device="cpu").view(len(rows), num_classes).to(dtype)
    return files, torch.tensor([int(row["label"]) for row in rows], dtype=dtype, device="cpu")


def _checked_facts(form: Any) -> dict[str, Any]:
    if not isinstance(form, dict) or form.pop("format", None) != _FORMAT:
        raise ValueError(f"its format is not {_FORMAT!r}")
    return form


@contextmanager
def _explain_damage(path: Path) -> Iterator[None]:
    """Convert errors from reading a damaged file in the `with` block to a ValueError with the file's path."""
    try:
        yield
    except (FileNotFoundError, MemoryError):
        raise
    except Exception as error:  # NumPy, Pillow and the readers of archives raise errors of many kinds
        raise ValueError(f"{path} is damaged, changed or not part of an exported set: {error!r}; {_RESTORE}") from error
