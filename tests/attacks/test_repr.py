"""Results of attacks have a repr of a line or a table, without hundreds of numbers."""

from __future__ import annotations

import torch
from torch import nn

from attacks import roc
from attacks.inversion import Gradient, invert_linear, invert_message
from attacks.membership import ShadowScores, leave_one_out
from distillkit.networks import build
from distillkit.rng import derive


def test_repr_of_a_curve_shows_its_area() -> None:
    curve = roc(torch.arange(40.0), torch.arange(40) >= 30)
    assert repr(curve) == "Roc(10 members, 30 others; AUC 1.000)"


def test_repr_of_an_inversion_shows_shapes_labels_and_losses() -> None:
    network = build(lambda: nn.Sequential(nn.Flatten(), nn.Linear(16, 3)), 0)
    sent = Gradient.of(network, torch.rand(2, 1, 4, 4, generator=derive(0)), torch.tensor([0, 2]))
    found = invert_message(sent, (1, 4, 4), 2, method="dlg", steps=1)
    shown = f"Reconstruction(images=float32 [2, 1, 4, 4], labels={found.labels.tolist()}, losses={found.losses})"
    assert repr(found) == shown
    assert repr(invert_linear(torch.ones(2, 20), 0.5 + torch.zeros(2))).startswith(
        "RecoveredInput(input=float32 [20], "
    )


def test_repr_of_shadows_shows_shapes_and_one_line_per_attack() -> None:
    inside = torch.rand(8, 60, generator=derive(1)) < 0.5
    scores = torch.randn(8, 60, generator=derive(2)) + inside
    made = ShadowScores(torch.cat([inside, ~inside]), {"model": torch.cat([scores, scores - 2.0 * inside + 1])})
    shown = "ShadowScores(inside=bool [16, 60], scores={'model': float64 [16, 60]}, population={}, labels=None)"
    assert repr(made) == shown
    assert repr(made.target(0, "model")).startswith("Target(scores=float64 [60], inside=bool [14, 60], ")
    for name, found in leave_one_out(made, fpr=0.1).items():
        assert repr(found) == str(found), name
        assert repr(found).startswith("TPR "), name
