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


class KeepBody(Tiny):
    """Network whose features are frozen."""

    def __init__(self, outputs: int) -> None:
        super().__init__(outputs)
        self.body.requires_grad_(False)


HEAD = Phase(steps=3, train="classifier.*")


@pytest.mark.parametrize(
    ("options", "body", "head"),
    [
        ({"steps": 7, "optimizer": "adam"}, 0.7, 0.7),
        ({"phases": [HEAD, Phase(steps=5, train="body.*"), Phase(steps=2)]}, 0.7, 0.5),
        ({"phases": [Phase(steps=2), Phase(steps=2)], "momentum": 0.5}, 2 * 0.1 * (1 + 1.5), 2 * 0.1 * (1 + 1.5)),
        ({"phases": [HEAD, Phase(steps=5, train="body.*")], "personal": "classifier.*"}, 0.5, None),
        ({"phases": [HEAD]}, 0.0, 0.3),
        ({"steps": 4, "factory": KeepBody}, 0.0, 0.4),
    ],
    ids=["adam", "phases", "momentum restarts in every phase", "personal", "untrained", "frozen"],
)
def test_every_shared_parameter_counts_the_steps_that_train_it(options: Any, body: float, head: float | None) -> None:
    wanted = {
        f"{n}.{kind}": rate for n, rate in (("body.0", body), ("classifier", head)) for kind in ("weight", "bias")
    }
    assert effective_lrs(**options) == pytest.approx({n: rate for n, rate in wanted.items() if rate is not None})


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
