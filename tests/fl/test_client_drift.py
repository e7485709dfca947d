"""Client drift: distance between the clients' updates, and between their models' features."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fl import FedAvg, simulate
from fl.addons import ClientDrift, FedAvgM, NaiveVHL, SharedPool
from fl.averaging.addon import AddOn
from tests.fl.federations import Tiny, federation, images
from tests.refused import refused

TEST = images(70, 77)


def play(*addons: AddOn, rounds: int = 2, clients: Any = None, data: Any = None, **options: Any) -> Any:
    method = FedAvg(
        *addons, **{"factory": lambda k: Tiny(k, norm=True), "lr": 0.1, "momentum": 0.5, "batch": 6, **options}
    )
    return simulate(
        method, clients or federation(), rounds=rounds, participation=1 if clients else 3,
        server_data=data or {"test": TEST}, seed=5, progress=False,
    )  # fmt: skip


class Peek(AddOn):
    """Keep each client's update and network."""

    def __init__(self, kept: dict[tuple[int, int], tuple[Tensor, Any]]) -> None:
        self.kept = kept

    def after_training(self, local: Any, update: Any, reply: Any) -> None:
        flat = torch.cat([u.flatten() for u in update.values()]).double()
        self.kept[local.round, local.client.id] = flat, local.at(local.state())


def direct(updates: Tensor, features: Tensor) -> dict[str, float]:
    """Compute the measurements from all updates [K, P] and features [K, N, d]."""
    distance = (updates - updates.mean(0)).norm(dim=1).square().mean().sqrt()
    pairs = [(i, j) for i in range(len(features)) for j in range(len(features)) if i != j]
    cosines = [torch.cosine_similarity(features[i], features[j], dim=1).mean() for i, j in pairs]
    return {
        "distance": float(distance),
        "relative": float(distance / updates.norm(dim=1).square().mean().sqrt()),
        "features": 1 - sum(map(float, cosines)) / len(cosines),
    }


@pytest.mark.golden("ClientDrift", source="Tang et al., ICML 2022, section 4.3; definitions ours")
@pytest.mark.parametrize("beside", [(), (NaiveVHL(classes=3, per_class=4, options={"width": 8}), FedAvgM(0.5))])
def test_column_equals_its_definition(beside: tuple[AddOn, ...]) -> None:
    kept: dict[tuple[int, int], tuple[Tensor, Any]] = {}
    run = play(ClientDrift("test"), Peek(kept), *beside)
    for row in run.rows:
        updates, networks = zip(*(kept[row["round"], k] for k in row["drawn"]))
        with torch.no_grad():
            features = torch.stack([n.features(TEST.images) for n in networks]).double()
        found, want = row["client_drift"], direct(torch.stack(updates), features)
        assert {name: pytest.approx(value, rel=1e-4) for name, value in want.items()} == found
        assert 0 < found["relative"] < 1


def test_column_exists_only_in_its_rounds_and_with_two_updates() -> None:
    found = [list(row.get("client_drift", ())) for row in play(ClientDrift(every=2)).rows]
    assert found == [[], ["distance", "relative"]]
    pool = SharedPool((255 * TEST.pixels()).to(torch.uint8), keep=5, steps=1, batch=4, rate=0.5)
    run = play(ClientDrift(), pool, rounds=4)
    assert ["client_drift" in row for row in run.rows] == [True, True, False, True]
    assert all("client_drift" not in row for row in play(ClientDrift("test"), clients=federation()[:1]).rows)


def test_refusals() -> None:
    refused(lambda: play(ClientDrift("pool")), ValueError, r"needs images on the server: server_data=\{'pool'")
