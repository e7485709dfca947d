"""Which pictures a dataset has, with labels and owners, apart from reading them."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from torch import Tensor

from distillkit.data.readers.folder import Size, read_parts
from distillkit.data.readers.folder_layout import Listing
from distillkit.data.split import Split, assemble
from distillkit.normalization import Normalization

__all__ = ["Listing", "columns_of", "pictures_in", "read_listing", "require"]

_OPENS = {"flair": "open_flair", "celeba": "open_celeba", "leaf-celeba": "open_leaf_celeba"}


def read_listing(
    listing: Listing, size: Size | None, channels: int | None, normalization: Normalization | None, progress: bool
) -> Split:
    """Read all pictures of a listing into memory.

    Args:
        listing: what to read.
        size, channels, normalization, progress: see `load_folder`.

    Raises:
        ValueError: a picture that cannot be read (it is named), pictures that differ in size or channels, or more of
            them than the machine's memory holds.
    """
    instead = _OPENS.get(listing.info["dataset"], "open_dataset")
    return assemble(
        read_parts(listing.files, size, channels, instead=instead, progress=progress),
        listing.labels,
        listing.classes,
        normalization,
        listing.info,
        columns=listing.columns,
        users=listing.users,
    )


def require(folder: Path, names: list[str], what: str, source: str) -> None:
    """Refuse a folder that lacks files or folders.

    Args:
        folder: where they should be.
        names: of them, below it.
        what: the dataset, for the message.
        source: where it comes from.

    Raises:
        FileNotFoundError: names what is missing, the first five of many.
    """
    if missing := [name for name in names if not (folder / name).exists()]:
        more = f" and {len(missing) - 5} more" if len(missing) > 5 else ""
        raise FileNotFoundError(f"{what} is not complete in {folder}: missing {', '.join(missing[:5])}{more}; {source}")


def pictures_in(folder: Path, names: dict[str, list[str]], source: str) -> dict[str, list[Path]]:
    """The pictures of each part, all of which must be there.

    Args:
        folder: in which they lie.
        names: by part, of the files.
        source: where they come from, for the message.

    Raises:
        FileNotFoundError: some are missing; says how many, and one of them.
    """
    there = set(os.listdir(folder)) if folder.is_dir() else set()
    if missing := [name for own in names.values() for name in own if name not in there]:
        raise FileNotFoundError(f"{folder} lacks {len(missing)} pictures, such as {missing[0]}; {source}")
    return {part: [folder / name for name in own] for part, own in names.items()}


def columns_of(owners: dict[str, list[str]], users: list[str]) -> dict[str, dict[str, Tensor]]:
    """The column `user` of each part.

    Args:
        owners: by part, the name of each picture's user.
        users: all names, in the order in which they are numbered.
    """
    number = {user: i for i, user in enumerate(users)}
    return {
        part: {"user": torch.tensor([number[user] for user in own], dtype=torch.long)} for part, own in owners.items()
    }
