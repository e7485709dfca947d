"""FedAvg of the engine is bitwise equal to plain FedAvg."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from distillkit.networks import build
from fl import ClientOptimizer, FedAvg, simulate
from tests.fl import plain_fedavg
from tests.fl.federations import Tiny, images

SIZES = [40, 7, 12, 25, 33, 2]


def both_weights(sizes: list[int], m: int, workers: int = 1, **options: Any) -> list[dict[str, torch.Tensor]]:
    """Return the weights after plain loops and after a run from the same initial weights, with batch-norm buffers."""
    net = build(lambda: Tiny(3, norm=True), 5)
    sets = [images(count, seed=k) if count else images(1, seed=k)[:0] for k, count in enumerate(sizes)]
    rounds, seed = options.pop("rounds", 3), options.pop("seed", 11)
    plain = plain_fedavg.server_executes(
        net, [(s.images, s.labels) for s in sets], rounds=rounds, m=m, seed=seed, **options
    )
    optimizer = ClientOptimizer(weight_decay=options.pop("decay", 0.0), lr_decay=options.pop("lr_decay", 1.0))
    method = FedAvg(
        factory=lambda outputs: Tiny(outputs, norm=True), initial=net.state_dict(), optimizer=optimizer, **options
    )
    run = simulate(method, sets, rounds=rounds, participation=m, seed=seed, workers=workers, progress=False)
    return [plain, run.server.state[FedAvg.model]]


@pytest.mark.golden("FedAvg", source="McMahan et al., AISTATS 2017, Algorithm 1")
@pytest.mark.parametrize(
    ("sizes", "m", "options"),
    [
        (SIZES, 6, {"lr": 0.1}),
        (SIZES, 3, {"lr": 0.1, "momentum": 0.9, "lr_decay": 0.7, "epochs": 2, "batch": 10, "rounds": 5}),
        (SIZES, 3, {"lr": 0.1, "momentum": 0.9, "lr_decay": 0.7, "decay": 0.1, "epochs": 2, "batch": 10, "rounds": 5}),
        (SIZES, 2, {"lr": 0.05, "momentum": 0.5, "lr_decay": 0.9, "batch": 8, "rounds": 6, "seed": 3, "workers": 2}),
        ([9, 0, 14], 2, {"lr": 0.1, "batch": 4, "rounds": 4}),
        ([1, 30], 2, {"lr": 0.1, "batch": 32}),
    ],
    ids=[
        "all take part",
        "some, momentum and decay",
        "weight decay too",
        "two workers",
        "an empty client",
        "one image",
    ],
)
def test_fedavg_equals_the_papers_algorithm_bitwise(sizes: list[int], m: int, options: dict[str, Any]) -> None:
    plain, run = both_weights(sizes, m, **options)
    assert plain.keys() == run.keys()
    assert {"body.1.running_mean", "body.1.num_batches_tracked"} <= plain.keys()
    assert [name for name in plain if not torch.equal(plain[name], run[name])] == []
