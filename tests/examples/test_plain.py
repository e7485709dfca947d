"""The short examples run in an empty folder, one of them in an interpreter of its own."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from PIL import Image
from sklearn.datasets import load_digits

from tests.scripts import run_script

ROOT = Path(__file__).parents[2]


def run(name: str, folder: Path, *, alone: bool = False) -> str:
    return run_script(ROOT / f"examples/plain/{name}.py", folder, alone=alone)


def images_of(folder: Path) -> None:
    """Write some digits of three classes into `my-images`, one folder per class."""
    digits = load_digits()
    for label in range(3):
        for number, pixels in enumerate(digits.images[digits.target == label][:40]):
            path = folder / "my-images" / str(label) / f"{number}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray((pixels * 255 / 16).astype("uint8")).save(path)


def test_condense_folder(tmp_path: Path) -> None:
    images_of(tmp_path)
    assert "random real" in run("condense_folder", tmp_path, alone=True)
    assert (tmp_path / "small.safetensors").is_file()
    assert (tmp_path / "small.png").is_file()


def test_fedavg_by_hand_equals_simulate_bitwise(tmp_path: Path) -> None:
    assert "by hand are equal" in run("fedavg_by_hand", tmp_path)


def test_paper_method(tmp_path: Path) -> None:
    averaged, distilled = (
        [float(value) for value in re.findall(r"0\.\d+", line)] for line in run("paper_method", tmp_path).splitlines()
    )
    assert distilled[0] > averaged[0]


def test_private_set(tmp_path: Path) -> None:
    lines = run("private_set", tmp_path).splitlines()
    low, high = (float(re.findall(r"accuracy (0\.\d+)", line)[0]) for line in lines)
    assert [re.findall(r"epsilon (\d)", line) for line in lines] == [["1"], ["8"]]
    assert 0.3 < low < high
    assert {path.name for path in tmp_path.iterdir()} == {"private-1.safetensors", "private-8.safetensors"}


def test_attack_set(tmp_path: Path) -> None:
    real, noise = (float(re.findall(r"TPR (\d+\.\d) %", line)[0]) for line in run("attack_set", tmp_path).splitlines())
    assert real > noise


def test_own_addon(tmp_path: Path) -> None:
    plain, l2, both = run("own_addon", tmp_path).splitlines()
    assert plain.startswith("FedAvg(): 0.")
    assert l2.startswith("FedAvg(L2): 0.")
    assert both.startswith("FedAvg(L2, FedProx): 0.")
    assert len({line.split()[-1] for line in (plain, l2)}) == 2


def test_opacus_loop(tmp_path: Path) -> None:
    with torch.random.fork_rng(devices=[]):  # Opacus draws from the global generator
        torch.manual_seed(0)
        ours, theirs, audit = run("opacus_loop", tmp_path).splitlines()
    epsilon, opacus = (float(re.findall(r"epsilon:? (\d+\.\d+)", line)[0]) for line in (ours, theirs))
    assert "Poisson sampling" in ours
    assert epsilon == pytest.approx(opacus, rel=0.01)
    bound, reached = map(float, re.findall(r"\d+\.\d+", audit))
    assert bound < epsilon
    assert reached > 0.3
