from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType

import torch

from distillkit import LabeledImages
from distillkit.rng import derive
from distillkit.study import read_records
from tests.distillkit.study.sample_records import search_sizes
from tests.examples.test_condense import own_data


def test_every_method_is_measured_under_three_kinds_of_labels(script: ModuleType, tmp_path: Path) -> None:
    words = ["--preset", "smoke", "--out", str(tmp_path), "--workers", "1", "--device", "cpu"]
    script.main([*words, "--methods", "random", "deepinversion", "class-means-1", "--transfer", "vit"])
    records = read_records(tmp_path / "digits")
    assert {r.method for r in records} == {"random-1", "deepinversion-1", "class-means-1-1"}
    assert search_sizes(tmp_path / "digits") == {"digits": 1}
    for record in records:
        line = record.line
        assert set(line["labels"]) == {"row", "view", "teacher"}
        assert line["labels"]["teacher"] > 0.2
        assert set(line["cpu_seconds_labels"]) == {"row", "view", "vit"}
        assert 0 <= line["transfer"]["vit"] <= 1
        assert line["bytes"] == {"images": 4 * 10 * 256, "hard": 80, "row": 400, "view": 2 * 5 * 10 * 10}
        assert (line["epsilon"] is not None) == (record.method == "class-means-1-1")
        assert json.loads((record.folder / "config.json").read_text(encoding="utf-8"))["recipe"] is not None
    before = [r.line for r in records]
    script.main([*words, "--methods", "random", "deepinversion", "class-means-1", "--transfer", "vit"])
    assert [r.line for r in read_records(tmp_path / "digits")] == before


def test_tiles_and_random_tiles_have_equal_bytes_and_updates_and_stitching_copies(
    script: ModuleType, tmp_path: Path
) -> None:
    words = ["--preset", "smoke", "--out", str(tmp_path), "--workers", "1", "--device", "cpu"]
    script.main([*words, "--methods", "random-tiles", "dm-tiles", "stitch"])
    lines = {r.method: r.line for r in read_records(tmp_path / "digits")}
    assert set(lines) == {"random-tiles-1", "dm-tiles-1", "stitch-1"}
    for name in ("random-tiles-1", "dm-tiles-1"):
        assert lines[name]["images"] == 40
        assert lines[name]["bytes"] == {"images": 4 * 10 * 256, "hard": 320, "row": 1600, "view": 2 * 2 * 40 * 10}
    assert lines["stitch-1"]["images"] == 10
    assert lines["stitch-1"]["bytes"]["images"] == 4 * 10 * 256


def test_own_data_gets_a_row_and_one_teacher(script: ModuleType, tmp_path: Path) -> None:
    path = own_data(tmp_path / "mine.npz")
    words = ["--preset", "smoke", "--out", str(tmp_path / "out"), "--workers", "1", "--device", "cpu"]
    script.main([*words, "--datasets", str(path), "--methods", "random", "--size", "8"])
    records = read_records(tmp_path / "out" / "mine")
    assert [r.method for r in records] == ["random-1"]
    assert len({r.line["labels"]["teacher"] for r in records}) == 1
    assert (tmp_path / "out" / "mine" / "teacher-mine.safetensors").exists()


def test_inverted_images_have_the_real_images_classes_and_normalization(script: ModuleType) -> None:
    real = LabeledImages(torch.randn(20, 1, 8, 8, generator=derive(0)), torch.arange(20) % 2, num_classes=2)
    small = script.inverted(real, ipc=3, steps=1, lr=0.1, images=20, generator=0)
    assert small.counts().tolist() == [3, 3]
    assert small.normalization == real.normalization
