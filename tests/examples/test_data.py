"""`--data`: the root of the datasets or a folder of user images, distinguished by its content."""

from __future__ import annotations

import json
from argparse import Namespace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from distillkit.data import load, partition
from distillkit.serialization import to_config
from distillkit.study import Task
from shared import data
from shared.options import command_line, parse_arguments
from tests.examples.image_folder import folder
from tests.refused import refused


def words(*given: object) -> Namespace:
    parser = command_line("Nothing.", out="runs/nothing", presets={"cpu": {}}, pictures=True)
    return parse_arguments(parser, list(map(str, given)))


def test_dataset_root_and_user_images_are_distinguished(tmp_path: Path) -> None:
    mine, split = folder(tmp_path / "mine"), folder(tmp_path / "split" / "train").parent
    for name in ("MNIST/raw", "cifar-10-batches-py", "MNIST-M", "empty"):
        (tmp_path / name.split("/")[0] / "root" / name).mkdir(parents=True)
    (tmp_path / "npz").mkdir()
    (tmp_path / "npz" / "cifar10.npz").touch()
    folder(tmp_path / "npz" / "photos")
    for root in ("MNIST/root", "cifar-10-batches-py/root", "MNIST-M/root", "empty/root", "npz"):
        found = words("--data", tmp_path / root)
        assert (found.data, found.pictures) == (tmp_path / root, []), root
    for own in (mine, split, tmp_path / "npz" / "cifar10.npz"):
        found = words("--data", own)
        assert (found.data, found.pictures) == (None, [own])
    found = words("--data", mine, tmp_path / "npz")
    assert (found.data, found.pictures) == (None, [mine, tmp_path / "npz"])
    assert (words().data, words().pictures) == (None, [])


def test_missing_folder_is_refused_with_the_expected_content(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        words("--data", tmp_path / "nowhere")
    said = capsys.readouterr().err
    assert f"no such file or folder: {tmp_path / 'nowhere'}" in said
    assert "MNIST/raw" in said
    assert "class/picture.png" in said


def test_one_folder_is_partitioned_and_several_are_clients(tmp_path: Path) -> None:
    deal = partial(partition.iid, clients=4)
    one = data.own_task(words("--data", folder(tmp_path / "my cats"), "--size", 8), partition=deal, rounds=3)
    assert (one.name, one.rounds, one.load().train.shape) == ("my-cats", 3, (3, 8, 8))
    assert [len(c) for c in one.assign(one.load(), 0).clients] == [4, 4, 4, 4]
    places = [folder(tmp_path / where / "photos", shade, mode) for where, shade, mode in
              (("north", 0, "RGB"), ("south", 100, "RGB"), ("west", 9, "L"))]  # fmt: skip
    three = data.own_task(words("--data", *places, "--size", 8), partition=deal)
    split = three.load()
    parse_split = three.assign(split, 0)
    assert split.domains == ("0-photos", "1-photos", "2-photos")
    assert [len(c) for c in parse_split.clients] == [16, 16, 16]
    shades = [float(c.pixels()[:, 0].mean()) for c in parse_split.clients]
    assert shades[0] == 0
    assert shades[1] == pytest.approx(100 / 255, abs=1e-6)
    assert all(json.dumps(to_config(task, store=tmp_path / "store", name="task")) for task in (one, three))


def test_npz_file_is_partitioned_too(tmp_path: Path) -> None:
    pixels, labels = np.zeros((6, 8, 8), np.uint8), np.arange(6) % 2
    pixels[3:] = 200
    parts = {f"{part}_{kind}": array for part in ("train", "test") for kind, array in
             (("images", pixels), ("labels", labels))}  # fmt: skip
    np.savez(tmp_path / "scans.npz", **parts)
    task = data.own_task(words("--data", tmp_path / "scans.npz", "--size", 8))
    assert (task.name, len(task.load().test)) == ("scans", 6)
    assert torch.equal(task.load().train.labels, torch.tensor(labels))


def test_missing_dataset_ends_the_script_with_instructions(tmp_path: Path) -> None:
    deal = partial(partition.iid, clients=2)
    for name, need in (("cifar10", "data_batch_1"), ("mnist", "train-images-idx3-ubyte")):
        task = Task("missing", partial(load, name, root=str(tmp_path)), deal)
        with pytest.raises(SystemExit) as ended:
            data.require_data([task])
        assert all(word in str(ended.value) for word in (need, f"{name}.npz", "--data", "class/picture.png"))
    (tmp_path / "bad" / "cats").mkdir(parents=True)
    (tmp_path / "bad" / "cats" / "a.png").write_text("no picture", encoding="utf-8")
    task = data.own_task(words("--data", tmp_path / "bad"), partition=deal)
    refused(lambda: data.require_data([task]), SystemExit, r"cannot be read: cats/a\.png")
