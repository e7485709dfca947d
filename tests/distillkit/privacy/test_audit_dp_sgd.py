"""Audit of whole `train_private` calls: fresh runs with and without a canary, compared by their releases.

One step at rate 1 and sigma 1 is the Gaussian mechanism of mu = 1: whatever is released, two worlds are no further
apart than N(0, 1) and N(1, 1) in units of the clip. The score of a run is the released step along the canary's own
gradient, in clips; runs with the canary lie one clip higher, with noise of one clip.

The network is a bag of 16 patches through one linear layer, logits averaged: if the gradient of each patch were clipped
by itself, the canary of 16 equal patches would move the sum by 16 clips.
"""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attacks.audit import audit_claim
from distillkit.networks import build
from distillkit.privacy import Ledger, gaussian_delta, gaussian_epsilon, train_private
from distillkit.rng import derive
from distillkit.sets import LabeledImages

pytestmark = pytest.mark.slow  # like the other audits of whole runs

RUNS, CLIP, RECORDS, SIGMA, DELTA = 100, 1e-3, 6, 1.0, 1e-5
PROFILE = [(e, gaussian_delta(SIGMA, e)) for e in (0.0, 0.25, 0.5, 1.0, 2.0, 3.0, 4.0)]


class Patches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.patch(x.reshape(-1, 4)).view(len(x), 16, 2).mean(1)


CANARY = torch.tensor([2.0, -1.0, 0.5, 1.0]).repeat(16).view(1, 1, 8, 8)
IMAGES = torch.cat([CANARY, torch.randn(RECORDS, 1, 8, 8, generator=derive(0))])
DATA = LabeledImages(IMAGES, torch.zeros(RECORDS + 1, dtype=torch.int64), num_classes=2)


def released(data: LabeledImages, ledger: Ledger | None = None) -> Tensor:
    """Return the change of the public weights by one private step, in clips."""
    model = build(Patches, 0)
    before = torch.cat([p.detach().flatten() for p in model.parameters()])
    train_private(model, data, size=RECORDS, sigma=SIGMA, clip=CLIP, rate=1.0, steps=1, lr=1.0, ledger=ledger)
    return (before - torch.cat([p.detach().flatten() for p in model.parameters()])) * (RECORDS / CLIP)


def worlds() -> tuple[Tensor, Tensor]:
    """Return the scores of fresh runs with the canary and without it."""
    model = build(Patches, 0)
    loss = F.cross_entropy(model(DATA.images[:1]), DATA.labels[:1])
    direction = torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(model.parameters()))])
    direction /= direction.norm()
    inside, outside = (torch.stack([released(d) @ direction for _ in range(RUNS)]) for d in (DATA, DATA[1:]))
    return inside.double(), outside.double()


def test_dp_sgd_satisfies_its_claim() -> None:
    """The claim is not refuted, and the measured distance and noise are those that are accounted.

    A true claim is refuted with probability 1e-5. The difference of two means of 100 has a standard error of 0.1414
    clips, the pooled standard deviation one of 5.0 %: 4.5 of each leave a false alarm of 1.4e-5 in all, and tell
    apart what is half or twice as far or as loud.
    """
    ledger = Ledger(delta=DELTA)
    released(DATA, ledger)
    assert ledger.epsilon() == pytest.approx(gaussian_epsilon(SIGMA, DELTA), rel=1e-6)
    inside, outside = worlds()
    assert not audit_claim(inside, outside, PROFILE, confidence=1 - 1e-5).refuted
    distance = float(inside.mean() - outside.mean())
    noise = math.sqrt(float(inside.var() + outside.var()) / 2)
    assert distance == pytest.approx(1.0, abs=4.5 * math.sqrt(2 / RUNS))
    assert noise == pytest.approx(SIGMA, rel=4.5 / math.sqrt(4 * (RUNS - 1)))
