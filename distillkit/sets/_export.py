"""Export of sets to `.npz` files and folders of PNG pictures, which programs without distillkit can read."""

from __future__ import annotations

import csv
import json
import os
import re
import shutil
import zipfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from distillkit._utils.files import atomic_replace
from distillkit._utils.user_warnings import warn
from distillkit.normalization import Normalization

__all__ = ["read_npz", "read_picture_folder", "write_npz", "write_picture_folder"]

_FORMAT = "distillkit.LabeledImages.export/1"
_STEP = 1 / 255
_FOR_READERS = ("mean", "std", "class_names")
"""JSON values that an `.npz` also contains as separate arrays, for programs that do not know the array `set`."""

Tensors = dict[str, Tensor]


def write_npz(path: Path, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
    """Write the parts of a set to an `.npz` file, without loss.

    Args:
        path: path of the file. An existing file is replaced atomically.
        tensors, facts: tensors and JSON values of the set, as `LabeledImages.parts` returns them.

    Raises:
        ValueError: a tensor has a dtype that NumPy does not have, such as bfloat16.
    """
    if lacking := [name for name, tensor in tensors.items() if tensor.dtype == torch.bfloat16]:
        raise ValueError(f"NumPy has no bfloat16, which {lacking[0]} has; export data.to(dtype=torch.float32)")
    arrays: dict[str, Any] = {name: tensor.detach().cpu().numpy() for name, tensor in tensors.items()}
    arrays |= {name: np.asarray(facts[name]) for name in _FOR_READERS if name in facts}
    arrays["set"] = np.asarray(json.dumps({"format": _FORMAT, **facts}))
    with atomic_replace(path) as temporary, temporary.open("wb") as file:
        np.savez_compressed(file, allow_pickle=False, **arrays)


def read_npz(path: Path) -> tuple[Tensors, dict[str, Any]]:
    """Read the parts of a set (see `LabeledImages.parts`) from an `.npz` file that `write_npz` wrote.

    Raises:
        FileNotFoundError: the file does not exist.
        ValueError: the file is damaged, or does not contain an exported set.
    """
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
        tensors = {name: torch.from_numpy(array) for name, array in arrays.items() if name not in _FOR_READERS}
    return tensors, facts


def write_picture_folder(
    path: Path, pixels: Tensor, labels: Tensor, classes: Tensor, facts: Mapping[str, Any], lost: list[str]
) -> None:
    """Write a set as PNG pictures in one folder per class, with `labels.csv` and `set.json`.

    Args:
        path: the folder, which must either not exist or be empty. If writing fails, no incomplete folder remains.
        pixels: pixels of the images, float [N, C, H, W] with 1 or 3 channels. Values outside [0, 1] are clipped, with a
            warning.
        labels: class indices [N], or soft labels float [N, K], which are written to `labels.csv`.
        classes: class index of each image, [N], which determines the folder of its picture.
        facts: JSON values of the set, as `LabeledImages.parts` returns them. They are written to `set.json`.
        lost: names of parts of the set that cannot be written to this format. A warning lists them.

    Raises:
        FileExistsError: the folder is not empty.
        ValueError: the number of channels is neither 1 nor 3.
    """
    from PIL import Image

    if pixels.shape[1] not in (1, 3):
        raise ValueError(f"PNG pictures have 1 or 3 channels, got {pixels.shape[1]}; export to an .npz")
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise FileExistsError(f"{path} exists and is not an empty folder; remove it, or give another path")
    pixels, labels = pixels.detach().cpu().float(), labels.detach().cpu()
    exported = (pixels.clamp(0, 1) * 255).round()
    outside = float(((pixels < -_STEP / 2) | (pixels > 1 + _STEP / 2)).float().mean()) if len(pixels) else 0.0
    error = float((exported / 255 - pixels).abs().max()) if len(pixels) else 0.0
    lost = [*([f"{outside:.1%} of the pixels, which lie outside [0, 1] and are clipped"] if outside else []), *lost]
    if lost:
        warn(f"PNG pictures leave out {'; '.join(lost)}. An .npz or .safetensors file keeps everything")
    folders = _class_folders(facts.get("class_names", ()), facts["num_classes"])
    rows, width = classes.detach().cpu(), len(str(max(len(labels) - 1, 0)))
    files = [f"{folders[k]}/{i:0{width}d}.png" for i, k in enumerate(rows.tolist())]
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        for file, picture in zip(files, exported.byte().permute(0, 2, 3, 1).numpy()):
            (temporary / file).parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(picture[..., 0] if picture.shape[2] == 1 else picture).save(temporary / file)
        temporary.mkdir(parents=True, exist_ok=True)
        _write_labels(temporary / "labels.csv", files, rows, labels, facts.get("class_names", ()))
        form = {"format": _FORMAT, **facts, "shape": list(pixels.shape[1:]), "largest_error": error, "left_out": lost}
        form["labels"] = str(labels.dtype).removeprefix("torch.")
        (temporary / "set.json").write_text(json.dumps(form, indent=2) + "\n", encoding="utf-8")
        os.replace(temporary, path)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def read_picture_folder(path: Path) -> tuple[Tensors, dict[str, Any]]:
    """Read the parts of a set (see `LabeledImages.parts`) from a folder that `write_picture_folder` wrote.

    Raises:
        FileNotFoundError: the folder, `set.json`, `labels.csv` or a picture is missing.
        ValueError: a file is damaged.
    """
    from PIL import Image

    if not (path / "set.json").is_file():
        raise FileNotFoundError(
            f"{path} has no set.json, so it is not an exported LabeledImages; read a folder of pictures with "
            "distillkit.data.load_folder"
        )
    with _explain_damage(path / "set.json"):
        facts = _checked_facts(json.loads((path / "set.json").read_text(encoding="utf-8")))
        c, h, w = facts["shape"]
        dtype = getattr(torch, facts["labels"])
    files, labels = _read_labels(path / "labels.csv", dtype, facts["num_classes"])
    images = torch.empty(len(files), c, h, w)
    for file, out in zip(files, images):
        if not (inside := path / file).resolve().is_relative_to(path.resolve()):
            raise ValueError(f"{path / 'labels.csv'} is damaged: {file!r} is not in the folder")
        with _explain_damage(inside), Image.open(inside) as picture:
            pixels = torch.from_numpy(np.array(picture.convert("L" if c == 1 else "RGB"))).reshape(h, w, c)
        out.copy_(pixels.permute(2, 0, 1) / 255)
    normalization = Normalization(facts["mean"], facts["std"], measured=facts.get("measured", True))
    return {"images": normalization.encode(images), "labels": labels}, facts


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


def _write_labels(path: Path, files: Sequence[str], classes: Tensor, labels: Tensor, names: Sequence[str]) -> None:
    soft = labels.tolist() if labels.ndim == 2 else [[]] * len(files)
    columns = ["file", "label", *(["class"] if names else [])]
    columns += [f"p{k}" for k in range(labels.shape[1])] if labels.ndim == 2 else []
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(columns)
        for name, k, row in zip(files, classes.tolist(), soft):
            writer.writerow([name, k, *([names[k]] if names else []), *row])


def _read_labels(path: Path, dtype: torch.dtype, num_classes: int) -> tuple[list[str], Tensor]:
    with _explain_damage(path), path.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
        files = [row["file"] for row in rows]
        if dtype.is_floating_point:
            soft = [[float(row[f"p{k}"]) for k in range(num_classes)] for row in rows]
            return files, torch.tensor(soft, dtype=torch.float64).reshape(len(rows), num_classes).to(dtype)
        return files, torch.tensor([int(row["label"]) for row in rows], dtype=dtype)


def _checked_facts(form: Any) -> dict[str, Any]:
    if not isinstance(form, dict) or form.pop("format", None) != _FORMAT:
        raise ValueError(f"its format is not {_FORMAT!r}")
    return form


@contextmanager
def _explain_damage(path: Path) -> Iterator[None]:
    """Convert errors from reading a damaged file in the `with` block to a ValueError with the file's path."""
    try:
        yield
    except FileNotFoundError:
        raise
    except (
        ValueError,
        KeyError,
        TypeError,
        AttributeError,
        OSError,
        EOFError,
        zipfile.BadZipFile,
        zlib.error,
    ) as error:
        raise ValueError(f"{path} is damaged or not part of an exported set: {error!r}") from error
