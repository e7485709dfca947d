"""Reader of tables of picture files and labels: CSV and Parquet files, and data frames."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from distillkit._utils import check
from distillkit._utils.conversion import IMAGE_COLUMNS, LABEL_COLUMNS, column
from distillkit._utils.extras import optional
from distillkit._utils.pixels import AnyPath, Size
from distillkit._utils.user_warnings import warn
from distillkit.data._hold_out import HoldOut
from distillkit.data.readers._folder_layout import SPLITS, SUFFIXES
from distillkit.data.readers._picture_decoding import Problems
from distillkit.data.readers._picture_list import PictureList, load_pictures, open_pictures
from distillkit.data.split import Split, StoredSplit, warn_of_repeats
from distillkit.normalization import Normalization
from distillkit.sets._validation import FOUND_LABELS, checked_class_names

_FILES = ("file_name", "filename", "file", "path", "filepath", "image_path", "image_id", "image_name", "id", "id_code")
_CALL = 'image="..." or label="..."'


def load_table(
    table: AnyPath | Any,
    *,
    image: str | None = None,
    label: str | Sequence[str] | None = None,
    folder: AnyPath | None = None,
    split: str | None = "split",
    user: str | None = None,
    size: Size | None = None,
    channels: int | None = None,
    normalization: Normalization | None = None,
    test_fraction: float = 0.2,
    hold_out: HoldOut = "random",
    classes: Sequence[str] | None = None,
    background: float | None = None,
    progress: bool = True,
) -> Split:
    """Load your own pictures from a table with a picture file and a label in each row, such as a competition's CSV.

    Args:
        table: path of a `.csv`, `.tsv` or `.parquet` file, a pandas data frame, or a mapping from names to columns.
        image: name of the column of files, as paths below `folder`; the ending of a picture may be left out. Default:
            the column with a usual name, such as "image", "file_name" or "id".
        label: name of the column of labels; or names of several columns of numbers, which become label rows. Default:
            the column with a usual name, such as "label" or "class", or the other one of two columns.
        folder: folder of the pictures. Default: that of the table, or the current one for a data frame.
        split: name of a column with `train`, `test` or `val` (or another name that `load_folder` accepts). The default
            column, "split", may be missing. None reads no such column.
        user: name of a column of owners, such as hospitals, which becomes the column `user` and `Split.users`.
        size, channels, normalization, background, progress: as in `load_folder`.
        test_fraction, hold_out: as in `load_folder`, if the table has no test pictures.
        classes: the class names in label order; a class may have no pictures. Default: the labels that occur, numbers
            by value and names in alphabetical order. Differentially private functions require names.

    Needs pandas: `pip install 'distillkit[data]'`. All values are read as text, so "007" stays "007".

    Raises:
        ImportError: pandas is not installed.
        FileNotFoundError: the table or pictures do not exist.
        TypeError, ValueError: a column is missing, or several may be meant. Pictures or rows are wrong: unreadable or
            different pictures, files in two rows, missing or unknown labels and splits. The message counts all of them,
            with examples, before any picture is decoded.
    """
    where, listed = _opened(table, folder, columns=(image, label, split, user), declared=classes)
    form: dict[str, Any] = {"size": size, "channels": channels, "normalization": normalization, "progress": progress}
    own: dict[str, Any] = {"test_fraction": test_fraction, "hold_out": hold_out, "background": background}
    return warn_of_repeats(load_pictures(_list_table, where, **form, **own, **listed))


def open_table(
    table: AnyPath | Any,
    *,
    image: str | None = None,
    label: str | Sequence[str] | None = None,
    folder: AnyPath | None = None,
    split: str | None = "split",
    user: str | None = None,
    size: Size | None = None,
    channels: int | None = None,
    normalization: Normalization | None = None,
    test_fraction: float = 0.2,
    hold_out: HoldOut = "random",
    classes: Sequence[str] | None = None,
    background: float | None = None,
    cache: AnyPath | None = None,
    workers: int | None = None,
    progress: bool = True,
) -> StoredSplit:
    """Open a table of pictures that do not fit in memory, like `load_table`, but read pictures only when needed.

    Args:
        table, image, label, folder, split, user: as in `load_table`.
        size, channels, normalization, test_fraction, hold_out, classes, background, progress: as in `load_table`.
        cache, workers: as in `open_folder`.

    Raises:
        ImportError, FileNotFoundError, TypeError, ValueError: for the same reasons as in `load_table`.
        OSError, distillkit.locking.InUse: the cache cannot be written; see `open_folder`.
    """
    where, listed = _opened(table, folder, columns=(image, label, split, user), declared=classes)
    form: dict[str, Any] = {"size": size, "channels": channels, "normalization": normalization, "progress": progress}
    own: dict[str, Any] = {"test_fraction": test_fraction, "hold_out": hold_out, "background": background}
    return warn_of_repeats(open_pictures(_list_table, where, cache=cache, workers=workers, **form, **own, **listed))


def _opened(table: Any, folder: AnyPath | None, **options: Any) -> tuple[Path, dict[str, Any]]:
    """Return the folder of the pictures, and the arguments of `_list_table`: the data frame, its name and `options`."""
    pandas = optional("pandas", "data", "load_table")
    path, where, name = Path("table"), Path(), "table"
    if not isinstance(table, pandas.DataFrame | Mapping):
        path = check.path(table, "table")
        if not path.is_file():
            raise FileNotFoundError(f"no file {path}; expected a .csv, .tsv or .parquet of picture files and labels")
        where, name = path.parent, path.stem
    try:
        if isinstance(table, pandas.DataFrame | Mapping):
            rows = pandas.DataFrame(dict(table) if isinstance(table, Mapping) else table)  # pandas lists other mappings
        elif path.suffix.lower() == ".parquet":
            rows = pandas.read_parquet(path)
        else:
            separator = "\t" if path.suffix.lower() == ".tsv" else ","
            rows = pandas.read_csv(path, sep=separator, dtype=str, keep_default_na=False, na_values=[""])
    except ImportError as error:
        raise ImportError(f"{path} needs pyarrow: pip install 'distillkit[data]'") from error
    except (ValueError, OSError) as error:
        raise ValueError(f"{path} is damaged or no table: {error}") from error
    if not len(rows):
        raise ValueError(f"table must be rows of a picture file and its label, at least one; {name} has no rows")
    rows = rows.set_axis([str(one) for one in rows.columns], axis=1)
    if twice := list(rows.columns[rows.columns.duplicated()]):
        raise ValueError(f"table must have columns of different names; {name} has several of the name {twice[0]!r}")
    return where if folder is None else check.path(folder, "folder"), {"rows": rows, "name": name, **options}


def _list_table(
    folder: Path,
    rows: Any,
    name: str,
    columns: tuple[str | None, str | Sequence[str] | None, str | None, str | None],
    declared: Sequence[str] | None,
) -> PictureList:
    """List the pictures of a table without opening them."""
    image, label, split, user = columns
    known = list(rows.columns)
    image = column(image, "image", known, (), IMAGE_COLUMNS + _FILES, _CALL)
    several = [] if label is None or isinstance(label, str) else [*check.sequence(label, "label", "names of columns")]
    if not several:
        other = [one for one in known if one != image]
        given = label if isinstance(label, str) else None
        label = column(given, "label", known, other if len(other) == 1 else (), LABEL_COLUMNS, _CALL)
    for what, one in (("split", split), ("user", user), *(("label", one) for one in several)):
        if one is not None and one not in known and (what, one) != ("split", "split"):
            raise ValueError(f"{what} must be one of the columns {', '.join(known)}, got {one!r}")
    problems: Problems = {}
    names = _texts(rows[image], "file", problems)
    files = _find(folder, names, problems)
    info: dict[str, Any] = {"dataset": name}
    if several:
        numbers = rows[several].apply(optional("pandas", "data", "load_table").to_numeric, errors="coerce")
        _note(problems, "rows whose labels are no numbers", names, numbers.isna().any(axis=1))
        classes, labels = tuple(several), torch.from_numpy(numbers.to_numpy("float32", na_value=0.0))
    else:
        texts = _texts(rows[label], "label", problems, names)
        classes = checked_class_names([str(one) for one in declared]) if declared is not None else _in_order(texts)
        number = {one: k for k, one in enumerate(classes)}
        _note(problems, "rows whose label is not in classes", texts, [bool(t) and t not in number for t in texts])
        labels = torch.tensor([number.get(text, 0) for text in texts])
        info |= {"classes": FOUND_LABELS} if declared is None else {}
        if alike := [one for one, count in Counter(map(str.lower, classes)).items() if count > 1]:
            warn(f"classes of {name} that differ only in upper and lower case are kept apart: {', '.join(alike)}")
    parts = ["train"] * len(rows)
    if split is not None and split in known:
        given_parts = _texts(rows[split], "split", problems, names)
        unknown = [bool(text) and text.lower() not in SPLITS for text in given_parts]
        _note(problems, f"rows whose split is none of {', '.join(SPLITS)}", given_parts, unknown)
        parts = [SPLITS.get(text.lower(), "train") for text in given_parts]
    indices = {part: [i for i, one in enumerate(parts) if one == part] for part in ("train", "test", "validation")}
    if not indices["train"]:
        problems[f"rows of other splits than train, by the column {split}"] = names
    owners = _texts(rows[user], "user", problems, names) if user is not None else []
    users = sorted(set(owners))
    place = {one: k for k, one in enumerate(users)}
    kept = {part: torch.tensor(own, dtype=torch.long) for part, own in indices.items() if own}
    of_users = {p: {"user": torch.tensor([place[owners[i]] for i in own.tolist()])} for p, own in kept.items() if users}
    key = hashlib.blake2b("\n".join(names).encode(), digest_size=8).hexdigest()
    return PictureList(
        {part: [files[i] for i in own.tolist()] for part, own in kept.items()},
        {part: labels[own] for part, own in kept.items()},
        classes, info, of_users, tuple(users), open_with="open_table", problems=problems, key=key,
    )  # fmt: skip


def _texts(values: Any, what: str, problems: Problems, names: Sequence[str] = ()) -> list[str]:
    """Return the values of a column as text, empty where they are missing, which is noted."""
    missing = [bool(one) for one in values.isna()]
    texts = ["" if lost else _text(value) for value, lost in zip(values.tolist(), missing)]
    _note(problems, f"rows without a {what}", names or [f"row {i}" for i in range(len(texts))], missing)
    return texts


def _text(value: Any) -> str:
    if isinstance(value, Mapping | bytes):
        raise TypeError("the table holds pictures, not files; read it with as_set(pandas.read_parquet(path))")
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value).strip()


def _note(problems: Problems, kind: str, names: Sequence[str], wrong: Sequence[bool]) -> None:
    if found := [name for name, one in zip(names, wrong) if one]:
        problems.setdefault(kind, []).extend(found)


def _in_order(labels: Sequence[str]) -> tuple[str, ...]:
    """Return the different labels, numbers by value and other names in alphabetical order."""
    found = sorted(set(labels))
    try:
        return tuple(sorted(found, key=float))
    except ValueError:
        return tuple(found)


def _find(folder: Path, names: Sequence[str], problems: Problems) -> list[Path]:
    """Return the file of each name, possibly by its name without ending. Names without a file are noted."""
    known: dict[Path, dict[str, list[Path]]] = {}
    files: list[Path] = []
    for name in names:
        file = folder / name
        if file.parent not in known:
            found = known.setdefault(file.parent, {})
            inside = sorted(file.parent.iterdir()) if file.parent.is_dir() else []
            for one in inside:
                if one.suffix.lower() in SUFFIXES:
                    found.setdefault(one.stem, []).append(one)
            found |= {one.name: [one] for one in inside}
        matching = known[file.parent].get(file.name, [file])
        files.append(matching[0])
        _note(problems, "names of several files; add the ending", [name], [len(matching) > 1])
    missing = [bool(name) and not file.is_file() for name, file in zip(names, files)]
    if any(missing):
        where = _elsewhere(folder, names[missing.index(True)])
        _note(problems, f"missing pictures{where}", names, missing)
    twice = Counter(file for name, file in zip(names, files) if name)
    _note(problems, "pictures in several rows; keep one row of each", names, [twice[file] > 1 for file in files])
    return files


def _elsewhere(folder: Path, name: str) -> str:
    """Return the folder in or beside `folder` that holds a missing file, as a remedy in an error message."""
    near = [one for place in (folder, folder.parent) if place.is_dir() for one in sorted(place.iterdir())]
    held = (one for one in near if any((one / f"{name}{ending}").is_file() for ending in ("", *SUFFIXES)))
    return next((f"; pass folder={str(one)!r}, which has the first of them" for one in held), "")
