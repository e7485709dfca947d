"""What `load_client` may return, as one client of a run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch.utils.data import Dataset

from distillkit.data import Split, StoredSplit, load_folder
from distillkit.normalization import IDENTITY
from distillkit.study import Allocation
from fl.engine.client_data import ClientData

__all__ = ["holding_of"]

_IMAGE, _LABEL = ("image", "img"), ("label", "labels")


def holding_of(given: Any, partition: int) -> tuple[Any, tuple[str, ...]]:
    """What a node's `load_client` gave, as `fl.simulate` takes one client; and its classes' names, if it says them.

    Args:
        given: a path: of a folder of pictures, as `distillkit.data.load_folder` reads it, with pixels in [0, 1]; its
            test pictures are the client's own tests. A `Split` or `StoredSplit`, such as `load_folder(path, size=32)`
            gives. A study task's allocation, `task.assign(task.load(), seed)`; the client gets its partition's part.
            A table of Hugging Face's `datasets`, such as `FederatedDataset.load_partition` of flwr-datasets gives: with
            one column of pictures (an `Image` feature, or called image or img) and one of labels (a `ClassLabel`, or
            called label or labels). A map of such with "train" and perhaps "test", such as `train_test_split` gives.
            Anything else is given on as it is.
        partition: which one the node is.

    Raises:
        TypeError, ValueError: it is one of these forms, and lacks what it needs.
    """
    if isinstance(given, str | Path):
        given = load_folder(given, normalization=IDENTITY, progress=False)
    if isinstance(given, Split | StoredSplit):
        return ClientData(given.train, given.test if len(given.test) else None), given.classes
    if isinstance(given, Allocation):
        if partition >= len(given.clients):
            raise ValueError(f"the task deals to {len(given.clients)} clients, and this node is partition {partition}")
        return ClientData(given.clients[partition], given.own_tests[partition]), ()
    if isinstance(given, Mapping):
        return _of_map(given, partition)
    if hasattr(given, "column_names") and hasattr(given, "features"):
        rows = _Rows(given)
        return rows, rows.classes
    return given, ()


def _of_map(given: Mapping[str, Any], partition: int) -> tuple[ClientData, tuple[str, ...]]:
    if "train" not in given or set(given) - {"train", "test"}:
        raise ValueError(f"a client's map must hold train, and may hold test; got {', '.join(map(str, given))}")
    sets = [holding_of(given[name], partition) for name in ("train", "test") if name in given]
    if len({names for _, names in sets}) > 1:
        raise ValueError("a client's training and test set must have the same classes, in the same order")
    return ClientData(*(found for found, _ in sets)), sets[0][1]


class _Rows(Dataset[Any]):
    """A table of `datasets` as pairs of an image and a label."""

    def __init__(self, table: Any) -> None:
        said = getattr(table, "format", None) or {}
        viewed = said.get("type") not in (None, "custom")  # as tensors, say: of the same pictures
        self._table = table.with_format(None) if viewed else table
        self._image = _column(table, "pictures", _IMAGE, [n for n in table.column_names if _is_picture(table, n)])
        self._label = _column(table, "labels", _LABEL, [n for n in table.column_names if _names(table, n)])
        self.classes = _names(table, self._label)

    def __len__(self) -> int:
        return len(self._table)

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        row = self._table[index]
        return row[self._image], row[self._label]


def _is_picture(table: Any, name: str) -> bool:
    return type(table.features[name]).__name__ == "Image"


def _names(table: Any, name: str) -> tuple[str, ...]:
    """The classes of a column of `ClassLabel`s."""
    return tuple(getattr(table.features[name], "names", None) or ())


def _column(table: Any, what: str, usual: tuple[str, ...], typed: list[str]) -> str:
    """The one column of a kind, by its feature or else by its name."""
    found = typed or [name for name in table.column_names if name in usual]
    if len(found) != 1:
        raise ValueError(
            f"the table must have one column of {what}, an {'Image' if what == 'pictures' else 'ClassLabel'} or called "
            f"{' or '.join(usual)}, and has {', '.join(found) or 'none'} among {', '.join(table.column_names)}: "
            "rename it, or leave the others out with select_columns"
        )
    return found[0]
