"""FedDM with three clients on a folder of PNGs, as a user would write it."""

from __future__ import annotations

import inspect
from pathlib import Path

import torch


def users_code(folder: Path) -> tuple[object, float | None]:
    from distillkit.data import clients, load_folder, partition
    from distillkit.networks import ConvNet
    from fl import FedDM, simulate

    train, test = load_folder(folder, size=16)
    held = clients(train, partition.iid(train.labels, 3))
    method = FedDM(
        factory=lambda k: ConvNet(train.shape, k, width=8, depth=2), ipc=3, steps=5, server_epochs=30, server_batch=16
    )
    run = simulate(method, held, rounds=3, test=test, out=folder / "run", workers=2)
    return run.models[""], run.accuracy_last


def test_folder_of_pngs_runs_through_feddm_in_under_thirty_lines(tmp_path: Path) -> None:
    from PIL import Image

    generator = torch.Generator().manual_seed(0)
    for name, colour in (("red", 0), ("green", 1), ("blue", 2)):
        (tmp_path / "pngs" / name).mkdir(parents=True)
        for i in range(20):
            pixels = torch.randint(0, 120, (16, 16, 3), generator=generator, dtype=torch.uint8)
            pixels[:, :, colour] += 100
            Image.fromarray(pixels.numpy()).save(tmp_path / "pngs" / name / f"{i}.png")
    assert len(inspect.getsource(users_code).splitlines()) < 30
    _, accuracy = users_code(tmp_path / "pngs")
    assert accuracy is not None
    assert accuracy > 0.6
    assert (tmp_path / "pngs" / "run" / "checkpoint" / "model.safetensors").exists()
