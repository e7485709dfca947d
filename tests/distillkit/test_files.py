"""Files are complete or absent, under concurrent writers and errors."""

from __future__ import annotations

import os
import re
import subprocess
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import SafetensorError

from distillkit._utils import files
from distillkit._utils.files import atomic_replace, read_tensors, sync_folder, write_atomically, write_tensors
from distillkit._utils.provenance import git_commit
from tests.refused import refused

KINDS = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.uint8, torch.bool)


def test_commit_says_whether_files_were_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def git(*words: str) -> str:
        command = ["git", "-c", "user.name=a", "-c", "user.email=a@b", *words]
        return subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, encoding="utf-8").stdout.strip()

    assert git_commit(tmp_path) is None
    git("init")
    (tmp_path / "a").write_text("1", encoding="utf-8")
    git("add", "a")
    git("commit", "-m", "a")
    (tmp_path / "b").touch()
    head = git("rev-parse", "--short=12", "HEAD")
    assert git_commit(tmp_path) == head
    (tmp_path / "a").write_text("2", encoding="utf-8")
    assert git_commit(tmp_path) == f"{head}+"
    monkeypatch.chdir(tmp_path)
    assert git_commit() == git_commit(Path(files.__file__).parent)  # whatever the current folder


def test_old_file_exists_until_the_block_ends(tmp_path: Path) -> None:
    path, handles = tmp_path / "a.txt", Path("/proc/self/fd")
    opened = len(os.listdir(handles)) if handles.exists() else 0
    write_atomically(path, "old")
    for text, error in (("half", RuntimeError), ("half", KeyboardInterrupt), ("new", None)):
        with pytest.raises(error) if error else nullcontext(), atomic_replace(path) as temporary:
            temporary.write_text(text, encoding="utf-8")
            assert path.read_text(encoding="utf-8") == "old"
            if error:
                raise error
        assert path.read_text(encoding="utf-8") == ("old" if error else "new")
        sync_folder(tmp_path)
        assert opened == (len(os.listdir(handles)) if handles.exists() else 0)  # nothing stays open
        assert list(tmp_path.iterdir()) == [path]


def test_os_error_names_the_file_and_keeps_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocked = tmp_path / "folder"
    (blocked / "inside").mkdir(parents=True)
    refused(lambda: write_atomically(blocked, "text"), OSError, f"^{re.escape(str(blocked))} is a folder")
    full = Mock(side_effect=SafetensorError("no space left"))
    monkeypatch.setattr("safetensors.torch.save_file", full)
    refused(lambda: write_tensors(tmp_path / "a", {}, {}), OSError, r"cannot write .*a: no space left")
    assert [p.name for p in tmp_path.iterdir()] == ["folder"]


def test_concurrent_threads_leave_one_complete_file(tmp_path: Path) -> None:
    path, size = tmp_path / "deep" / "a.bin", 1 << 16
    seen = set()

    def write(byte: int) -> None:
        for _ in range(20):
            write_atomically(path, bytes([byte]) * size)
            data = path.read_bytes()
            seen.add((len(data), len(set(data))))

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(write, range(4)))
    assert seen == {(size, 1)}
    assert list(path.parent.iterdir()) == [path]


@given(st.data())
def test_tensors_are_restored_bitwise(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    shapes = data.draw(st.lists(st.lists(st.integers(0, 3), max_size=3), min_size=1, max_size=3))
    tensors = {}
    for i, shape in enumerate(shapes):
        raw = torch.randint(0, 2, shape, generator=torch.Generator().manual_seed(i))
        tensors[f"t{i}"] = raw.to(data.draw(st.sampled_from(KINDS))).movedim(0, -1) if shape else raw.float()
    tensors["again"] = tensors["t0"]  # two names of one memory
    path = write_tensors(tmp_path_factory.mktemp("files") / "a.safetensors", tensors, {"format": "one", "fact": "ü"})
    found, facts = read_tensors(path, kind="one", content="a one")
    assert facts == {"format": "one", "fact": "ü"}
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor)


def test_no_flipped_bit_changes_what_is_read(tmp_path: Path) -> None:
    tensors = {"a": torch.arange(3.0), "b": torch.tensor([True, False]), "c": torch.tensor(7.0)}
    path = write_tensors(tmp_path / "a.safetensors", tensors, {"format": "one", "fact": "ü"})
    whole, refusals = path.read_bytes(), 0
    for place in range(len(whole)):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ (1 << place % 8)]) + whole[place + 1 :])
        try:
            found, facts = read_tensors(path, kind="one", content="a one")
        except ValueError as error:
            refusals += "a.safetensors is" in str(error)
        else:
            assert facts == {"format": "one", "fact": "ü"}
            assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())
    assert refusals > len(whole) - 9  # but for blanks at the end of the header


@pytest.mark.parametrize("umask", [0o002, 0o027])
def test_files_have_the_mode_of_the_umask(umask: int, tmp_path: Path) -> None:
    before = os.umask(umask)
    try:
        write_tensors(tmp_path / "a", {"a": torch.zeros(1)}, {"format": "one"})
        write_atomically(tmp_path / "b", "text")
    finally:
        os.umask(before)
    assert {p.stat().st_mode & 0o777 for p in tmp_path.iterdir()} == {0o666 & ~umask}


def test_another_type_of_file_is_refused_by_name(tmp_path: Path) -> None:
    path = write_tensors(tmp_path / "a.safetensors", {"a": torch.zeros(1)}, {"format": "one"})
    two, other = {"kind": "two", "content": "a two"}, tmp_path / "b"
    refused(lambda: read_tensors(path, **two), ValueError, r"a\.safetensors is not a two \(format 'one', want 'two'\)")
    refused(lambda: read_tensors(other, **two), FileNotFoundError, "b does not exist; it should hold a two")
    refused(lambda: read_tensors(tmp_path, **two), IsADirectoryError, "is a folder; give the path of a file")
