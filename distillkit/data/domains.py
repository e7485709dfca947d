"""Datasets with the same classes from several sources, joined into one set with a column `domain`."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from distillkit._utils import check
from distillkit._utils.pixels import AnyPath, Size, to_pixels
from distillkit.data._assembly import SplitBuilder
from distillkit.data._hold_out import HoldOut, stricter
from distillkit.data.datasets import load
from distillkit.data.readers._folder_layout import split_folders, subfolders
from distillkit.data.readers.folder import load_folder
from distillkit.data.readers.npz import load_npz
from distillkit.data.split import Split
from distillkit.normalization import IDENTITY, Normalization
from distillkit.sets import LabeledImages
from distillkit.sets._info import inherited_info
from distillkit.sets._validation import FOUND_CLASSES, FOUND_LABELS

_CHUNK = 1024


def load_domains(
    sources: AnyPath | Sequence[str] | Mapping[str, AnyPath | Split],
    *,
    root: AnyPath | None = None,
    classes: Sequence[str] | None = None,
    size: Size | None = None,
    channels: int | None = None,
    normalization: Normalization | None = None,
    test_fraction: float = 0.2,
    hold_out: HoldOut = "random",
    background: float | None = None,
    progress: bool = True,
) -> Split:
    """Load datasets with the same classes from several sources as one set, such as the folders of three hospitals.

    Use it for clients whose images differ in appearance. `partition.by_domain(split.train.columns["domain"])` makes
    every source a client. The same call on `split.test.columns["domain"]` gives the clients' test sets.

    Args:
        sources: one of three forms. (1) A mapping from names to your own data: a folder (see `load_folder`), an `.npz`
            file (see `load_npz`) or a `Split`. (2) A list of dataset names that `load` accepts. (3) A folder whose
            sub-folders are the sources, in alphabetical order, for example
            `retina_balanced/{Drishti,REFUGE,...}/{Training,Testing}/class/picture.png`. Each source becomes a domain;
            the domains have the order of the sources.
        root: data root of the datasets that are given by name; see `load`.
        classes: class names in label order. Default: the classes of the first source, which all other sources must also
            have. If you pass the names, a source may lack some of the classes.
        size: height and width in pixels; see `load_folder`. Required if the sources differ in size.
        channels: number of channels, 1 or 3; see `load_folder`. Required if only some sources are gray.
        normalization: normalization of all sources. Default: mean and standard deviation measured on the joined
            training set.
        test_fraction: share of each class that becomes the test set of a folder without a `test` folder; see
            `load_folder`.
        hold_out: choice of this test set, "random" or "content"; see `load_folder`.
        background: gray value in [0, 1] behind transparent pixels of pictures in folders; see `load_folder`.
        progress: whether to show a progress bar.

    Returns:
        A `Split` with the column `domain`; see `as_domains`.

    Raises:
        FileNotFoundError: files or folders of a source are missing.
        TypeError, ValueError: a source cannot be loaded, `as_domains` refuses the sources, or the given folder is a
            single dataset instead of a folder of sources.
    """
    if isinstance(sources, str | os.PathLike):
        sources = _folder_sources(Path(sources).expanduser())
    options: dict[str, Any] = {"size": size, "channels": channels, "normalization": IDENTITY}
    read: dict[str, Split] = {}
    if isinstance(sources, Mapping):
        paths = _paths(sources)
        for name, source in sources.items():
            if isinstance(source, Split):
                read[name] = source
            elif paths[name].is_file():
                read[name] = load_npz(paths[name], classes=None if classes is None else _distinct(classes), **options)
            else:
                folder: dict[str, Any] = options | {"test_fraction": test_fraction, "background": background}
                folder |= {"hold_out": hold_out, "classes": None if classes is None else _distinct(classes)}
                read[name] = load_folder(paths[name], progress=progress, **folder)
    else:
        names = check.sequence(sources, "sources", "names that load knows; your own folders come as {name: path}")
        if len(set(names)) != len(names):
            raise ValueError(f"sources must be distinct, got {list(names)}")
        read = {name: load(name, root=root, **options) for name in names}
    return as_domains(read, classes=classes, size=size, channels=channels, normalization=normalization)


def as_domains(
    splits: Mapping[str, Split],
    *,
    classes: Sequence[str] | None = None,
    size: Size | None = None,
    channels: int | None = None,
    normalization: Normalization | None = None,
) -> Split:
    """Join splits with the same classes into one split, and record the source of each image in a column.

    Use this function for splits that are already in memory, and `load_domains` to read and join them.

    Args:
        splits: mapping from the names of the sources to their splits, with at least one entry. Classes are matched by
            name, so their order may differ.
        classes: class names in label order, as in `load_domains`.
        size: height and width of the joined pictures in pixels; required if the sources differ.
        channels: number of channels of the joined pictures, 1 or 3; required if the sources differ.
        normalization: normalization of the joined sets. Default: mean and standard deviation measured on the joined
            training set.

    Returns:
        A `Split` with the pictures of all sources, in the order of `splits` and with a common normalization. Its
        `domains`, and `info["domains"]` of each set, are the names of the sources. The column `domain` of each set,
        int64 [N], is the index of each picture's source. Other columns are dropped. `info["sources"]` contains the
        `info` of each source. `validation` joins the validation sets of the sources that have one.

    Raises:
        TypeError, ValueError: there are no sources, or the sources differ in their classes, in the kind of their labels
            (class indices or multi-label rows), or in the size or channels of their pictures.
    """
    check.mapping(splits, "splits")
    if not splits:
        raise ValueError("splits must have at least one source, got none")
    for name, split in splits.items():
        if not isinstance(split, Split):
            raise TypeError(f"splits must be name -> Split(train, test, classes), {name!r} is {type(split).__name__}")
    names = tuple(next(iter(splits.values())).classes) if classes is None else _distinct(classes)
    orders = {name: _order(name, split.classes, names, classes is not None) for name, split in splits.items()}
    if len({split.train.labels.ndim for split in splits.values()}) > 1:
        raise ValueError("the sources have labels of different kinds: class indices and rows; store all as one of them")
    pixels: dict[str, Tensor] = {}
    labels: dict[str, Tensor] = {}
    columns: dict[str, dict[str, Tensor]] = {}
    for part in ("train", "test", "validation"):
        sets = {name: data for name, split in splits.items() if (data := getattr(split, part)) is not None}
        numbers = [list(splits).index(name) for name in sets]
        if not sets:
            continue
        pixels[part] = _join(sets, size, channels)
        labels[part] = torch.cat([_relabel(data, orders[name], len(names)) for name, data in sets.items()])
        counts = torch.tensor([len(data) for data in sets.values()])
        columns[part] = {"domain": torch.tensor(numbers).repeat_interleave(counts)}
    infos = [split.train.info for split in splits.values()]
    origins = [{key: value for key, value in one.items() if key not in ("split", "classes")} for one in infos]
    info = {"dataset": "+".join(splits), "domains": list(splits), "sources": origins}
    info |= stricter(*(one.get("hold_out") for one in infos))
    found = [one["classes"] for one in infos if one.get("classes") in (FOUND_CLASSES, FOUND_LABELS)]
    info |= {"classes": found[0]} if found and classes is None else {}
    info |= inherited_info([one.info for split in splits.values() for one in (split.train, split.test)])
    given = classes is not None or all(split.train.classes_given for split in splits.values())
    builder = SplitBuilder(labels, names, normalization, info, given, columns, domains=tuple(splits))
    return builder.build(pixels)


def _folder_sources(folder: Path) -> dict[str, Path]:
    """Return the path of each sub-folder of a folder by name. Refuse a folder that is itself a dataset."""
    found = subfolders(folder)
    if not found:
        raise FileNotFoundError(f"{folder} has no sub-folders; expected one per source: source/class/picture.png")
    if split_folders(folder)[0] != {"train": folder}:
        raise ValueError(f"{folder} is one dataset, with a train folder; load it with load_folder")
    return {source.name: source for source in found}


def _paths(sources: Mapping[str, AnyPath | Split]) -> dict[str, Path]:
    """Return the path of each source that is given as a file or folder, and check that it exists."""
    paths = {}
    for name, source in check.mapping(sources, "sources").items():
        if not isinstance(source, str | os.PathLike | Split):
            raise TypeError(f"sources must be name -> path or Split, but {name!r} is a {type(source).__name__}")
        if not isinstance(source, Split):
            paths[name] = check.path(source, f"sources[{name!r}]")
    if missing := [f"{name} ({path})" for name, path in paths.items() if not path.exists()]:
        raise FileNotFoundError(f"sources are missing: {', '.join(missing)}; expected folders or .npz files")
    return paths


def _distinct(classes: Sequence[str]) -> tuple[str, ...]:
    names = check.sequence(classes, "classes", "names")
    if not names or len(set(names)) != len(names):
        raise ValueError(f"classes must be distinct names, at least one, got {list(names)}")
    return names


def _order(name: str, own: Sequence[str], classes: Sequence[str], may_lack: bool) -> Tensor:
    """Return the index in `classes` of each class name of a source (one of the joined datasets), int64 [len(own)]."""
    problems = []
    if lacking := [c for c in classes if c not in own]:
        problems += [] if may_lack else [f"lacks {', '.join(lacking[:5])}"]
    if other := [c for c in own if c not in classes]:
        problems.append(f"has {', '.join(other[:5])}")
    if problems:
        raise ValueError(
            f"all sources must have the same classes, {', '.join(classes)}, but {name!r} {' and '.join(problems)}; "
            "rename them, or, if some sources lack some classes, list all names with classes="
        )
    return torch.tensor([classes.index(c) for c in own], dtype=torch.long)


def _relabel(data: LabeledImages, order: Tensor, total: int) -> Tensor:
    if data.labels.ndim == 1:
        return order[data.labels.cpu()]
    rows = data.labels.cpu()
    return rows.new_zeros(len(rows), total).index_copy_(1, order, rows)


def _join(sets: Mapping[str, LabeledImages], size: Size | None, channels: int | None) -> Tensor:
    """Return the pixels of all `sets`, concatenated, in a common size and number of channels."""
    shapes = {name: tuple(to_pixels(data[:1].pixels(), size, channels).shape[1:]) for name, data in sets.items()}
    (first, shape), *others = shapes.items()
    for name, other in others:
        if other != shape:
            remedy = "channels=1 or channels=3" if other[0] != shape[0] else "size=, for example size=32"
            raise ValueError(
                f"the sources differ: {first!r} is {list(shape)} (C, H, W), {name!r} is {list(other)}; give {remedy}"
            )
    joined, begin = torch.empty(sum(map(len, sets.values())), *shape), 0
    for data in sets.values():
        for start in range(0, len(data), _CHUNK):  # in chunks, so that no source is in memory twice
            images = to_pixels(data[start : start + _CHUNK].pixels(), size, channels)
            joined[begin : begin + len(images)] = images
            begin += len(images)
    return joined
