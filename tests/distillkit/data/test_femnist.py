from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from distillkit import Normalization
from distillkit.data import DATASETS
from tests.refused import refused

load_femnist = DATASETS["femnist"].load
TRAIN = {"all_data_0": {"f0002_01": 3, "f0001_41": 5}, "all_data_1": {"f0000_14": 2}}
TEST = {"all_data_0": {"f0002_01": 1, "f0001_41": 2}, "all_data_1": {"f0000_14": 1}}


def stored(user: str, part: str, count: int) -> tuple[Any, Any]:
    """Return a writer's pictures, bytes [n, 784], and labels."""
    rng = np.random.default_rng(sum(map(ord, user + part)))
    x = rng.integers(0, 256, (count, 784))
    x[:, 5:] *= user != "f0001_41"  # almost black, with a mean below 1
    return x, rng.integers(0, 62, count)


def shard(users: dict[str, int], part: str, whole: bool = False) -> dict[str, Any]:
    """Return one file of LEAF's `data_to_json.py` and `split_data.py`."""
    data = {}
    for user, count in users.items():
        x, y = stored(user, part, count)
        data[user] = {"x": (x if whole else (x / 255).round(6)).tolist(), "y": y.tolist()}
    return {"users": list(users), "num_samples": list(users.values()), "user_data": data}


def write(folder: Path, whole: bool = False) -> Path:
    for part, files in (("train", TRAIN), ("test", TEST)):
        (folder / part).mkdir(exist_ok=True)
        for name, users in files.items():
            text = json.dumps(shard(users, part, whole))
            (folder / part / f"{name}_niid_0_keep_0_{part}_9.json").write_text(text, encoding="utf-8")
    return folder


@pytest.mark.parametrize("whole", [False, True])  # k / 255 as the script writes, or k as the README says
def test_pixels_labels_and_writers(whole: bool, tmp_path: Path, global_rng_untouched: None) -> None:
    split = load_femnist(write(tmp_path, whole))
    assert (split.users, split.domains) == (("f0000_14", "f0001_41", "f0002_01"), ())
    # LEAF's relabel_class: 0..9 for digits, 10..35 for upper case, 36..61 for lower case
    assert [split.classes[k] for k in (0, 9, 10, 35, 36, 61)] == ["0", "9", "A", "Z", "a", "z"]
    for part, data, files in (("train", split.train, TRAIN), ("test", split.test, TEST)):
        assert (data.shape, data.num_classes, data.classes_given) == ((1, 28, 28), 62, True)
        assert data.info == {"dataset": "femnist", "split": part}
        counts = [pair for users in files.values() for pair in users.items()]
        assert data.columns["user"].tolist() == [split.users.index(user) for user, n in counts for _ in range(n)]
        for user, count in counts:
            mine = data[data.columns["user"] == split.users.index(user)]
            x, y = stored(user, part, count)
            assert np.array_equal((mine.pixels() * 255).round().view(count, 784).numpy(), x)
            assert mine.labels.tolist() == y.tolist()
    assert split.train.mean == pytest.approx(Normalization.of(split.train.pixels()).mean, abs=1e-6)
    assert split.test.normalization == split.train.normalization


def test_users_split_between_train_and_test_are_numbered_together(tmp_path: Path) -> None:
    write(tmp_path)
    for file in (tmp_path / "test").iterdir():
        file.unlink()
    held = shard({"f0001_00": 2}, "test")
    held["user_data"]["f9999_00"] = {"x": [], "y": []}  # what split_data.py leaves of users that it drops
    (tmp_path / "test" / "all_data_0.json").write_text(json.dumps(held), encoding="utf-8")
    half = Normalization([0.5], [0.5])
    split = load_femnist(tmp_path, size=8, channels=3, normalization=half)
    assert (split.train.shape, split.train.normalization) == ((3, 8, 8), half)
    assert split.users == ("f0000_14", "f0001_00", "f0001_41", "f0002_01")
    assert split.test.columns["user"].tolist() == [1, 1]
    assert split.train.columns["user"].unique().tolist() == [0, 2, 3]


def wrong(**change: Any) -> dict[str, Any]:
    """Return a file of one user with one change."""
    held = shard({"u": 2}, "train")
    own = held["user_data"]["u"]
    own.update({key: value for key, value in change.items() if key in ("x", "y")})
    return {**held, **{key: value for key, value in change.items() if key not in ("x", "y")}}


WHITE = [[1.0] * 784] * 2


@pytest.mark.parametrize(
    ("held", "words"),
    [
        ({"users": ["u"], "num_samples": [2]}, "not of LEAF's layout .*KeyError: 'user_data'"),
        ([1, 2], "not of LEAF's layout"),
        (wrong(num_samples=[2, 3]), "not of LEAF's layout"),
        (wrong(user_data=["u"]), "not of LEAF's layout"),
        (wrong(num_samples=[3]), "user 'u' must have as many pictures"),
        (wrong(num_samples=[1]), "user 'u' must have as many pictures"),
        (wrong(users=["v"]), "has pictures of 'u', who is not among its users"),
        (wrong(users=["v"], y=[0, 62]), "has pictures of 'u', who is not among its users"),
        (wrong(users=["u", "u"], num_samples=[2, 2]), "names a user twice"),
        (wrong(user_data={}), "user 'u' must have"),
        (wrong(x=[[1.0] * 784], y=[[0, 1]], num_samples=[1]), "user 'u' must have"),
        (wrong(x=[[1.0] * 1568]), "user 'u' must have"),
        (wrong(x=[[1.0] * 392] * 2), "user 'u' must have"),
        (wrong(x=[[1.0] * 784, [1.0]]), "user 'u' must have"),
        (wrong(x=[[127.002 / 255] * 784] * 2), "k / 255"),
        (wrong(x=[[-1 / 255] * 784] * 2), "k / 255"),
        (wrong(x=[[256] * 784] * 2), "k / 255"),
        (wrong(x=[[float("nan")] * 784] * 2), "k / 255"),
        (wrong(x=[[{}] * 784] * 2), "k / 255"),
        (wrong(x=WHITE, y=[0], num_samples=[1]), "labels y"),
        (wrong(x=WHITE, y=5), "user 'u' must have"),
        (wrong(x=WHITE, y=[0, 62]), r"labels y \(integers in 0\.\.61\)"),
        (wrong(x=WHITE, y=[0, -1]), "labels y"),
        (wrong(x=WHITE, y=[0, 0.5]), "labels y"),
        (wrong(x=WHITE, y=[0, float("nan")]), "labels y"),
    ],
)
def test_a_file_of_another_layout_is_refused_by_name(held: Any, words: str, tmp_path: Path) -> None:
    file = write(tmp_path) / "train" / "all_data_1_niid_0_keep_0_train_9.json"
    file.write_text(json.dumps(held), encoding="utf-8")
    refused(lambda: load_femnist(tmp_path), ValueError, f"{file.name}.*{words}")


def test_damaged_repeated_and_empty_files_are_refused_by_name(tmp_path: Path) -> None:
    file = write(tmp_path) / "train" / "all_data_1_niid_0_keep_0_train_9.json"
    for damaged in (file.read_bytes()[:-9], b"", b"\xff\xfe\x00"):
        file.write_bytes(damaged)
        refused(lambda: load_femnist(tmp_path), ValueError, rf"{file.name} is damaged or not of LEAF's layout")
    file.write_text(json.dumps(shard({"f0001_41": 0}, "train")), encoding="utf-8")
    refused(lambda: load_femnist(tmp_path), ValueError, rf"{file.name} has user 'f0001_41', .* another file of train")
    empty: dict[str, Any] = {"users": ["f0000_14"], "num_samples": [0], "user_data": {"f0000_14": {"x": [], "y": []}}}
    for other in (file, tmp_path / "test" / "all_data_1_niid_0_keep_0_test_9.json"):
        other.write_text(json.dumps(empty), encoding="utf-8")
    (tmp_path / "test" / "all_data_0_niid_0_keep_0_test_9.json").unlink()
    refused(lambda: load_femnist(tmp_path), ValueError, "test has no pictures")
