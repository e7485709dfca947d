"""Conversion of the return value of a user's function `load_client` into the data of one client."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from distillkit.data import Split, StoredSplit, load_folder
from distillkit.normalization import IDENTITY
from distillkit.sets import as_set
from distillkit.study import Allocation
from fl.engine._clients import ClientData


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
    if hasattr(given, "column_names") and hasattr(given, "features"):  # rows of Hugging Face
        given = as_set(given, name="the table", progress=False)
        return given, given.class_names
    return given, ()


def _from_mapping(given: Mapping[str, Any], partition: int) -> tuple[ClientData, tuple[str, ...]]:
    if "train" not in given or set(given) - {"train", "test"}:
        raise ValueError(f"a mapping must have the key train, and may have test; got {', '.join(map(str, given))}")
    sets = [to_client_data(given[name], partition) for name in ("train", "test") if name in given]
    if len({names for _, names in sets}) > 1:
        raise ValueError("a client's training and test sets must have the same classes, in the same order")
    return ClientData(*(found for found, _ in sets)), sets[0][1]
