from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from distillkit import LabeledImages
from distillkit.condense import Progress, distribution_matching, load_state, save_state
from distillkit.condense._pixel_descent import PixelDescent
from distillkit.condense._state import pack_arguments, restore_state
from distillkit.networks import FixedNetwork
from distillkit.normalization import IDENTITY
from tests.refused import refused

ARGUMENTS = {"lr": 1.0, "shape": (3, 8, 8), "name": "DM é"}


def state(step: int = 3) -> dict[str, torch.Tensor]:
    return {
        "images": torch.arange(6.0).view(2, 3).T,
        "step": torch.tensor(step),
        "loss": torch.tensor(0.5, dtype=torch.float64),
        "arguments": pack_arguments(ARGUMENTS),
    }


def test_foreign_and_missing_files_are_refused(tmp_path: Path) -> None:
    refused(lambda: load_state(tmp_path / "nothing"), FileNotFoundError, "should hold a condenser's state")
    foreign = tmp_path / "foreign"
    wrong: Any = {"images": torch.zeros(1), "step": 3}
    refused(lambda: save_state(foreign, wrong), TypeError, "^state must be a mapping of names to tensors")
    save_file({"images": torch.zeros(1)}, foreign)
    refused(lambda: load_state(foreign), ValueError, "is not a condenser's state")


def test_resuming_requires_equal_arguments_and_no_fewer_steps(tmp_path: Path) -> None:
    assert restore_state(None, ARGUMENTS, 5) is None
    path = save_state(tmp_path / "run", state())
    for given in (state(), MappingProxyType(state()), path, str(tmp_path / "run")):
        found = restore_state(given, ARGUMENTS, 3)
        assert found is not None
        assert int(found["step"]) == 3
    changed = {"shape": (3, 8, 8), "lr": 0.5, "new": 1}
    with pytest.raises(ValueError, match=r": lr=1.0 \(now 0.5\), name='DM é' \(now None\), new=None \(now 1\)$"):
        restore_state(state(), changed, 5)
    refused(lambda: restore_state(state(), ARGUMENTS, 2), ValueError, "already done 3 steps, but steps=2")
    for names in ([], ["step"], ["arguments"]):
        given, words = {name: state()[name] for name in names}, re.escape(str(names or "nothing"))
        refused(lambda g=given: restore_state(g, ARGUMENTS, 2), ValueError, f"a condenser's state, got .* {words}$")
    refused(lambda: restore_state(3, ARGUMENTS, 2), TypeError, "resume must be a state or the path of one, got int")


def test_progress_returns_copies() -> None:
    kept: dict[str, torch.Tensor] = {"images": torch.zeros(2), "step": torch.tensor(1), "arguments": torch.ones(3)}
    images, step, arguments = (value.clone() for value in kept.values())
    tensors = {"images": images, "step": step}
    taken = (progress := Progress(1, 2, torch.tensor(torch.inf), images, tensors, lambda: arguments)).state()
    images.add_(1)
    torch.testing.assert_close(taken, kept, rtol=0, atol=0)
    refused(lambda: progress.loss, FloatingPointError, "^the loss is inf in step 1: matching diverged; lower lr$")


@pytest.mark.parametrize(("accelerator", "read", "failed"), [
    (False, range(13), {3: 3, 10: 10, 13: 13}), (True, [None] * 9 + [9, 9, 9, 12], {3: 10, 10: 10, 12: 13}),
])  # fmt: skip
def test_losses_are_read_at_once_on_a_cpu_only(
    accelerator: bool, read: Any, failed: dict[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("distillkit.condense._pixel_descent.is_accelerator", lambda device: accelerator)

    def descend(first: int = 99) -> list[float | None]:
        told: list[float | None] = []
        how = {"lr": 1.0, "momentum": 0.0, "steps": 13, "arguments": {}, "seed": 0, "resume": None, "callback": None}
        run = PixelDescent(torch.zeros(1), identity=dict, **how)
        for k in run.remaining_steps():
            loss = torch.tensor(torch.nan if k + 1 >= first else float(k))
            run.report(run.step(lambda images: (loss, torch.ones(1))))  # noqa: B023
            told.append(run.loss)
        return told

    assert descend() == [*read]
    for first, step in failed.items():
        refused(lambda n=first: descend(n), FloatingPointError, f"^the loss is nan in step {step}: ")


@pytest.mark.parametrize("name", ["images", "velocity", "step"])
@pytest.mark.parametrize("accelerator", [False, True])
def test_callback_cannot_change_the_condensation(name: str, accelerator: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU writes through NumPy count, too, although PyTorch does not notice them."""
    monkeypatch.setattr("distillkit.condense._pixel_descent.is_accelerator", lambda device: accelerator)

    def overwrite(progress: Progress) -> None:
        value = progress.state_tensors[name].detach()
        (value if accelerator else value.numpy())[...] += 1

    network = FixedNetwork(nn.Sequential(nn.Flatten(), nn.Linear(4, 2)))
    data = LabeledImages(torch.randn(4, 1, 2, 2), torch.tensor([0, 0, 1, 1]), normalization=IDENTITY)
    call = partial(distribution_matching, data, networks=network, ipc=1, steps=2, progress=False)
    refused(lambda: call(callback=overwrite), ValueError, f"callback must not change {name}")
