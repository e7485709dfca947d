"""Effective learning rates: momentum, damping, Adam, phases, personal and frozen parameters."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from fl import FedAvg, simulate
from fl.averaging.addon import AddOn
from fl.averaging.optimizer import effective_lr
from fl.batches import Phase
from tests.fl.federations import Tiny, federation


class Peek(AddOn):
    """Records the effective learning rates of a training."""

    def __init__(self, seen: list[dict[str, float]]) -> None:
        self.seen = seen

    def after_training(self, local: Any, update: Any, reply: Any) -> None:
        self.seen.append(local.effective_lrs)


def effective_lrs(factory: Any = Tiny, **options: Any) -> dict[str, float]:
    seen: list[dict[str, float]] = []
    method = FedAvg(Peek(seen), factory=factory, lr=0.1, batch=4, **options)
    simulate(method, federation()[:1], rounds=1, progress=False)
    return seen[0]


def test_adam_moves_by_its_rate_at_every_step() -> None:
    assert list(effective_lrs(steps=7, optimizer="adam").values()) == pytest.approx([0.7] * 4, rel=1e-6)


def test_every_parameter_counts_the_steps_of_its_own_phases() -> None:
    found = effective_lrs(phases=[Phase(steps=3, train="classifier.*"), Phase(steps=5, train="body.*"), Phase(steps=2)])
    assert found["classifier.weight"] == pytest.approx(0.5)
    assert found["body.0.weight"] == pytest.approx(0.7)


def test_momentum_restarts_in_every_phase() -> None:
    found = effective_lrs(phases=[Phase(steps=2), Phase(steps=2)], momentum=0.5)
    assert found["body.0.bias"] == pytest.approx(2 * 0.1 * (1 + 1.5))


def test_proximal_pull_continues_across_phases() -> None:
    def sgd(params: list[torch.Tensor]) -> torch.optim.Optimizer:
        return torch.optim.SGD(params, lr=0.1, weight_decay=0.5)

    assert effective_lr(sgd, [2, 3], 0.7) == pytest.approx(effective_lr(sgd, [5], 0.7))
    assert effective_lr(sgd, [2], 0.7) == pytest.approx(0.1 + 0.1 * (1 - 0.7 * 0.1))
    assert effective_lr(sgd, [], 0.7) == 0


def test_personal_parameters_have_no_rate_and_frozen_ones_rate_zero() -> None:
    phases = [Phase(steps=3, train="classifier.*"), Phase(steps=5, train="body.*")]
    found = effective_lrs(personal="classifier.*", phases=phases)
    assert found == {"body.0.weight": pytest.approx(0.5), "body.0.bias": pytest.approx(0.5)}

    def frozen(outputs: int) -> nn.Module:
        net = Tiny(outputs)
        net.body.requires_grad_(False)
        return net

    found = effective_lrs(factory=frozen, steps=4)
    assert (found["body.0.weight"], found["classifier.bias"]) == (0, pytest.approx(0.4))
