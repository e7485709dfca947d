"""Whole private runs of several steps, with everything an audit needs.

The network is linear and every record has a pixel of its own, so the records' gradients are orthogonal and all of them
are as long as the clip. Along the gradient of a record, in units of the clip, a step releases N(b, sigma^2), where b is
1 if the record took part. Records that are left out show the other world: N(0, sigma^2). A run of a correct mechanism
thus has an independent score for each of 256 records. For sets of images, every class has one record or none. Under
replace-one, the records of the other world have the opposite gradient.

Noise and batches come from seeds, so that the outcome repeats; the epsilons are therefore nominal.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from scipy.stats import chi2, norm
from torch import Tensor, nn

from attacks.audit import ClaimTest, audit_claim, step_scores
from distillkit.networks import build
from distillkit.networks.samplers import FixedNetwork
from distillkit.normalization import Normalization
from distillkit.privacy import (
    ADD_OR_REMOVE_RECORD,
    REPLACE_RECORD,
    Account,
    EmbeddingNetworks,
    Event,
    Ledger,
    Passes,
    PrivateGradient,
    Secret,
    condense_private,
    image_sgd,
    train_private,
)
from distillkit.sets import LabeledImages

LEVEL, RECORDS, CLIP = 1e-4, 256, 0.25
HALF = RECORDS // 2


def linear() -> nn.Module:
    network = nn.Sequential(nn.Flatten(), nn.Linear(RECORDS, 2, bias=False)).double()
    nn.init.zeros_(network[1].weight)
    return network


def records(relation: str) -> LabeledImages:
    """Return one half of the records; under replace-one, the other half too, with the opposite label and gradient."""
    count = RECORDS if relation == REPLACE_RECORD else HALF
    images = torch.eye(RECORDS, dtype=torch.float64)[:count].view(-1, 1, 16, 16)
    return LabeledImages(images, (torch.arange(count) >= HALF).long(), num_classes=2)


class Recorder(torch.optim.SGD):
    """SGD that keeps the released gradients."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        super().__init__(parameters, lr=1e-3)
        self.seen: list[Tensor] = []

    def step(self, closure: Any = None) -> None:
        self.seen.append(self.param_groups[0]["params"][0].grad.clone())
        super().step(closure)


@dataclass
class Runs:
    """Released steps along the records' gradients, in clips.

    Attributes:
        inside, outside: steps of the records of one world and of the other, [n, T].
        totals: sum over all records of `inside`, [runs, T].
        ledger: ledger of one run.
        relation: the stated relation.
    """

    inside: Tensor
    outside: Tensor
    totals: Tensor
    ledger: Ledger
    relation: str

    @property
    def event(self) -> Event:
        (event,) = self.ledger.events
        return event

    @property
    def sensitivity(self) -> float:
        """The largest distance of two worlds, in clips."""
        return 2.0 if self.relation == REPLACE_RECORD else 1.0

    def audit(self) -> ClaimTest:
        """Test the stated epsilons on the scores of both worlds."""
        deltas = torch.logspace(-5, -0.5, 12, dtype=torch.float64).tolist()
        claim = [(self.ledger.guarantee(delta=d).nominal, d) for d in deltas]
        inside, outside = (
            step_scores(s / self.sensitivity, self.event.sigma, rate=self.event.rate)
            for s in (self.inside, self.outside)
        )
        return audit_claim(inside, outside, claim, confidence=1 - LEVEL)

    def deviations(self) -> dict[str, float]:
        """Return the laws that the charged event describes and the runs contradict, with their p-values.

        A correct mechanism contradicts any of them with probability at most `LEVEL` (Bonferroni). Sums over steps or
        records are taken as normal.
        """
        sigma, rate = self.event.sigma * self.sensitivity, self.event.rate
        (count, steps), mean = self.inside.shape, float(self.inside.mean())
        half = count // len(self.totals)
        spread = sigma**2 + rate * (1 - rate)
        below = 0.0 if self.sensitivity == 1 else -1.0
        found = {
            "noise": _variance(self.outside - below, sigma**2),
            "noise over steps": _variance((self.outside - below).sum(1), steps * sigma**2),
            "participation": 2 * norm.sf(abs(mean - rate) / math.sqrt(spread / (count * steps))),
            "participation over steps": _variance(self.inside.sum(1) - steps * rate, steps * spread),
            "participation over records": _variance(self.totals - half * rate, half * spread),
        }
        found |= {} if self.event.count == steps else {"number of steps": 0.0}
        return {law: float(p) for law, p in found.items() if p < LEVEL / 5}


def _variance(values: Tensor, expected: float) -> float:
    """Return the two-sided p-value of the chi-square test that centered values have a variance."""
    statistic, count = float(values.square().sum()) / expected, values.numel()
    return float(2 * min(chi2.cdf(statistic, count), chi2.sf(statistic, count)))


def observe(along: Tensor, ledger: Ledger, relation: str | None = None) -> Runs:
    """Return the runs of which every step is given along each record's gradient, in clips, [runs, T, records].

    The second half of the records is in the other world.
    """
    inside, outside = along.split(along.shape[2] // 2, dim=2)
    first, second = (part.transpose(1, 2).flatten(0, 1) for part in (inside, outside))
    return Runs(first, second, inside.sum(2), ledger, relation or ledger.guarantee().relation)


def along_pixels(gradients: list[list[Tensor]], denominator: float) -> Tensor:
    """Return released gradients [2, records] along each record's gradient, in clips, [runs, T, records]."""
    released = torch.stack([torch.stack(run) for run in gradients])
    return (released[:, :, 1] - released[:, :, 0]) * (denominator / CLIP / math.sqrt(2))


def train(seeds: range, *, sigma: float, rate: float, steps: int, relation: str = ADD_OR_REMOVE_RECORD) -> Runs:
    """Run `train_private` with each seed, under a ledger of the given relation."""
    data, size, seen = records(relation), RECORDS, []
    for seed in seeds:
        network, kept, ledger = build(linear, 0), list[Recorder](), Ledger(relation=relation)

        def optimizer(parameters: Iterable[nn.Parameter], kept: list[Recorder] = kept) -> Recorder:
            kept.append(Recorder(parameters))
            return kept[0]

        train_private(
            network, data, size=size, sigma=sigma, clip=CLIP, rate=rate, steps=steps, optimizer=optimizer,
            ledger=Account(ledger, secret=seed), progress=False,
        )  # fmt: skip
        seen.append(kept[0].seen)
    return observe(along_pixels(seen, rate * size), ledger)


CLASSES, PIXELS = 64, torch.tensor([2.0, -1.0, 0.5, 1.0], dtype=torch.float64)


def one_per_class(*signs: float) -> LabeledImages:
    """Return one record in each class of the first half and of the second half, for each sign."""
    half = CLASSES // 2
    images = torch.cat([(s * PIXELS).view(1, 1, 2, 2).expand(half, -1, -1, -1) for s in signs])
    space = Normalization((0.5,), (0.25,))
    return LabeledImages(images, torch.arange(half * len(signs)), num_classes=CLASSES, normalization=space)


def pixels_as_embedding() -> FixedNetwork:
    network = build(lambda: nn.Sequential(nn.Flatten(), nn.Linear(4, 4), nn.Linear(4, CLASSES)).double(), 0)
    nn.init.eye_(network[1].weight)
    return FixedNetwork(network)


def step_images(seeds: range, *, sigma: float, rate: float, steps: int) -> Runs:
    """Run `image_sgd` with each seed, with one record in every second class."""
    embedding, clip, seen, ledger = EmbeddingNetworks(pixels_as_embedding(), match="embedding"), 0.1, [], Ledger()
    options: dict[str, Any] = {"size": CLASSES, "clip": clip, "lr": 1e-300, "ipc": 1, "networks": embedding}

    def keep(step: int, gradient: Tensor) -> None:
        seen.append(gradient.flatten(1))

    image_sgd(one_per_class(1.0, 1.0), **options, sigma=0.0, rate=1.0, steps=1, callback=keep, progress=False)
    direction = seen.pop() / clip
    for seed in seeds:
        ledger = Ledger()
        image_sgd(
            one_per_class(1.0), **options, sigma=sigma, rate=rate, steps=steps, callback=keep, progress=False,
            ledger=Account(ledger, secret=seed),
        )  # fmt: skip
    along = (torch.stack(seen).unflatten(0, (len(seeds), steps)) * direction).sum(3) * (rate / clip)
    return observe(along, ledger)


def condense(data: LabeledImages, epsilon: float, secret: int = 0) -> tuple[LabeledImages, Ledger]:
    """Run `condense_private` with one release and one step, which moves blank images to the released means."""
    ledger, blank = Ledger(), one_per_class(0.0, 0.0)
    made = condense_private(
        data, size=torch.ones(CLASSES), epsilon=epsilon, ipc=1, networks=pixels_as_embedding(), num_networks=1,
        clip=1.0, passes=Passes(first_share=0.0), init=blank, steps=1, lr=0.5, ledger=Account(ledger, secret=secret),
        progress=False,
    )  # fmt: skip
    return made, ledger


def own_mechanism(seeds: range, *, noise: float, charged: float, steps: int) -> Runs:
    """Release sums of all records' clipped gradients with a noise of `noise` clips, charged under replace-one."""
    rows = torch.zeros(RECORDS, 2, RECORDS, dtype=torch.float64)
    rows[range(RECORDS), 1, range(RECORDS)] = torch.ones(RECORDS).double().where(torch.arange(RECORDS) < HALF, -1.0)
    rows[:, 0] = -rows[:, 1]
    weights, seen = nn.Parameter(torch.zeros(2, RECORDS, dtype=torch.float64)), []
    for seed in seeds:
        private = PrivateGradient([weights], sigma=noise, clip=CLIP, denominator=1.0, secret=Secret(seed))
        ledger = Ledger(relation=REPLACE_RECORD)
        ledger.spend(Event("own", charged, count=steps, relation=REPLACE_RECORD))
        seen.append([])
        for _ in range(steps):
            private.add([rows])
            seen[-1] += private.take()
    return observe(along_pixels(seen, 1.0), ledger)


def condense_sets(seeds: range) -> Runs:
    """Publish a set with each seed. The relation in its `info` says which two worlds are compared."""
    stated = condense(one_per_class(1.0), 4.0)[0].info["relation"]
    signs = (1.0, -1.0) if stated == REPLACE_RECORD else (1.0,)
    empty, both = (condense(one_per_class(1.0, 1.0)[:n], math.inf)[0].images.flatten(1) for n in (0, CLASSES))
    made = [condense(one_per_class(*signs), 4.0, seed) for seed in seeds]
    seen = torch.stack([images.images.flatten(1) for images, _ in made])
    return observe(((seen - empty) * (both - empty)).sum(2)[:, None], made[0][1], stated)
