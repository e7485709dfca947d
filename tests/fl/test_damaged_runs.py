"""A run with a damaged file is refused by the file's name, or resumed to the same result."""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from fl import CheckpointError, FedAvg, Run, simulate
from fl.addons import SCAFFOLD
from tests.fl.federations import Tiny, federation, images


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-9])


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) * 2 // 3] ^= 4
    path.write_bytes(bytes(data))


def become_a_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def swap(path: Path) -> None:
    """Put the file of another client, round or run in its place, if there is one of this kind."""
    others = [p for p in sorted(path.parents[1].rglob(f"*{path.suffix}")) if p != path and p.is_file()]
    if others:
        shutil.copy(others[0], path)


DAMAGES: dict[str, Callable[[Path], object]] = {
    "missing": Path.unlink,
    "cut": cut,
    "flipped": flip,
    "swapped": swap,
    "empty": lambda path: path.write_bytes(b""),
    "a folder": become_a_folder,
    "longer": lambda path: path.write_bytes(path.read_bytes() + b"x"),
    "last line": lambda path: path.write_bytes(b"".join(path.read_bytes().splitlines(True)[:-1])),
    "first line": lambda path: path.write_bytes(b"".join(path.read_bytes().splitlines(True)[1:])),
    "no text": lambda path: path.write_bytes(b"\xff\xfe{\x80"),
    "another mapping": lambda path: path.write_bytes(b"{}"),
    "no mapping": lambda path: path.write_bytes(b"null"),
    "deep": lambda path: path.write_bytes(b"[" * 100_000 + b"]" * 100_000),
}


def play(out: Path, rounds: int, *, resume: bool = False) -> Run:
    method, test = FedAvg(SCAFFOLD(), factory=Tiny, lr=0.1), images(30, 99)
    return simulate(method, federation()[:2], rounds=rounds, out=out, resume=resume, seed=1, test=test, progress=False)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Run]:
    out = tmp_path_factory.mktemp("run")
    play(out / "first", 2)
    return out / "first", play(out / "later", 3)


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_file_is_named_or_changes_nothing(damage: str, whole: tuple[Path, Run], tmp_path: Path) -> None:
    source, expected = whole
    names = sorted(p.relative_to(source) for p in source.rglob("*") if p.is_file() and p.suffix != ".lock")
    assert len(names) >= 9
    refused: list[tuple[str, str]] = []
    for name in names:
        out = tmp_path / "-".join(name.parts)
        shutil.copytree(source, out)
        DAMAGES[damage](out / name)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                found = play(out, 3, resume=True)
        except CheckpointError as error:
            refused.append((name.name, str(error)))
        else:
            assert [row["accuracy"] for row in found.rows] == [row["accuracy"] for row in expected.rows], name
            pairs = zip(found.models[""].parameters(), expected.models[""].parameters(), strict=True)
            assert all(torch.equal(one, other) for one, other in pairs), name
    assert refused
    assert all(name in said for name, said in refused), refused
