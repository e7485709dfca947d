"""Several sources of the same classes as one set, whose column `domain` says where each picture is from."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from distillkit._utils import check
from distillkit.data.datasets import load
from distillkit.data.readers.folder import Size, load_folder
from distillkit.data.readers.folder_layout import parts_of, subfolders
from distillkit.data.readers.npz import load_npz
from distillkit.data.split import Split, assemble, to_pixels
from distillkit.normalization import IDENTITY, Normalization
from distillkit.sets import LabeledImages

__all__ = ["as_domains", "load_domains"]

_CHUNK = 1024

AnyPath = str | os.PathLike[str]


def load_domains(
    sources: AnyPath | Sequence[str] | Mapping[str, AnyPath | Split],
    *,
    root: AnyPath | None = None,
    classes: Sequence[str] | None = None,
    size: Size | None = None,
    channels: int | None = None,
    normalization: Normalization | None = None,
    test_fraction: float = 0.2,
    progress: bool = True,
) -> Split:
    """Load several sources of the same classes as one set: three hospitals' folders, or the digits of five datasets.

    For clients that differ in what their pictures look like: `partition.by_domain(split.train.columns["domain"])`
    makes every source a client, and the same of `split.test` its test set.

    Args:
        sources: your own data as name -> path, where a path is a folder (see `load_folder`), an `.npz` (see `load_npz`)
            or a `Split` that you have; or a list of names that `load` knows; or one folder whose sub-folders are the
            sources, as of `retina_balanced/{Drishti,REFUGE,...}/{Training,Testing}/class/picture.png`. Their order is
            the order of the domains, that of a folder's is alphabetical.
        root: the data root of named sources; see `load`.
        classes: the names of the classes in label order. Default: those of the first source, of which no other may lack
            one. With the names stated, a source may lack some of them.
        size: height and width in pixels; see `load_folder`. Needed if the sources differ in size.
        channels: 1 or 3; see `load_folder`. Needed if some sources are grey and some are not.
        normalization: of all sources. Default: the mean and standard deviation measured on the joined training set.
        test_fraction: of each class of a folder without `test`; see `load_folder`.
        progress: whether long reading shows a bar.

    Returns:
        What `as_domains` returns.

    Raises:
        FileNotFoundError: files or folders are missing; see the loaders.
        TypeError, ValueError: what the loaders and `as_domains` refuse; a folder that is one dataset.
    """
    if isinstance(sources, str | os.PathLike):
        sources = _inside(Path(sources).expanduser())
    options: dict[str, Any] = {"size": size, "channels": channels, "normalization": IDENTITY}
    read: dict[str, Split] = {}
    if isinstance(sources, Mapping):
        paths = _paths(sources)
        for name, source in sources.items():
            if isinstance(source, Split):
                read[name] = source
            elif paths[name].is_file():
                read[name] = load_npz(paths[name], classes=None if classes is None else _stated(classes), **options)
            else:
                read[name] = load_folder(paths[name], test_fraction=test_fraction, progress=progress, **options)
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
    """Join the splits of several sources that have the same classes into one, which says where each picture is from.

    `load_domains` reads and joins; this joins what is in memory already.

    Args:
        splits: name -> `Split`, at least one; classes go together by their names, whatever their order.
        classes: see `load_domains`.
        size: height and width in pixels that all are resized to; needed if they differ.
        channels: 1 or 3, to which all are brought; needed if they differ.
        normalization: of the joined sets, whatever that of the sources was. Default: mean and standard deviation
            measured on the joined training set.

    Returns:
        A `Split` with the sources' pictures one after the other, in one normalisation, without their own columns. Its
        `domains` are their names; the column `domain` of each set, int64 [N], counts in them, and `info["domains"]`
        lists them too. `info["sources"]` has what each source said of itself. A source that has a validation set
        is in `validation`.

    Raises:
        TypeError, ValueError: no sources, other classes, labels of two kinds, or pictures of different sizes or
            channels; the domains are named.
    """
    check.mapping(splits, "splits")
    if not splits:
        raise ValueError("splits must have at least one source, got none")
    for name, split in splits.items():
        if not isinstance(split, Split):
            raise TypeError(f"splits must be name -> Split(train, test, classes), {name!r} is {type(split).__name__}")
    names = tuple(next(iter(splits.values())).classes) if classes is None else _stated(classes)
    orders = {name: _order(name, split.classes, names, classes is not None) for name, split in splits.items()}
    if len({split.train.labels.ndim for split in splits.values()}) > 1:
        raise ValueError("the sources have labels of different kinds: class indices and rows; store all as one of them")
    pixels: dict[str, Tensor] = {}
    labels: dict[str, Tensor] = {}
    columns: dict[str, dict[str, Tensor]] = {}
    for part in ("train", "test", "validation"):
        held = {name: getattr(split, part) for name, split in splits.items()}
        numbers = [number for number, data in enumerate(held.values()) if data is not None]
        held = {name: data for name, data in held.items() if data is not None}
        if not held:
            continue
        pixels[part] = _joined(held, size, channels)
        labels[part] = torch.cat([_relabelled(data, orders[name], len(names)) for name, data in held.items()])
        counts = torch.tensor([len(data) for data in held.values()])
        columns[part] = {"domain": torch.tensor(numbers).repeat_interleave(counts)}
    told = [{key: value for key, value in split.train.info.items() if key != "split"} for split in splits.values()]
    info = {"dataset": "+".join(splits), "domains": list(splits), "sources": told}
    given = classes is not None or all(split.train.classes_given for split in splits.values())
    return assemble(
        pixels, labels, names, normalization, info, classes_given=given, columns=columns, domains=tuple(splits)
    )


def _inside(folder: Path) -> dict[str, Path]:
    """The sources that lie in one folder."""
    inside = subfolders(folder)
    if not inside:
        raise FileNotFoundError(f"{folder} has no sub-folders; want one a source: source/class/picture.png")
    if parts_of(folder)[0] != {"train": folder}:
        raise ValueError(f"{folder} is one dataset, with a train folder; load it with load_folder")
    return {source.name: source for source in inside}


def _paths(sources: Mapping[str, AnyPath | Split]) -> dict[str, Path]:
    """Where the sources lie that are not in memory."""
    paths = {}
    for name, source in check.mapping(sources, "sources").items():
        if not isinstance(source, str | os.PathLike | Split):
            raise TypeError(f"sources must be name -> path or Split, but {name!r} is a {type(source).__name__}")
        if not isinstance(source, Split):
            paths[name] = Path(source).expanduser()
    if missing := [f"{name} ({path})" for name, path in paths.items() if not path.exists()]:
        raise FileNotFoundError(f"sources are missing: {', '.join(missing)}; want folders or .npz files")
    return paths


def _stated(classes: Sequence[str]) -> tuple[str, ...]:
    stated = check.sequence(classes, "classes", "names")
    if not stated or len(set(stated)) != len(stated):
        raise ValueError(f"classes must be distinct names, at least one, got {list(stated)}")
    return stated


def _order(name: str, own: Sequence[str], classes: Sequence[str], may_lack: bool) -> Tensor:
    """The label that each of a source's classes gets."""
    wrong = []
    if lacking := [c for c in classes if c not in own]:
        wrong += [] if may_lack else [f"lacks {', '.join(lacking[:5])}"]
    if other := [c for c in own if c not in classes]:
        wrong.append(f"has {', '.join(other[:5])}")
    if wrong:
        raise ValueError(
            f"all sources must have the same classes, {', '.join(classes)}, but {name!r} {' and '.join(wrong)}; rename "
            "them alike, or, where some sources lack some classes, list all of them with classes="
        )
    return torch.tensor([classes.index(c) for c in own], dtype=torch.long)


def _relabelled(data: LabeledImages, order: Tensor, total: int) -> Tensor:
    if data.labels.ndim == 1:
        return order[data.labels.cpu()]
    rows = data.labels.cpu()
    return rows.new_zeros(len(rows), total).index_copy_(1, order, rows)


def _joined(held: Mapping[str, LabeledImages], size: Size | None, channels: int | None) -> Tensor:
    """The pixels of all sources, one after the other."""
    shapes = {name: tuple(to_pixels(data[:1].pixels(), size, channels).shape[1:]) for name, data in held.items()}
    (first, shape), *others = shapes.items()
    for name, other in others:
        if other != shape:
            remedy = "channels=1 or channels=3" if other[0] != shape[0] else "size=, for example size=32"
            raise ValueError(
                f"the sources differ: {first!r} is {list(shape)} (C, H, W), {name!r} is {list(other)}; give {remedy}"
            )
    joined, begin = torch.empty(sum(map(len, held.values())), *shape), 0
    for data in held.values():
        for start in range(0, len(data), _CHUNK):  # in parts, so that no whole source is held twice
            images = to_pixels(data[start : start + _CHUNK].pixels(), size, channels)
            joined[begin : begin + len(images)] = images
            begin += len(images)
    return joined
