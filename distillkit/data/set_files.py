"""Loading of condensed sets: sets that are shipped with distillkit, saved sets, and sets that papers released."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from distillkit._utils import check
from distillkit._utils.extras import optional
from distillkit._utils.files import read_tensors
from distillkit._utils.pixels import AnyPath
from distillkit.data.datasets import load
from distillkit.data.readers._torch_file import SUFFIXES, read_torch_file
from distillkit.data.readers.folder import load_folder
from distillkit.normalization import IDENTITY, Normalization
from distillkit.sets import LabeledImages

_INDEX_FORMAT = "distillkit.ImageIndex/1"
"""Format of files that contain indices of images in a dataset, instead of copies of the images."""

_FOLDER = Path(__file__).with_name("shipped")
"""Folder with the shipped sets."""
_HUB = "hf://"
_PUBLISHED = "set.safetensors"
"""File of a published folder that keeps a set without loss; its pictures are for viewers."""
_SHARE = 1e-2
_TOLERANCE = 1e-5


def load_set(
    source: AnyPath,
    *,
    normalization: Normalization | None = None,
    class_names: Sequence[str] = (),
    run: int | None = None,
    logits: bool = False,
    root: AnyPath | None = None,
) -> LabeledImages:
    """Load a condensed set: a set that is shipped with distillkit, a saved set, or a set that a paper released.

    Use it to evaluate, attack or relabel a set that somebody else made. The source is one of

    - the name of a shipped set, which is a key of `set_cards()`, such as "digits-dm-10";
    - a file or folder that `LabeledImages.save`, `export` or `distillkit sets SET --out FOLDER --card` wrote;
    - `"hf://owner/name"` or `"hf://owner/name@revision"`, such a folder on the hub of Hugging Face. One file,
      `set.safetensors`, is downloaded by `huggingface_hub`, and no code runs;
    - a `.pt` or `.pth` file of DC, DSA, DM, IDM, IDC or DREAM, which is read without running code from it, or a folder
      with the files `images_best.pt` and `labels_best.pt` of MTT, TESLA or DATM;
    - a folder with one sub-folder of pictures per class, as SRe2L and RDED release them.

    Args:
        source: name or path, as listed above.
        normalization: normalization of the images in a `.pt` file, which does not contain it. Pass the mean and
            standard deviation from the authors' code, or `IDENTITY` for pixels in [0, 1]. For a folder of pictures, it
            is the normalization to apply; default: none. Omit it for sets of distillkit, whose files contain it.
        class_names: names of the classes, for `.pt` files only.
        run: index of the set, if a `.pt` file contains several sets. Default: the last one.
        logits: whether the soft labels of a `.pt` file are logits, as in DATM. They are converted to probabilities, and
            the column `logits` keeps the logits.
        root: data root, for a shipped set that consists of images of a dataset and contains only their indices; see
            `load`.

    Raises:
        FileNotFoundError: `source` is neither the name of a shipped set nor an existing file or folder, or the hub has
            no such set.
        ImportError: `source` is on the hub and `huggingface_hub` is not installed: `pip install 'distillkit[data]'`.
        TypeError, ValueError: an argument does not apply to the format, the file has an unknown layout, soft labels are
            not probabilities, or `normalization` is missing for a `.pt` file.
    """
    path = _from_hub(str(source)) if str(source).startswith(_HUB) else check.path(source, "source")
    shipped = _shipped()
    if str(source) in shipped and not path.exists():
        _refuse(source, normalization=normalization, class_names=class_names, logits=logits)
        return _load_shipped(shipped[str(source)], root)
    if (path / _PUBLISHED).is_file():
        path = path / _PUBLISHED
    if path.suffix.lower() in SUFFIXES or (path / "images_best.pt").is_file():
        return _load_release(path, normalization, class_names, check.boolean(logits, "logits"), run)
    if path.is_dir() and not (path / "set.json").is_file():
        _refuse(source, class_names=class_names, logits=logits)
        normalization = IDENTITY if normalization is None else normalization
        return load_folder(path, test_fraction=0.0, normalization=normalization).train
    if not path.exists():
        raise FileNotFoundError(f"no set or file {str(source)!r}; shipped sets: {', '.join(shipped) or 'none'}")
    _refuse(source, normalization=normalization, class_names=class_names, logits=logits)
    return LabeledImages.load(path)


def set_cards() -> dict[str, dict[str, Any]]:
    """Return the descriptions (cards) of all condensed sets that are shipped with distillkit, by the sets' names.

    A card states the original data and its license, the command and commit that made the set, the evaluation protocol,
    the accuracy, and what the images reveal about the original data. `load_set` stores the card of a set in its
    `info["card"]`.
    """
    return {name: _facts(path)["info"]["card"] for name, path in _shipped().items()}


def _from_hub(source: str) -> Path:
    name, _, revision = source.removeprefix(_HUB).partition("@")
    hub = optional("huggingface_hub", "data", source)
    try:
        return Path(hub.hf_hub_download(name, _PUBLISHED, repo_type="dataset", revision=revision or None))
    except (OSError, ValueError) as error:
        raise FileNotFoundError(
            f"source {source!r} must be hf://owner/name of a dataset with the file {_PUBLISHED}: {error}"
        ) from error


def _shipped() -> dict[str, Path]:
    return {path.stem: path for path in sorted(_FOLDER.glob("*.safetensors"))}


def _load_shipped(path: Path, root: AnyPath | None) -> LabeledImages:
    facts = _facts(path)
    if "dataset" not in facts:
        return LabeledImages.load(path)
    tensors, _ = read_tensors(path, kind=_INDEX_FORMAT, content="rows of a dataset")
    train = load(facts["dataset"], root=root, **facts["options"]).train
    chosen = train[tensors["indices"]]
    if abs(_checksum(chosen) - facts["checksum"]) > _TOLERANCE or not torch.equal(chosen.labels, tensors["labels"]):
        raise ValueError(
            f"the images of {facts['dataset']} to which {path.stem} refers have changed since it was made; check the "
            "files below root"
        )
    return chosen.replace(info=facts["info"])


def _checksum(data: LabeledImages) -> float:
    """Return a weighted mean of the pixels, to recognize a set.

    It depends on the images and their order, but rounding errors of single pixels hardly change it.
    """
    means = data.pixels().flatten(1).double().mean(1)
    return float((means * torch.linspace(1, 2, len(means), dtype=torch.float64)).mean())


def _facts(path: Path) -> dict[str, Any]:
    """Return the metadata of the file of a condensed set that is shipped with distillkit.

    The file contains either a set, or only indices of images in a dataset. In the second case, the metadata contain the
    name of the dataset as `dataset`.
    """
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        facts: dict[str, Any] = json.loads(file.metadata()["set"])
    return facts


def _load_release(
    path: Path, normalization: Normalization | None, class_names: Sequence[str], logits: bool, run: int | None
) -> LabeledImages:
    if normalization is None:
        raise TypeError(
            f"normalization must be given, because {path.name} does not contain it: pass the mean and standard "
            "deviation in the authors' code, or IDENTITY for pixels in [0, 1]"
        )
    found = read_torch_file(path, None if run is None else check.positive_int(run, "run", least=0))
    info: dict[str, Any] = {"source": path.name}
    info |= {} if found.runs == 1 else {"run": found.runs - 1 if run is None else run}
    info |= {} if found.lr is None else {"lr_student": found.lr}
    labels, columns = found.labels, {}
    if labels.ndim == 2:
        columns = {"logits": labels.float()} if logits else {}
        labels = labels.float().softmax(1) if logits else _probabilities(labels.float(), path)
    elif logits:
        raise ValueError(f"logits=True needs label rows, but {path.name} has class indices")
    options: dict[str, Any] = {"columns": columns, "info": info, "class_names": tuple(class_names)}
    if found.images.dtype == torch.uint8:
        return LabeledImages.from_pixels(found.images, labels, normalization=normalization, **options)
    return LabeledImages(found.images.float(), labels, normalization=normalization, **options)


def _probabilities(rows: Tensor, path: Path) -> Tensor:
    sums = rows.sum(1, keepdim=True)
    if bool((rows < 0).any()) or bool(((sums - 1).abs() > _SHARE).any()):
        raise ValueError(
            f"the label rows of {path.name} are not probabilities: they range from {float(rows.min()):.3g} to "
            f"{float(rows.max()):.3g} and sum to {float(sums.min()):.3g} to {float(sums.max()):.3g}; pass logits=True "
            "if they are logits, as in DATM"
        )
    return rows / sums


def _refuse(source: AnyPath, **given: Any) -> None:
    if wrong := [name for name, value in given.items() if value]:
        raise TypeError(f"{wrong[0]} must be left out for {str(source)!r}, which contains it")
