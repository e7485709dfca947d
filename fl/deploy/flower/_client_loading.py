"""Conversion of the return value of a user's function `load_client` into the data of one client."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch.utils.data import Dataset

from distillkit.data import Split, StoredSplit, load_folder
from distillkit.normalization import IDENTITY
from distillkit.study import Allocation
from fl.engine._clients import ClientData

__all__ = ["to_client_data"]

_IMAGE_NAMES, _LABEL_NAMES = ("image", "img"), ("label", "labels")


def to_client_data(given: Any, partition: int) -> tuple[Any, tuple[str, ...]]:
    """Return a client's data in a form that `fl.simulate` accepts, and the class names (empty if unknown)."""
    if isinstance(given, str | Path):
        given = load_folder(given, normalization=IDENTITY, progress=False)
    if isinstance(given, Split | StoredSplit):
        return ClientData(given.train, given.test if len(given.test) else None), given.classes
    if isinstance(given, Allocation):
        if partition >= len(given.clients):
            raise ValueError(f"the task has {len(given.clients)} clients, and this node is partition {partition}")
        return ClientData(given.clients[partition], given.own_tests[partition]), ()
    if isinstance(given, Mapping):
        return _from_mapping(given, partition)
    if hasattr(given, "column_names") and hasattr(given, "features"):
        dataset = _TableDataset(given)
        return dataset, dataset.classes
    return given, ()


def _from_mapping(given: Mapping[str, Any], partition: int) -> tuple[ClientData, tuple[str, ...]]:
    if "train" not in given or set(given) - {"train", "test"}:
        raise ValueError(f"a mapping must have the key train, and may have test; got {', '.join(map(str, given))}")
    sets = [to_client_data(given[name], partition) for name in ("train", "test") if name in given]
    if len({names for _, names in sets}) > 1:
        raise ValueError("a client's training and test sets must have the same classes, in the same order")
    return ClientData(*(found for found, _ in sets)), sets[0][1]


class _TableDataset(Dataset[Any]):
    """Dataset of (image, label) pairs from a table of Hugging Face's `datasets`."""

    def __init__(self, table: Any) -> None:
        kind = (getattr(table, "format", None) or {}).get("type")  # a custom transform stays; a tensor format does not
        self._table = table if kind in (None, "custom") else table.with_format(None)
        self._image = _column(table, "images", _IMAGE_NAMES, [n for n in table.column_names if _is_image(table, n)])
        self._label = _column(table, "labels", _LABEL_NAMES, [n for n in table.column_names if _class_names(table, n)])
        self.classes = _class_names(table, self._label)

    def __len__(self) -> int:
        return len(self._table)

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        row = self._table[index]
        return row[self._image], row[self._label]


def _is_image(table: Any, name: str) -> bool:
    return type(table.features[name]).__name__ == "Image"


def _class_names(table: Any, name: str) -> tuple[str, ...]:
    """Return the class names in a table's column `name`; empty if the column does not have the feature `ClassLabel`."""
    return tuple(getattr(table.features[name], "names", None) or ())


def _column(table: Any, kind: str, usual: tuple[str, ...], typed: list[str]) -> str:
    """Return the name of a table's image or label column."""
    found = typed or [name for name in table.column_names if name in usual]
    if len(found) != 1:
        raise ValueError(
            f"the table must have one column of {kind}: an {'Image' if kind == 'images' else 'ClassLabel'}, or named "
            f"{' or '.join(usual)}; found {', '.join(found) or 'none'} among {', '.join(table.column_names)}. Rename "
            "it, or drop the others with select_columns"
        )
    return found[0]
